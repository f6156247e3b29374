"""The symmetric backward: its roundings, by plain PyTorch, and the heads that Triton leaves to another form."""

import importlib
import math

import pytest
import torch

from crate_kernels import mssa
from tests.ops.common import TURNS, home, kernels, randn

TRITON = "triton" in kernels("mssa")
DEVICE = home("triton") if TRITON else "cpu"
INTERPRETED = TRITON and DEVICE == "cpu"
NEEDS_TRITON = pytest.mark.skipif(not TRITON, reason="needs a GPU, or TRITON_INTERPRET=1")


def sphere(score, seqlen=65, head_dim=32):
    """Return tokens each of which has this score with itself."""
    w = torch.nn.functional.normalize(randn(1, 1, seqlen, head_dim, dtype=torch.float64), dim=-1)
    return w * (score * head_dim**0.5) ** 0.5


def one_long(score, seqlen=65, head_dim=32):
    """Return small tokens and one that has this score with itself: L spreads by score - log(seqlen)."""
    w = 0.3 * randn(1, 1, seqlen, head_dim, dtype=torch.float64)
    w[:, :, 40] *= ((score * head_dim**0.5) / w[:, :, 40].square().sum()) ** 0.5
    return w


def spread(deviation, seqlen=65, head_dim=32):
    return deviation * randn(1, 1, seqlen, head_dim, dtype=torch.float64)


# name: (tokens, whether the symmetric form takes them in bf16, and in fp16)
TOKENS = {
    "small": (spread(0.3), True, True),
    "normal": (spread(1.0), True, True),
    "large": (spread(2.0), True, False),
    "sphere": (sphere(40.0), True, True),
    "sphere-higher": (sphere(60.0), True, True),
    "sphere-highest": (sphere(240.0), True, False),
    "sphere-above": (sphere(280.0), False, False),
    "one-short": (one_long(16.0), True, True),
    "one-long": (one_long(44.0), True, False),
    "one-longer": (one_long(48.0), False, False),
    "one-longest": (one_long(160.0), False, False),
    "equal": (torch.ones(1, 1, 65, 32, dtype=torch.float64), True, True),
    "alone": (spread(1.0, seqlen=1), True, True),
}
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
CASES = pytest.mark.parametrize(
    ("tokens", "dtype", "taken"),
    [
        pytest.param(tokens, dtype, taken, id=f"{name}-{half}")
        for name, (tokens, *each) in TOKENS.items()
        for (half, dtype), taken in zip(HALF.items(), each, strict=True)
    ],
)


def shares(w, g, *found, **options):
    """Return the largest error / tolerance of each gradient that was found."""
    grads = []
    for x in (w.double(), w):
        leaf = x.detach().requires_grad_()
        grads.append(torch.autograd.grad(mssa(leaf, backend="reference", **options), leaf, g.to(x.dtype))[0].double())
    exact, eager = grads
    tolerance = 3 * ((eager - exact).abs().max() + torch.finfo(w.dtype).eps * exact.abs().max())
    return [((dw.double() - exact).abs().max() / tolerance).item() for dw in found]


def divided(w, g, round_delta):
    """Return the gradient by the formula of docs/derivations.md, rounded where the kernel rounds."""
    dtype, scale, x = w.dtype, w.shape[-1] ** -0.5, w.float()
    out, lse = mssa(x, return_lse=True, backend="reference")
    shift, raised = lse.min(), 1.0
    if dtype == torch.float16:
        bound = 4 * scale * g.float().norm(dim=-1).max() * x.norm(dim=-1).max()
        shift = torch.maximum(lse.min(), lse.max() - 4 * math.log(2))
        raised = 2.0 ** (14 - max(bound.log2().floor().item() + 1, 5))
    r = (lse - shift).exp()[..., None]
    h = (g.float() / r).to(dtype).float()
    of_out = (h if round_delta else g.float() / r) * out.to(dtype).float()
    delta = of_out.sum(-1, keepdim=True)
    e = raised * (scale * (x @ x.mT) - shift).exp()
    a = e * (torch.cat([x, h], -1) @ torch.cat([h, x], -1).mT - delta - delta.mT)
    return ((e.to(dtype).float() @ h + (scale * a).to(dtype).float() @ x) / raised).to(dtype)


@CASES
def test_what_is_rounded_is_within_tolerance(tokens, dtype, taken):
    w, g = tokens.to(dtype), randn(*tokens.shape, seed=1).to(dtype)
    (share,) = shares(w, g, divided(w, g, round_delta=True))
    assert share < 1 or not taken


@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
def test_delta_is_of_the_rounded_gradient(dtype):
    """Where one weight is nearly all, a delta of the gradient as it was does not cancel with the rounded one's."""
    w = TOKENS["sphere"][0].to(dtype)
    g = randn(*w.shape, seed=1).to(dtype)
    rounded, unrounded = shares(w, g, divided(w, g, True), divided(w, g, False))
    assert rounded < 1 < unrounded


