"""vmap over a gradient: per-sample gradients of tokens and parameters are those of each sample by itself."""

import pytest
import torch
from torch.func import grad, vmap

from crate_kernels import ista, ista_overcomplete, mssa, tssa
from tests.ops.common import SELDOM, VARIATION, backends, offsets, padding, randn, seldom

W = randn(3, 2, 4, 2, 8).float().transpose(2, 3)  # (samples, batch, heads, tokens, channels)
X = randn(3, 2, 4, 8, seed=1).float()
KEEP = torch.stack([padding("right", 2, 4), padding("row", 2, 4), torch.ones(2, 4, dtype=torch.bool)])
TEMP, BIAS = 1 + 0.3 * randn(3, 2, seed=2).float(), 0.1 * randn(3, 2, 5, seed=3).float()
WEIGHT, DICTIONARY, DECODER = (randn(3, 8, k, seed=k).float() / 3 for k in (8, 12, 11))
DECODER = torch.cat([DECODER, DECODER[..., :1]], -1)
PACKED = {"cu_seqlens": offsets((1, 2)), "max_seqlen": 2}  # covers 3 of 4 tokens
# name: (function of the tensors, tensors of all samples, whether one forward serves all samples of shared parameters)
CALLS = {
    "mssa": (mssa, (W,), True),
    "mssa-lse": (lambda w, **b: mssa(w, return_lse=True, **b)[1], (W,), True),
    "mssa-pad": (lambda w, **b: mssa(w, causal=True, key_padding_mask=KEEP[0], **b), (W,), True),
    "mssa-packed": (lambda w, **b: mssa(w[0].transpose(0, 1), **PACKED, **b), (W,), False),
    "tssa": (tssa, (W, TEMP), True),
    "tssa-membership": (lambda w, t, **b: tssa(w, t, return_membership=True, **b)[1], (W, TEMP), True),
    "tssa-pad": (lambda w, t, **b: tssa(w, t, key_padding_mask=KEEP[0], **b), (W, TEMP), True),
    "tssa-packed": (lambda w, t, **b: tssa(w[0].transpose(0, 1), t, **PACKED, **b), (W, TEMP), False),
    "tssa-causal": (lambda w, t, d, **b: tssa(w, t, causal=True, denom_bias=d, **b), (W, TEMP, BIAS), True),
    "ista": (lambda x, a, **b: ista(x, a, step_size=0.3, lambd=0.2, **b), (X, WEIGHT), True),
    "ista-soft": (lambda x, a, **b: ista(x, a, nonnegative=False, **b), (X, WEIGHT), True),
    "ista-one-token": (lambda x, a, **b: ista(x[0, 0], a, **b), (X, WEIGHT), True),
    "ista_overcomplete": (ista_overcomplete, (X, DICTIONARY), True),
    "ista_overcomplete-decoder": (ista_overcomplete, (X, DICTIONARY, DECODER), True),
}
# Those whose backward is one call too. The others have one a sample, for the gradient of a parameter.
ONE_BACKWARD = {"mssa", "mssa-lse", "mssa-pad", "ista", "ista-soft", "ista-one-token"}
FEW = {"mssa", "tssa-causal", "ista_overcomplete"}
pytestmark = pytest.mark.usefixtures("plain_backend")


def op(name):
    return name.partition("-")[0].removesuffix("_overcomplete")


def each(names, often, beside=()):
    """List the names with every backend of this machine; of the interpreter's, often those named."""
    return pytest.mark.parametrize(
        ("name", "backend"),
        [
            pytest.param(name, backend, id=f"{name}-{backend}", marks=() if name in often else VARIATION)
            for name in names
            for backend in [*(p.values[0] for p in backends(op(name)) if p.values[1] == "cpu"), *beside]
            if backend != "plain" or op(name) == "mssa"
        ],
    )


CASES = each(CALLS, FEW, ["plain"])
OF_PARAMETERS = each([name for name, (_, tensors, _) in CALLS.items() if len(tensors) > 1], FEW)


def losses(name, backend):
    """Return a loss of one sample, the tensors of all, and the places of all that are differentiated."""
    call, tensors, _ = CALLS[name]
    return (lambda *t: call(*t, backend=backend).sin().sum()), tensors, tuple(range(len(tensors)))


