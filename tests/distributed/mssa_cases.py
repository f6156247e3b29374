"""``distributed.mssa`` against ``crate_kernels.mssa`` of one process."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

import crate_kernels
from crate_kernels import distributed
from crate_kernels._core import backends
from tests.distributed.common import drawn, own, same

BATCH, HEADS, HEAD_DIM = 2, 6, 4
FORMS = ("heads", "gather", "ring")


def results(run, w):
    """Return the outputs, and the gradient of a loss that reads each of them where it is finite."""
    w = w.detach().requires_grad_()
    outputs = run(w)
    loss = 0
    for out in outputs:
        finite = out.masked_fill(~out.detach().isfinite(), 0.0)
        loss = loss + (finite * finite.detach().cos() + finite.square()).sum()
    return [out.detach() for out in outputs], torch.autograd.grad(loss, w)[0]


def mask_of(seqlen, padding):
    """(batch, seqlen): None; a ragged end; a sequence without a token, and one that begins late."""
    if padding is None:
        return None
    kept = torch.ones(BATCH, seqlen, dtype=torch.bool)
    if padding == "right":
        kept[0, seqlen // 2 :] = False
    else:
        kept[0] = False
        kept[1, : seqlen // 2] = False
    return kept


def equal_to_one(seqlen, form, padding=None, balanced=False, backend=None, give_length=False, heads=HEADS, **options):
    """Outputs and gradients; ``backend`` is that between the exchanges of the heads."""

    def run(group):
        w, mask = drawn(BATCH, heads, seqlen, HEAD_DIM), mask_of(seqlen, padding)
        lse = options.get("phi") not in ("relu", "identity")

        def one(w):
            torch.manual_seed(7)
            out = crate_kernels.mssa(w, key_padding_mask=mask, return_lse=lse, backend="reference", **options)
            return out if lse else (out,)

        def several(w):
            torch.manual_seed(7 + dist.get_rank(group))  # the first rank's seed is everybody's
            part = None if mask is None else own(mask, group, 1, balanced)
            rest = {"balanced": balanced, "seqlen": seqlen if give_length else None, "backend": backend, **options}
            out = distributed.mssa(w, group, form=form, key_padding_mask=part, return_lse=lse, **rest)
            return out if lse else (out,)

        expected, dw = results(one, w)
        outputs, own_dw = results(several, own(w, group, 2, balanced))
        for name, actual, wanted in zip(("out", "lse"), outputs, expected, strict=False):
            same(actual, own(wanted, group, 2, balanced), name)
        same(own_dw, own(dw, group, 2, balanced), "dw")
        assert outputs[0].transpose(1, 2).flatten(2)._base is not None or outputs[0].numel() == 0

    return run


def any_lengths(group):
    """The ranks' parts need not be even."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    lengths = [4 * r % 5 for r in range(size)]
    w = drawn(BATCH, HEADS, sum(lengths), HEAD_DIM)
    for form in FORMS:
        out = distributed.mssa(w.split(lengths, 2)[rank], group, form=form, causal=True)
        same(out, crate_kernels.mssa(w, causal=True).split(lengths, 2)[rank])


def a_chosen_form(group):
    """Heads where ranks divide them, else gather, which has no reference."""
    size = dist.get_world_size(group)
    for heads in (size, size + 1):
        w = drawn(1, heads, 2 * size, HEAD_DIM)
        same(distributed.mssa(own(w, group), group), own(crate_kernels.mssa(w), group))
        if heads > size:
            with pytest.raises(
                NotImplementedError, match=r"mssa: backend='reference' does not have form 'gather'; use form='heads'"
            ):
                distributed.mssa(own(w, group), group, backend="reference")


def half_precision(group):
    """bf16 tokens, under autocast too, stay within rounding of one process's."""
    w = drawn(BATCH, HEADS, 8, HEAD_DIM)
    expected = own(crate_kernels.mssa(w, backend="reference"), group)
    for form in FORMS:
        part = own(w, group).bfloat16().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            out = distributed.mssa(part, group, form=form)
            assert distributed.mssa(part.float(), group, form=form).dtype == torch.bfloat16
        out.sum().backward()
        assert out.dtype == part.grad.dtype == torch.bfloat16
        torch.testing.assert_close(out.double(), expected, rtol=2**-6, atol=2**-7)


def by_the_kernels(group):
    """The C++ kernels between the exchanges: those of one process, dropout included."""
    w = drawn(BATCH, HEADS, 9, HEAD_DIM, dtype=torch.float32)
    for options in ({}, {"causal": True}, {"dropout_p": 0.4}, {"dropout_p": 0.4, "causal": True}):

        def one(w, options=options):
            torch.manual_seed(7)
            return crate_kernels.mssa(w, backend="cpp", return_lse=True, **options)

        def several(w, options=options):
            torch.manual_seed(7 + dist.get_rank(group))
            return distributed.mssa(w, group, form="heads", balanced=True, return_lse=True, **options)

        expected, dw = results(one, w)
        actual, own_dw = results(several, own(w, group, 2, True))
        for ours, whole in zip((*actual, own_dw), (*expected, dw), strict=True):
            torch.testing.assert_close(ours, own(whole, group, 2, True))