def gradient(w, g, config, **options):
    """Return dw of Triton's kernels, with some entries of the launch table's configuration replaced."""
    from crate_kernels._triton.table import forced
    from crate_kernels.ops.mssa.triton import tables

    leaf = w.detach().requires_grad_()
    out, lse = mssa(leaf, return_lse=True, backend="triton", **options)
    own = tables.BACKWARD.config(w.device, w.shape[-1], w.shape[-2], options.get("causal", False), w.dtype)
    with forced(tables.BACKWARD, {**own, **config}):
        dlse = g.float().sum(-1)
        return torch.autograd.grad([out, lse], leaf, [g, dlse if w.dim() == 4 else dlse.T])[0]


@NEEDS_TRITON
@CASES
def test_triton_has_every_head_within_tolerance(tokens, dtype, taken):
    w, g = tokens.to(DEVICE, dtype), randn(*tokens.shape, seed=1, device=DEVICE).to(dtype)
    leaf = w.detach().requires_grad_()
    (dw,) = torch.autograd.grad(mssa(leaf, backend="triton"), leaf, g)
    assert shares(w, g, dw)[0] < 1


def exponentials(monkeypatch, total, w):
    """Return how many exponentials of scores the backward of ``total`` takes, where the other form takes two each."""
    import triton.language as tl
    from triton.runtime import interpreter

    from crate_kernels.ops.mssa.triton import delta, terms

    counted, exponential = [], interpreter.InterpreterBuilder.create_exp2

    def create_exp2(self, x):
        counted.append(x.data.size if x.data.ndim == 2 else 0)
        return exponential(self, x)

    with monkeypatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_exp2", create_exp2)
        patch.setattr(delta, "_MAX_ROUNDING", math.inf)  # else delta may be summed anew
        patch.setattr(terms, "EXTENT", tl.constexpr(-1.0))  # else the other form may derive one from the other
        torch.autograd.grad(total, w)
    return sum(counted)


def check_exponentials(monkeypatch, tokens, dtype, factor, taken):
    """Check that heads with gradients of ``factor`` take one exponential a score if ``taken``, else two."""
    near = 0.5 * randn(1, 1, tokens.shape[2], 32, dtype=torch.float64)
    counts = []
    for heads in (near, torch.cat([near, tokens], 1)):
        w = heads.to(dtype).requires_grad_()
        factors = torch.ones(heads.shape[1], 1, 1)
        factors[1:] = factor
        out = (factors * mssa(w, backend="triton").float()).sum()
        counts.append(exponentials(monkeypatch, out, w))
    assert counts[1] >= 2 * counts[0]
    assert (counts[1] == 2 * counts[0]) == taken


COUNTED = pytest.mark.skipif(not INTERPRETED, reason="counts what Triton's interpreter makes: needs TRITON_INTERPRET=1")


@pytest.mark.usefixtures("unrepeated")
@COUNTED
@CASES
def test_a_head_of_triton_takes_one_exponential_or_two(tokens, dtype, taken, monkeypatch):
    """The others of its call do not matter."""
    check_exponentials(monkeypatch, tokens, dtype, 1.0, taken)


# fp16: (score of the longest token with itself, each number of the gradient, whether the symmetric form takes them)
LIMITS = {
    "enough-digits": (18.0, 2.0**-4, True),
    "too-few-digits": (20.0, 2.0**-4, False),
    "large": (14.0, 16.0, True),
    "too-large": (14.0, 1024.0, False),
    "small": (8.0, 2.0**-7, True),
    "too-small": (8.0, 2.0**-8, False),
}


@pytest.mark.usefixtures("unrepeated")
@COUNTED
@pytest.mark.parametrize(("score", "factor", "taken"), LIMITS.values(), ids=LIMITS)
def test_triton_asks_gradients_of_fp16_too(score, factor, taken, monkeypatch):
    check_exponentials(monkeypatch, one_long(score), torch.float16, factor, taken)


# name: factors of normal gradients of each of three heads
GRADIENTS = {
    "scaled": (2.0**9, 2.0**9, 2.0**9),
    "subnormal": (2.0**-18, 2.0**-18, 2.0**-18),
    "of-three-sizes": (2.0**9, 1.0, 2.0**-18),
}