def one_by_one(loss, tensors, in_dims):
    """Return the gradients of each sample's loss by itself, stacked."""
    rows = []
    for index in range(3):
        leaves = [
            t[index if dim == 0 else 0].detach().requires_grad_() for t, dim in zip(tensors, in_dims, strict=True)
        ]
        rows.append(torch.autograd.grad(loss(*leaves), leaves))
    return tuple(map(torch.stack, zip(*rows, strict=True)))


def moved_dims(tensors, in_dims):
    return [t if dim == 0 else t[0] for t, dim in zip(tensors, in_dims, strict=True)]


@CASES
def test_gradients_of_samples_with_shared_parameters(name, backend):
    loss, tensors, places = losses(name, backend)
    in_dims = (0, *(None for _ in tensors[1:]))
    found = vmap(grad(loss, places), in_dims)(*moved_dims(tensors, in_dims))
    torch.testing.assert_close(found, one_by_one(loss, tensors, in_dims))


@OF_PARAMETERS
def test_gradients_of_samples_with_parameters_of_their_own(name, backend):
    loss, tensors, places = losses(name, backend)
    in_dims = (0,) * len(tensors)
    torch.testing.assert_close(vmap(grad(loss, places))(*tensors), one_by_one(loss, tensors, in_dims))


@OF_PARAMETERS
def test_gradients_of_parameters_over_shared_tokens(name, backend):
    loss, tensors, places = losses(name, backend)
    in_dims = (None, *(0 for _ in tensors[1:]))
    found = vmap(grad(loss, places), in_dims)(*moved_dims(tensors, in_dims))
    torch.testing.assert_close(found, one_by_one(loss, tensors, in_dims))


@pytest.mark.parametrize("name", [name for name, (_, _, once) in CALLS.items() if once])
def test_one_call_serves_the_samples_of_shared_parameters(name, monkeypatch):
    from crate_kernels._core import backends as core

    loss, tensors, _ = losses(name, "plain" if op(name) == "mssa" else "composite")
    in_dims, sizes, run = (0, *(None for _ in tensors[1:])), [], core.run
    monkeypatch.setattr(
        core, "run", lambda *a, **k: (sizes.append(0 if a[4] is None else a[4].numel()), run(*a, **k))[1]
    )
    vmap(loss, in_dims)(*moved_dims(tensors, in_dims))
    assert len(sizes) == 1
    assert name == "ista-one-token" or sizes == [tensors[0].numel()]
    sizes.clear()
    vmap(grad(loss), in_dims)(*moved_dims(tensors, in_dims))
    assert len(sizes) == 1 + (1 if name in ONE_BACKWARD else len(W))


@CASES
def test_no_samples_have_empty_gradients(name, backend):
    loss, tensors, places = losses(name, backend)
    found = vmap(grad(loss, places))(*(t[:0] for t in tensors))
    assert [g.shape for g in found] == [t[:0].shape for t in tensors]


@SELDOM
@pytest.mark.parametrize("backend", [p.values[0] for p in backends("mssa") if p.values[1] == "cpu"])
def test_each_sample_may_have_a_mask(backend):
    def loss(w, keep):
        return mssa(w, key_padding_mask=keep, backend=backend).sin().sum()

    expected = [one_by_one(lambda w, keep=keep: loss(w, keep), (W,), (0,))[0][i] for i, keep in enumerate(KEEP)]
    torch.testing.assert_close(vmap(grad(loss))(W, KEEP), torch.stack(expected))
    one = vmap(grad(loss), (None, 0))(W[0], KEEP)
    torch.testing.assert_close(one, torch.stack([grad(loss)(W[0], keep) for keep in KEEP]))


@SELDOM
@pytest.mark.parametrize("backend", [p.values[0] for p in backends("mssa") if p.values[0] in ("cpp", "triton")])
def test_dropout_of_samples_is_what_randomness_says(backend):
    def loss(w):
        return mssa(w, dropout_p=0.5, backend=backend).sin().sum()

    same = W[:1].expand(3, *W.shape[1:])
    torch.manual_seed(0)
    alike = vmap(grad(loss), randomness="same")(same)
    torch.manual_seed(0)
    torch.testing.assert_close(alike, grad(loss)(W[0]).expand_as(alike))
    apart = vmap(grad(loss), randomness="different")(same)
    assert not torch.equal(apart[0], apart[1])
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(grad(loss))(same)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", [p.values[0] for p in backends("ista") if p.values[0] in ("composite", "cpp")])
@pytest.mark.parametrize("tokens", [1, 4])
def test_half_tokens_beside_a_whole_dictionary(backend, tokens, dtype):
    x = X[:, 0, :tokens].to(dtype)
    found = vmap(grad(lambda a, x: ista(x, a, backend=backend).float().sin().sum()), (None, 0))(WEIGHT[0], x)
    exact = one_by_one(
        lambda x, a: ista(x, a, backend="reference").sin().sum(), (x.double(), WEIGHT.double()), (0, None)
    )
    assert found.dtype == torch.float32
    # Products of half tokens, whose sums over 8 tokens are rounded once.
    error = (found - exact[1]).abs().max() / exact[1].abs().max()
    assert error < 8 * torch.finfo(dtype).eps


