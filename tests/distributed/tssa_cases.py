"""``distributed.tssa`` against ``crate_kernels.tssa`` of one process."""

import itertools
from functools import partial

import pytest
import torch
import torch.distributed as dist

import crate_kernels
from crate_kernels import distributed, testing
from tests.distributed.common import drawn, mask_of, own, same, summed

BATCH, HEADS, HEAD_DIM = 2, 3, 4
TEMP = torch.tensor([0.7, 1.3, 2.0], dtype=torch.float64)
MAGNITUDES = ((1e-10, 1e-12), (1e-10, 1.0), (1e-5, 1e-25), (1e8, 1e-12), (1e15, 1e-3))  # of w and of dout


def results(run, *leaves):
    """Return outputs, and the gradients of a loss that reads each of them."""
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    outputs = run(*leaves)
    loss = sum((out * out.detach().cos() + out.square()).sum() for out in outputs)
    return [out.detach() for out in outputs], torch.autograd.grad(loss, leaves)


def equal_to_one(seqlen, padding=None, bias=False, give_length=False, dropout_p=0.0, dtype=torch.float64, **options):
    def run(group):
        w, mask = drawn(BATCH, HEADS, seqlen, HEAD_DIM, dtype=dtype), mask_of(seqlen, padding)
        biases = [drawn(HEADS, seqlen + 2, 1, seed=1) * 0.3] if bias else []
        options.update(return_membership=True, dropout_p=dropout_p)

        def one(w, temp, *biases):
            torch.manual_seed(7)
            bias = dict(zip(("denom_bias",), biases, strict=False))
            return crate_kernels.tssa(w, temp, key_padding_mask=mask, backend="composite", **bias, **options)

        def several(w, temp, *biases):
            torch.manual_seed(7 + dist.get_rank(group))  # the first rank's seed is everybody's
            bias = dict(zip(("denom_bias",), biases, strict=False))
            part = None if mask is None else own(mask, group, 1)
            lengths = {"seqlen": seqlen} if give_length else {}
            return distributed.tssa(w, temp, group, key_padding_mask=part, **bias, **lengths, **options)

        (out, membership), (dw, *dshared) = results(one, w, TEMP, *biases)
        (own_out, own_membership), (own_dw, *own_shared) = results(several, own(w, group), TEMP, *biases)
        same(own_out, own(out, group), "out")
        same(own_membership, own(membership, group), "membership")
        same(own_dw, own(dw, group), "dw")
        for name, part, whole in zip(("dtemp", "ddenom_bias"), own_shared, dshared, strict=False):
            same(summed(part, group), whole, name)
        assert own_out.transpose(1, 2).flatten(2)._base is not None or own_out.numel() == 0

    return run


def any_lengths(group):
    """The ranks' parts need not be even."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    lengths = [4 * r % 5 for r in range(size)]
    w, bias = drawn(BATCH, HEADS, sum(lengths), HEAD_DIM), drawn(HEADS, sum(lengths), seed=1)
    part = w.split(lengths, 2)[rank]
    out = distributed.tssa(part, TEMP, group, causal=True, denom_bias=bias)
    same(out, crate_kernels.tssa(w, TEMP, causal=True, denom_bias=bias).split(lengths, 2)[rank])


def half_precision(group):
    """bf16 tokens, under autocast too, stay within rounding of one process's."""
    w = drawn(BATCH, HEADS, 8, HEAD_DIM, dtype=torch.bfloat16)
    for causal in (False, True):
        expected = own(crate_kernels.tssa(w, TEMP.float(), causal=causal, backend="composite"), group)
        with torch.autocast("cpu", torch.bfloat16):
            part = own(w, group).requires_grad_()
            out = distributed.tssa(part, TEMP.float(), group, causal=causal)
        out.sum().backward()
        assert out.dtype == part.grad.dtype == torch.bfloat16
        torch.testing.assert_close(out, expected, rtol=2**-7, atol=1e-6)


def of_any_magnitude(group):
    """Products of tokens and upstream gradients leave fp32's range. Gradients are one process's, within tolerance."""

    def differentiate(call, w, dout, causal):
        w, temp = w.detach().requires_grad_(), TEMP.to(w.dtype).requires_grad_()
        out, membership = call(w, temp, causal=causal, return_membership=True)
        dw, dtemp = torch.autograd.grad(out, (w, temp), dout)
        return {"out": out.detach(), "membership": membership.detach(), "dw": dw, "dtemp": dtemp}

    one = partial(crate_kernels.tssa, backend="reference")
    several, failed = partial(distributed.tssa, group=group), []
    for causal in (False, True):
        # The sum of a head's energies is beyond fp32 at last: of running sums eager has nothing finite there.
        for size, upstream_size in MAGNITUDES if causal else (*MAGNITUDES, (4e18, 1e10)):
            w, dout = (
                drawn(BATCH, HEADS, 9, HEAD_DIM, seed=seed).float() * by for seed, by in ((0, size), (1, upstream_size))
            )
            eager, exact = (differentiate(one, *pair, causal) for pair in ((w, dout), (w.double(), dout.double())))
            actual = differentiate(several, own(w, group), own(dout, group), causal)
            actual["dtemp"] = summed(actual["dtemp"], group)
            for each in (eager, exact):
                each.update({name: own(each[name], group) for name in ("out", "membership", "dw")})
            over = testing.measure(actual, eager, exact, torch.float32)
            failed += [(causal, size, upstream_size, m) for m in over if not m.passed]
    assert failed == []