@NEEDS_TRITON
@pytest.mark.parametrize("factors", GRADIENTS.values(), ids=GRADIENTS)
@pytest.mark.parametrize("third", ["large", "sphere", "one-short"])
def test_triton_has_fp16_gradients_of_any_size_within_tolerance(third, factors):
    tokens = [TOKENS[name][0] for name in ("small", "normal", third)]
    w = torch.cat(tokens, 1).to(DEVICE, torch.float16)
    g = (torch.tensor(factors)[:, None, None] * randn(1, 3, 65, 32, seed=1)).to(w)
    (together,) = torch.autograd.grad(mssa(leaf := w.detach().requires_grad_(), backend="triton"), leaf, g)
    for h in range(3):
        of_head, g_h = w[:, h : h + 1], g[:, h : h + 1]
        (dw,) = torch.autograd.grad(mssa(leaf := of_head.detach().requires_grad_(), backend="triton"), leaf, g_h)
        assert torch.equal(together[:, h : h + 1], dw)
        assert shares(of_head, g_h, dw)[0] < 1


@NEEDS_TRITON
def test_triton_reads_no_divided_gradients_that_overflow():
    """Weights would have digits enough here, for the longest token is long beside the scale."""
    w = torch.cat([spread(1.0), spread(1.0)], 1)
    w[:, :, 40] *= 64 / w[:, :, 40].norm(dim=-1, keepdim=True)
    w, g = w.to(DEVICE, torch.float16), (16 * randn(1, 2, 65, 32, seed=1)).to(DEVICE, torch.float16)
    (dw,) = torch.autograd.grad(mssa(leaf := w.detach().requires_grad_(), scale=2.0**-8, backend="triton"), leaf, g)
    assert shares(w, g, dw, scale=2.0**-8)[0] < 1


@NEEDS_TRITON
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
def test_triton_leaves_a_gradient_that_is_no_number_in_its_head(dtype, value):
    w, g = (randn(1, 2, 65, 32, seed=seed).to(DEVICE, dtype) for seed in (0, 1))
    g[0, 1, 3, 5] = value
    found = []
    for backend in ("triton", "reference"):
        leaf = w.detach().requires_grad_()
        found.append(torch.autograd.grad(mssa(leaf, backend=backend), leaf, g)[0].isfinite())
    assert torch.equal(*found)


KEPT = torch.arange(65, device=DEVICE)[None] % 3 > 0
OPTIONS = {
    "full": {},
    "padded": {"key_padding_mask": KEPT},
    "padded-causal": {"key_padding_mask": KEPT, "causal": True},
    "empty": {"key_padding_mask": KEPT & False},
    "causal": {"causal": True},
    "dropout": {"dropout_p": 0.3},
    "negative": {"scale": -0.1},
    "zero": {"scale": 0.0},
}


@TURNS
@NEEDS_TRITON
@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("name", ["normal", "one-longest"])
def test_the_forms_of_triton_agree(name, options, dtype):
    w, g = TOKENS[name][0].to(DEVICE, dtype), randn(1, 1, 65, 32, seed=1, device=DEVICE).to(dtype)
    grads = []
    for derived in (0, 1, 3):
        torch.manual_seed(0)
        grads.append(gradient(w, g, {"DERIVED": derived}, **options).double())
    bound = torch.finfo(dtype).eps * 2 * grads[0].abs().max()
    assert (grads[1] - grads[0]).abs().max() <= bound
    assert (grads[2] - grads[0]).abs().max() <= bound


@NEEDS_TRITON
@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_packed_sequences_of_triton_take_their_forms_apart(causal, dtype):
    """The sequences of a call have heads that the symmetric form takes, and heads that it leaves."""
    names = ("normal", "one-longest", "alone", "one-short")
    parts = [TOKENS[name][0][0].transpose(0, 1) for name in names]
    w = torch.cat(parts).to(DEVICE, dtype)
    g = randn(*w.shape, seed=1, device=DEVICE).to(dtype)
    lengths = [len(part) for part in parts]
    offsets = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).to(torch.int32)
    packing = {"cu_seqlens": offsets, "max_seqlen": 65, "causal": causal}
    dw = gradient(w, g, {"DERIVED": 3}, **packing)
    for x, g_x, dw_x in zip(*(t.split(lengths) for t in (w, g, dw)), strict=True):
        x, g_x, dw_x = (t.transpose(0, 1)[None] for t in (x, g_x, dw_x))
        assert torch.equal(dw_x, gradient(x, g_x, {"DERIVED": 3}, causal=causal))


@NEEDS_TRITON
@pytest.mark.usefixtures("unrepeated")
@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
def test_triton_divides_several_blocks_of_rows_in_a_program(dtype, monkeypatch):
    backward = importlib.import_module("crate_kernels.ops.mssa.triton.backward")
    w = torch.cat([spread(1.0, seqlen=97), one_long(30.0, seqlen=97)], 1).to(DEVICE, dtype)
    g = randn(*w.shape, seed=1, device=DEVICE).to(dtype)
    found = []
    for rows in (backward._MAX_ROWS, 32):
        monkeypatch.setattr(backward, "_MAX_ROWS", rows)
        found.append(gradient(w, g, {}))
    assert torch.equal(*found)
