"""``distributed.mssa`` against ``crate_kernels.mssa`` of one process."""

from contextlib import contextmanager
from functools import partial

import pytest
import torch
import torch.distributed as dist

import crate_kernels
from crate_kernels import distributed, testing
from crate_kernels._core import backends
from crate_kernels.ops.mssa.rectangular import composite, native
from tests.distributed.common import drawn, mask_of, own, same

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


def over_tolerance(group, calls, w, autocast=False, mask=None, **options):
    """Compare calls with eager's and float64's in one process; return the errors over tolerance."""
    dout = drawn(*w.shape, seed=1).to(w.dtype)

    def differentiate(call, w, dout):
        torch.manual_seed(7)  # the first rank's seed is everybody's
        w = w.detach().requires_grad_()
        out, lse = call(w, return_lse=True, **options)
        return {"out": out.detach(), "lse": lse.detach(), "dw": torch.autograd.grad(out, w, dout.to(out.dtype))[0]}

    one = partial(crate_kernels.mssa, backend="reference", key_padding_mask=mask)
    eager, exact = differentiate(one, w, dout), differentiate(one, w.double(), dout.double())
    failed = []
    for call in calls:
        part = partial(own, group=group, dim=2, balanced=call.get("balanced", False))
        own_mask = None if mask is None else own(mask, group, 1, call.get("balanced", False))
        several = partial(distributed.mssa, group=group, key_padding_mask=own_mask, **call)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            actual = differentiate(several, part(w), part(dout))
        assert actual["out"].dtype == actual["dw"].dtype == w.dtype
        expected = ({name: part(t) for name, t in each.items()} for each in (eager, exact))
        failed += [(call, m) for m in testing.measure(actual, *expected, w.dtype) if not m.passed]
    return failed


def half_precision(group):
    """bf16 tokens, under autocast too, stay within tolerance; under autocast fp32 tokens are bf16."""
    w, calls = drawn(BATCH, HEADS, 9, HEAD_DIM), [{"form": form} for form in FORMS]
    for autocast in (False, True):
        assert over_tolerance(group, calls, w.bfloat16(), autocast) == []
    with torch.autocast("cpu", torch.bfloat16):
        for call in calls:
            assert distributed.mssa(own(w, group).float(), group, **call).dtype == torch.bfloat16


def summed_in_float32(group):
    """Of bf16 gradients, summed from several meetings of parts, as many are the nearest number as in one process.

    Summed in bf16, a tenth fewer are: too little for an error tolerance.
    """
    w, dout = (drawn(BATCH, HEADS, 90, 16, seed=seed).bfloat16() for seed in (0, 1))

    def gradient(call, w, dout):
        w = w.detach().requires_grad_()
        return torch.autograd.grad(call(w), w, dout)[0]

    exact = gradient(partial(crate_kernels.mssa, backend="reference"), w.double(), dout.double()).bfloat16()
    alone = (gradient(crate_kernels.mssa, w, dout) == exact).double().mean()
    part = partial(own, group=group, balanced=True)
    for form in ("gather", "ring"):
        call = partial(distributed.mssa, group=group, form=form, balanced=True)
        nearest = (gradient(call, part(w), part(dout)) == part(exact)).double().mean()
        assert nearest > alone - 0.1, (form, nearest, alone)


def by_the_kernels(group):
    """The C++ kernels of every form: within tolerance, with the dropout masks of one process."""
    w = 1.5 * drawn(BATCH, HEADS, 90, 16)
    calls = [{"form": form, "backend": "cpp", "balanced": balanced} for form in FORMS for balanced in (False, True)]
    for options in ({}, {"causal": True}, {"dropout_p": 0.4}, {"dropout_p": 0.4, "causal": True}):
        assert over_tolerance(group, calls, w.float(), **options) == [], options
    assert over_tolerance(group, calls, w.bfloat16(), causal=True) == []
    for padding in ("right", "none-left"):
        assert over_tolerance(group, calls, w.float(), mask=mask_of(w.shape[2], padding), causal=True) == [], padding