def of_many_tokens(group):
    """Sums over thousands of fp32 tokens round a few times, not once a token."""
    w = drawn(1, 2, 6000, HEAD_DIM).float()
    for causal in (False, True):
        eager, exact = (
            crate_kernels.tssa(x, TEMP[:2].to(x.dtype), causal=causal, backend="reference") for x in (w, w.double())
        )
        out = distributed.tssa(own(w, group), TEMP[:2].float(), group, causal=causal)
        found = testing.measure({"out": out}, {"out": own(eager, group)}, {"out": own(exact, group)}, torch.float32)
        assert [m for m in found if not m.passed] == []


def refused(group):
    w = drawn(BATCH, HEADS, 2, HEAD_DIM).requires_grad_()
    size = 2 * dist.get_world_size(group)
    for error, message, options in (
        (
            NotImplementedError,
            r"tssa: backend must be None or 'composite' over .*, got 'reference'",
            {"backend": "reference"},
        ),
        (ValueError, r"tssa: backend must be None or one of .*, got 'no'", {"backend": "no"}),
        (ValueError, r"tssa: denom_bias must be None with causal=False", {"denom_bias": drawn(HEADS, 9)}),
        (
            ValueError,
            rf"tssa: denom_bias must be \(nheads, >= seqlen\[, 1\]\) = \(3, >= {size}\) of the whole .*, got \(3, 2\)",
            {"denom_bias": drawn(HEADS, 2), "causal": True},
        ),
        (ValueError, r"tssa: w must have the tokens that shard gives rank \d of \d, of 99", {"seqlen": 99}),
        (ValueError, r"tssa: key_padding_mask must be \(batch, seqlen\)", {"key_padding_mask": torch.ones(2, 9) > 0}),
        (ValueError, r"tssa: dropout_p must be < 1.0, got 1.0", {"dropout_p": 1.0}),
    ):
        with pytest.raises(error, match=message):
            distributed.tssa(w, TEMP, group, **options)
    with pytest.raises(ValueError, match=r"tssa: temp must be \(nheads,\) = \(3,\), got \(2,\)"):
        distributed.tssa(w, TEMP[:2], group)
    (grad,) = torch.autograd.grad(distributed.tssa(w, TEMP, group).square().sum(), w, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"tssa: double backward is not supported"):
        grad.sum().backward()


def rounded(group):
    """What a hook has rounded in between is refused."""
    for causal in (False, True):
        w = own(drawn(BATCH, HEADS, 8, HEAD_DIM, dtype=torch.float32), group).requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.bfloat16(), lambda t: t):
            out = distributed.tssa(w, TEMP.float(), group, causal=causal)
        with pytest.raises(ValueError, match=r"tssa backward: .* must be .*, got"):
            out.sum().backward()


def changed(group):
    """Each tensor that a backward is handed back may be of another dtype or shape, and so may the mask by then."""
    w, temp = own(drawn(BATCH, HEADS, 8, HEAD_DIM), group).requires_grad_(), TEMP.clone().requires_grad_()
    bias, refusal = drawn(HEADS, 8, seed=1).requires_grad_(), r"tssa backward: .* must be .*, got"
    ways = (lambda t: t.bfloat16(), lambda t: t[:1], lambda t: t[..., :1])
    for causal, count in ((False, 6), (True, 7)):
        options = {"causal": causal, "denom_bias": bias if causal else None, "dropout_p": 0.3}
        for number, change in itertools.product(range(count), ways):
            saved = []

            def pack(t, number=number, change=change, saved=saved):
                saved.append(t)
                return change(t) if len(saved) == number + 1 else t

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                out = distributed.tssa(w, temp, group, **options)
            assert len(saved) == count
            with pytest.raises(ValueError, match=refusal):
                out.sum().backward()
        mask = torch.ones(BATCH, w.shape[2], dtype=torch.bool)
        for corrupted in (mask[:1], mask[:, :1], mask.float()):
            upstream_size = mask.clone()
            out = distributed.tssa(w, temp, group, key_padding_mask=upstream_size, **options)
            upstream_size.data = corrupted
            with pytest.raises(ValueError, match=refusal):
                out.sum().backward()


CASES = {
    "tssa-full": equal_to_one(12),
    "tssa-full-uneven": equal_to_one(7, padding="right"),
    "tssa-full-empty-sequence": equal_to_one(6, padding="none-left"),
    "tssa-full-one-token": equal_to_one(1),
    "tssa-full-no-token": equal_to_one(0),
    "tssa-full-dropout": equal_to_one(9, dropout_p=0.4),
    "tssa-causal": equal_to_one(12, causal=True),
    "tssa-causal-bias": equal_to_one(11, causal=True, bias=True),
    "tssa-causal-padded": equal_to_one(7, causal=True, padding="right", bias=True, give_length=True),
    "tssa-causal-late": equal_to_one(9, causal=True, padding="none-left"),
    "tssa-causal-one-token": equal_to_one(1, causal=True, bias=True),
    "tssa-causal-dropout": equal_to_one(9, causal=True, dropout_p=0.4, bias=True),
    "tssa-any-lengths": any_lengths,
    "tssa-half": half_precision,
    "tssa-magnitudes": of_any_magnitude,
    "tssa-many-tokens": of_many_tokens,
    "tssa-refused": refused,
    "tssa-rounded": rounded,
    "tssa-changed": changed,
}