OFFSETS = torch.stack([offsets((1, 2)), torch.tensor([1, 1, 4], dtype=torch.int32), offsets((0, 4))])
LONGEST = {"max_seqlen": 4}
OF_OFFSETS = {
    "mssa": lambda w, cu, **b: mssa(w, cu_seqlens=cu, **LONGEST, **b),
    "mssa-causal": lambda w, cu, **b: mssa(w, cu_seqlens=cu, causal=True, scale=0.3, **LONGEST, **b),
    "mssa-lse": lambda w, cu, **b: mssa(w, cu_seqlens=cu, return_lse=True, **LONGEST, **b)[1],
    "mssa-threshold": lambda w, cu, **b: mssa(w, cu_seqlens=cu, phi="threshold", threshold=0.2, **LONGEST, **b),
    "tssa": lambda w, cu, **b: tssa(w, TEMP[0], cu_seqlens=cu, **LONGEST, **b),
    "tssa-membership": lambda w, cu, **b: tssa(w, TEMP[0], cu_seqlens=cu, return_membership=True, **LONGEST, **b)[1],
    "tssa-causal": lambda w, cu, **b: tssa(w, TEMP[0], causal=True, denom_bias=BIAS[0], cu_seqlens=cu, **LONGEST, **b),
}
ROWS = W[:, 0].transpose(1, 2)  # (samples, tokens, heads, channels)


@each(OF_OFFSETS, {"tssa-causal"})
def test_each_sample_may_have_offsets(name, backend):
    def loss(w, cu):
        return OF_OFFSETS[name](w, cu, backend=backend).sin().sum()

    each = [grad(loss)(w, cu) for w, cu in zip(ROWS, OFFSETS, strict=True)]
    torch.testing.assert_close(vmap(grad(loss))(ROWS, OFFSETS), torch.stack(each))
    one = torch.stack([loss(ROWS[0], cu) for cu in OFFSETS])
    torch.testing.assert_close(vmap(loss, (None, 0))(ROWS[0], OFFSETS), one)
    columns = vmap(loss, (None, 1))(ROWS[0], OFFSETS.T.contiguous())
    torch.testing.assert_close(columns, one)
    twice = vmap(vmap(loss, (None, 0)), (0, None))(ROWS, OFFSETS)
    torch.testing.assert_close(twice[0], one)


BAD = {
    "falls": (((0, 1, 3), (0, 3, 1), (0, 1, 3)), 4, r"cu_seqlens must rise within 0 to total = 4, got \[0, 3, 1\]"),
    "beyond": (((0, 1, 3), (0, 1, 3), (0, 1, 5)), 4, r"cu_seqlens must rise within 0 to total = 4, got \[0, 1, 5\]"),
    "longer": (((0, 1, 3), (0, 1, 4), (0, 1, 3)), 2, "max_seqlen must be >= the longest sequence = 3, got 2"),
}


@pytest.mark.parametrize(("wrong", "longest", "says"), seldom(BAD, "falls"))
@each(["mssa", "tssa"], FEW)
def test_offsets_of_a_sample_are_checked(name, backend, wrong, longest, says):

    def loss(w, cu):
        options = {"cu_seqlens": cu, "max_seqlen": longest, "backend": backend}
        return (mssa(w, **options) if name == "mssa" else tssa(w, TEMP[0], **options)).sum()

    wrong = torch.tensor(wrong, dtype=torch.int32)
    for call in (vmap(loss), vmap(grad(loss)), lambda w, cu: [grad(loss)(*each) for each in zip(w, cu, strict=True)]):
        with pytest.raises(ValueError, match=f"{name}: {says}"):
            call(ROWS, wrong)