def twice_by_the_reference(group):
    """The exchanges of the form "heads" can be differentiated in any order."""
    w = drawn(1, HEADS, 6, HEAD_DIM)

    def second(run, w):
        w = w.detach().requires_grad_()
        (grad,) = torch.autograd.grad(run(w).square().sum(), w, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), w)[0]

    options = {"causal": True, "backend": "reference"}
    expected = second(lambda w: crate_kernels.mssa(w, **options), w)
    same(second(lambda w: distributed.mssa(w, group, form="heads", **options), own(w, group)), own(expected, group))


def refused(group):
    w = drawn(BATCH, HEADS, 2, HEAD_DIM).requires_grad_()
    call = partial(distributed.mssa, w, group)
    for error, message, options in (
        (ValueError, r"mssa: form must be None or one of heads, gather, ring, got 'rings'", {"form": "rings"}),
        (ValueError, r"mssa: phi must be one of softmax, .*, got 'no'", {"phi": "no"}),
        (ValueError, r"mssa: threshold must be given with phi='threshold', got None", {"phi": "threshold"}),
        (ValueError, r"mssa: threshold must be None without phi='threshold', got 0.1", {"threshold": 0.1}),
        (ValueError, r"mssa: return_lse must be False with phi='relu'", {"phi": "relu", "return_lse": True}),
        (
            NotImplementedError,
            r"mssa: phi must be 'softmax' in form 'ring', got 'relu'",
            {"phi": "relu", "form": "ring"},
        ),
        (TypeError, r"mssa: balanced must be a bool, got int", {"balanced": 1}),
        (ValueError, r"mssa: w must have the tokens that shard gives rank \d of \d, of 99", {"seqlen": 99}),
        (ValueError, r"mssa: key_padding_mask must be \(batch, seqlen\)", {"key_padding_mask": torch.ones(2, 9) > 0}),
        (
            NotImplementedError,
            r"mssa: phi must be 'softmax', got 'relu' with dropout_p over several processes on backend='composite'",
            {"phi": "relu", "dropout_p": 0.5, "backend": "composite"},
        ),
        (
            NotImplementedError,
            r"mssa: key_padding_mask must be None, or backend 'composite' with dropout_p .* on backend='reference'",
            {"key_padding_mask": torch.ones(2, 2) > 0, "dropout_p": 0.5, "backend": "reference"},
        ),
    ):
        with pytest.raises(error, match=message):
            call(**options)
    odd = drawn(1, 7, 2, HEAD_DIM)
    with pytest.raises(ValueError, match=r"mssa: ranks must divide heads in form 'heads', got \d ranks and 7 heads"):
        distributed.mssa(odd, group, form="heads")
    for form in ("gather", "ring"):
        (grad,) = torch.autograd.grad(call(form=form).square().sum(), w, create_graph=True)
        with pytest.raises(NotImplementedError, match=r"mssa: double backward is not supported"):
            grad.sum().backward()


OPTIONS = {
    "full": {"seqlen": 12},
    "uneven-padded": {"seqlen": 7, "padding": "right"},
    "empty-sequence": {"seqlen": 6, "padding": "none-left", "give_length": True},
    "one-token": {"seqlen": 1},
    "no-token": {"seqlen": 0},
    "scale": {"seqlen": 5, "scale": -0.8},
    "causal": {"seqlen": 11, "causal": True},
    "causal-late": {"seqlen": 9, "causal": True, "padding": "none-left"},
    "balanced": {"seqlen": 13, "causal": True, "balanced": True},
    "balanced-short": {"seqlen": 3, "causal": True, "balanced": True, "padding": "right", "give_length": True},
    "balanced-full": {"seqlen": 8, "balanced": True},
    "dropout": {"seqlen": 9, "dropout_p": 0.4},
    "balanced-dropout": {"seqlen": 9, "dropout_p": 0.4, "causal": True, "balanced": True},
}
PLACES = {"dropout-padded": {"seqlen": 9, "dropout_p": 0.4, "padding": "right"}}
HEADS_ALONE = {
    "threshold": {"seqlen": 7, "phi": "threshold", "threshold": 0.2},
    "threshold-causal": {"seqlen": 7, "phi": "threshold", "threshold": 0.2, "causal": True, "dropout_p": 0.3},
    "relu": {"seqlen": 7, "phi": "relu", "causal": True},
    "identity-dropout": {"seqlen": 7, "phi": "identity", "dropout_p": 0.3},
}
CASES = {
    **{
        f"mssa-{form}-{name}": equal_to_one(form=form, backend="composite", **options)
        for form in FORMS
        for name, options in {**OPTIONS, **PLACES}.items()
    },
    **{f"mssa-gather-odd-{form}": equal_to_one(7, form, heads=5, causal=True) for form in ("gather", "ring")},
    **{
        f"mssa-heads-reference-{name}": equal_to_one(form="heads", backend="reference", **options)
        for name, options in {**OPTIONS, **HEADS_ALONE}.items()
    },
    "mssa-any-lengths": any_lengths,
    "mssa-form": a_chosen_form,
    "mssa-half": half_precision,
    "mssa-twice": twice_by_the_reference,
    "mssa-refused": refused,
}
if backends.unavailable_reason("mssa", "cpp") is None:
    CASES["mssa-heads-cpp"] = by_the_kernels
