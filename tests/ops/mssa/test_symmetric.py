"""The symmetric backward: its roundings in bf16, by plain PyTorch, and the heads that Triton leaves to another form."""

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


# name: (tokens, whether the symmetric form takes them)
TOKENS = {
    "small": (spread(0.3), True),
    "normal": (spread(1.0), True),
    "large": (spread(2.0), True),
    "sphere": (sphere(40.0), True),
    "sphere-highest": (sphere(240.0), True),
    "sphere-above": (sphere(280.0), False),
    "one-long": (one_long(44.0), True),
    "one-longer": (one_long(48.0), False),
    "one-longest": (one_long(160.0), False),
    "equal": (torch.ones(1, 1, 65, 32, dtype=torch.float64), True),
    "alone": (spread(1.0, seqlen=1), True),
}
CASES = pytest.mark.parametrize(("tokens", "taken"), TOKENS.values(), ids=TOKENS)


def shares(w, g, *found):
    """Return the largest error of each gradient that was found, in budgets."""
    grads = []
    for x in (w.double(), w):
        leaf = x.detach().requires_grad_()
        grads.append(torch.autograd.grad(mssa(leaf, backend="reference"), leaf, g.to(x.dtype))[0].double())
    exact, eager = grads
    budget = 3 * ((eager - exact).abs().max() + torch.finfo(w.dtype).eps * exact.abs().max())
    return [((dw.double() - exact).abs().max() / budget).item() for dw in found]


def divided(w, g, round_delta):
    """Return the gradient by the formula of docs/derivations.md, rounded to bf16 where the kernel rounds."""
    scale, x = w.shape[-1] ** -0.5, w.float()
    out, lse = mssa(x, return_lse=True, backend="reference")
    shift = lse.min()
    r = (lse - shift).exp()[..., None]
    h = (g.float() / r).bfloat16().float()
    of_out = (h if round_delta else g.float() / r) * out.bfloat16().float()
    delta = of_out.sum(-1, keepdim=True)
    e = (scale * (x @ x.mT) - shift).exp()
    a = e * (torch.cat([x, h], -1) @ torch.cat([h, x], -1).mT - delta - delta.mT)
    return (e.bfloat16().float() @ h + (scale * a).bfloat16().float() @ x).bfloat16()


@CASES
def test_what_is_rounded_is_within_budget(tokens, taken):
    w, g = tokens.bfloat16(), randn(*tokens.shape, seed=1).bfloat16()
    (share,) = shares(w, g, divided(w, g, round_delta=True))
    assert share < 1 or not taken


def test_delta_is_of_the_rounded_gradient():
    """Where one weight is nearly all, a delta of the gradient as it was does not cancel with the rounded one's."""
    w = TOKENS["sphere"][0].bfloat16()
    g = randn(*w.shape, seed=1).bfloat16()
    rounded, given = shares(w, g, divided(w, g, True), divided(w, g, False))
    assert rounded < 1 < given


def gradient(w, g, config, **options):
    """Return dw of Triton's kernels, with some entries of the launch table's configuration replaced."""
    from crate_kernels._triton.table import forced
    from crate_kernels.ops.mssa.triton import tables

    leaf = w.detach().requires_grad_()
    out, lse = mssa(leaf, return_lse=True, backend="triton", **options)
    own = tables.BACKWARD.config(w.device, w.shape[-1], w.shape[-2], options.get("causal", False), w.dtype)
    with forced(tables.BACKWARD, {**own, **config}):
        return torch.autograd.grad([out, lse], leaf, [g, g.float().sum(-1)])[0]


@NEEDS_TRITON
@CASES
def test_triton_has_every_head_within_budget(tokens, taken):
    w, g = tokens.bfloat16().to(DEVICE), randn(*tokens.shape, seed=1, device=DEVICE).bfloat16()
    leaf = w.detach().requires_grad_()
    (dw,) = torch.autograd.grad(mssa(leaf, backend="triton"), leaf, g)
    assert shares(w, g, dw)[0] < 1


def exponentials(monkeypatch, total, w):
    """Return how many exponentials of scores the backward of ``total`` takes."""
    from triton.runtime import interpreter

    from crate_kernels.ops.mssa.triton import delta

    counted, exponential = [], interpreter.InterpreterBuilder.create_exp2

    def create_exp2(self, x):
        counted.append(x.data.size if x.data.ndim == 2 else 0)
        return exponential(self, x)

    with monkeypatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_exp2", create_exp2)
        patch.setattr(delta, "_MOST_ROUNDING", math.inf)  # else delta may be summed anew
        torch.autograd.grad(total, w)
    return sum(counted)


@pytest.mark.usefixtures("unrepeated")
@pytest.mark.skipif(not INTERPRETED, reason="counts what Triton's interpreter makes: needs TRITON_INTERPRET=1")
@CASES
def test_a_head_of_triton_takes_one_exponential_or_two(tokens, taken, monkeypatch):
    """The others of its call do not matter."""
    near = 0.5 * randn(1, 1, tokens.shape[2], 32, dtype=torch.float64)
    counts = []
    for heads in (near, torch.cat([near, tokens], 1)):
        w = heads.bfloat16().requires_grad_()
        out = mssa(w, backend="triton").float().sum()
        counts.append(exponentials(monkeypatch, out, w))
    assert counts[1] >= 2 * counts[0]
    assert (counts[1] == 2 * counts[0]) == taken


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
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("name", ["normal", "one-longest"])
def test_the_forms_of_triton_agree(name, options):
    w, g = TOKENS[name][0].bfloat16().to(DEVICE), randn(1, 1, 65, 32, seed=1, device=DEVICE).bfloat16()
    grads = []
    for derived in (0, 1, 3):
        torch.manual_seed(0)
        grads.append(gradient(w, g, {"DERIVED": derived}, **options).double())
    size = grads[0].abs().max()
    assert (grads[1] - grads[0]).abs().max() <= 2**-6 * size
    assert (grads[2] - grads[0]).abs().max() <= 2**-6 * size