def a_delta_that_cancels(group):
    """Gradients of 16-bit tokens that take delta from more of the output than is returned, on every backend."""
    calls = [{"form": form, "backend": name} for form in FORMS[1:] for name in (None, "composite")]
    for seed in range(4):
        w = drawn(BATCH, HEADS, 8, 64, seed=seed).bfloat16()
        w[:, :, 0] *= 30
        assert over_tolerance(group, calls, w) == [], seed


def dropout_by_default(group):
    """Where no backend is named, one with the masks of one process is taken: for wide heads and padded keys too."""
    calls = [{"form": form} for form in FORMS]
    for head_dim, padding in ((256, None), (257, None), (16, "right"), (16, "none-left"), (257, "right")):
        w = drawn(BATCH, HEADS, 9, head_dim).float() * 2 * head_dim**-0.5
        for causal in (False, True):
            options = {"dropout_p": 0.4, "causal": causal, "mask": mask_of(9, padding)}
            assert over_tolerance(group, calls, w, **options) == [], (head_dim, padding, causal)


def composite_of_one_process_has_other_masks(group):
    """PyTorch draws them there; over several processes ``composite`` has those of the kernels."""
    w, kept = drawn(1, HEADS, 9, HEAD_DIM), {}
    for name in ("composite", "reference"):
        torch.manual_seed(7)
        kept[name] = crate_kernels.mssa(w, dropout_p=0.4, backend=name)
    for form in FORMS:
        torch.manual_seed(7)
        out = distributed.mssa(own(w, group), group, form=form, dropout_p=0.4, backend="composite")
        same(out, own(kept["reference"], group))
    assert (kept["composite"] - kept["reference"]).abs().max() > 0.1


def draws_follow_alike(group):
    """After a call with dropout every rank's generator is where that of one process is."""
    w = drawn(1, HEADS, 9, HEAD_DIM)
    torch.manual_seed(7)
    crate_kernels.mssa(w, dropout_p=0.4, backend="reference")
    expected = torch.rand(3)
    for form in FORMS:
        torch.manual_seed(7)
        distributed.mssa(own(w, group), group, form=form, dropout_p=0.4, backend="composite")
        same(torch.rand(3), expected)


def a_backend_is_obeyed(group):
    """Of the forms "gather" and "ring", as of "heads": the named one computes, or the call is refused."""
    part = own(drawn(BATCH, HEADS, 7, HEAD_DIM), group).float()
    for form in ("gather", "ring"):
        with _calls_of(native, composite) as computed:
            for name in ("cpp", "composite", None):
                distributed.mssa(part, group, form=form, backend=name)
        assert computed[0] == 2 * computed[1] > 0
        with pytest.raises(NotImplementedError, match=r"mssa: backend='cpp' takes .*, got torch.float64"):
            distributed.mssa(part.double(), group, form=form, backend="cpp")
        with pytest.raises(ValueError, match=r"mssa: backend must be None or one of .*, got 'other'"):
            distributed.mssa(part, group, form=form, backend="other")


@contextmanager
def _calls_of(*modules):
    """Count the forward calls of kernel modules."""
    counts = [0 for _ in modules]

    def counted(number, forward):
        def run(*args):
            counts[number] += 1
            return forward(*args)

        return run

    with pytest.MonkeyPatch.context() as patch:
        for number, module in enumerate(modules):
            patch.setattr(module, "forward", counted(number, module.forward))
        yield counts


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


def rounded(group):
    """What a hook has rounded in between is refused."""
    w = own(drawn(2, 3, 8, 4, dtype=torch.float32), group).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.bfloat16(), lambda t: t):
        out = distributed.mssa(w, group)
    with pytest.raises((ValueError, RuntimeError), match=r"mssa backward: .* must be .*, got"):
        out.sum().backward()


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
    "mssa-summed-in-float32": summed_in_float32,
    "mssa-cancelling": a_delta_that_cancels,
    "mssa-default-dropout": dropout_by_default,
    "mssa-composite-dropout": composite_of_one_process_has_other_masks,
    "mssa-draws": draws_follow_alike,
    "mssa-twice": twice_by_the_reference,
    "mssa-refused": refused,
    "mssa-rounded": rounded,
}
if backends.unavailable_reason("mssa", "cpp") is None:
    CASES["mssa-cpp"] = by_the_kernels
    CASES["mssa-obeyed"] = a_backend_is_obeyed
