"""Gradients where what the forward saved does not serve.

Of 16-bit tokens whose delta, g . out, is mostly the rounding of out: sinks, and gradients of one sign. Of fp32 tokens
whose lse is large.
"""

import functools
import math

import pytest
import torch

from crate_kernels import mssa
from tests.ops.common import FORMS, LEVELS, NEEDS_EXTENSION, TURNS, backends

HALF = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
KERNELS = [p for p in backends("mssa", reference=False) if "composite" not in p.values]


def sink(tokens, head_dim, factor):
    """One token ``factor`` times as long as the others, which many of them attend to in part."""

    def draw(generator):
        w, g = (torch.randn(1, 2, tokens, head_dim, generator=generator) for _ in range(2))
        w[:, :, 0] *= factor
        return w, g

    return draw


def ones(tokens, head_dim):
    """Layer-normed tokens, whose products with ones are 0, and ones as the gradient of each."""

    def draw(generator):
        w = torch.randn(1, 1, tokens, head_dim, generator=generator)
        return torch.nn.functional.layer_norm(w, (head_dim,)), torch.ones_like(w)

    return draw


def alike(generator):
    """Tokens so long and so alike that a row's lse is above 16: cpp then sums the weights of fp32 rows anew."""
    w = torch.randn(1, 2, 1, 64, generator=generator)
    w = w * (14 * 64**0.5) ** 0.5 / w.norm(dim=-1, keepdim=True)
    w, g = (part * torch.randn(1, 2, 150, 64, generator=generator) + of for part, of in ((0.05, w), (1, 0)))
    return w, g


def small(generator):
    """Long tokens around one mean, and gradients whose products with differences of tokens are subnormal in fp16."""
    mean = torch.randn(1, 1, 1, 64, generator=generator)
    w, g = (torch.randn(1, 1, 200, 64, generator=generator) for _ in range(2))
    return 0.1 * w + 400 * mean / mean.norm(), 1e-3 * g


def before(factor, draw):
    """The last of the tokens is ``factor`` times as long: in the causal form no other attends to it."""

    def drawn(generator):
        w, g = draw(generator)
        w[:, :, -1] *= factor
        return w, g

    return drawn


SMALL = (small, {"scale": 0.008}, (0,))
# Draws with errors of 1.1 to 195 tolerances in the gradients of PyTorch's attention, one of bf16 and one of fp16.
CASES = {
    "two": (sink(2, 16, 10), {}, (7, 2)),
    "three": (sink(3, 16, 10), {}, (2, 9)),
    "four": (sink(4, 64, 30), {}, (8,)),
    "four-taller": (sink(4, 64, 100), {}, (2, 10)),
    "eight": (sink(8, 64, 30), {}, (1, 7)),
    "causal": (sink(8, 64, 30), {"causal": True}, (1, 7)),
    "more": (sink(33, 32, 100), {}, (3, 7)),
    "ones": (ones(197, 128), {}, (0, 1)),
    "ones-before-a-tall-token": (before(30, ones(197, 128)), {"causal": True}, (6,)),
}


def gradient(w, g, backend, **options):
    leaf = w.detach().requires_grad_()
    return torch.autograd.grad(mssa(leaf, backend=backend, **options), leaf, g)[0].double()


def worst(case, dtype, backend, device="cpu", gradient_of=gradient):
    """Return the largest error / tolerance, over some draws, of a backend's gradient by ``gradient_of``."""
    (draw, options, seeds), shares = case, []
    for seed in seeds:
        w, g, exact, tolerance = judged(draw, tuple(options.items()), seed, dtype)
        found = gradient_of(w.to(device), g.to(device), backend, **options).cpu()
        shares.append((found - exact).abs().max().item() / tolerance)
    return max(shares)


@functools.cache
def judged(draw, options, seed, dtype):
    """Return what is drawn, its exact gradient and how far off one may be, once for all backends and levels."""
    w, g = (t.to(dtype) for t in draw(torch.Generator().manual_seed(seed)))
    exact = gradient(w.double(), g.double(), "reference", **dict(options))
    eager = (gradient(w, g, "reference", **dict(options)) - exact).abs().max().item()
    eager = eager if math.isfinite(eager) else 0.0  # fp16 scores may overflow there
    return w, g, exact, 3 * (eager + torch.finfo(dtype).eps * exact.abs().max().item())


def check_weights_of_one(tokens, dtype, backend, device="cpu"):
    """Tokens that see themselves alone: dw is dout. fp16 weights get the largest factor here, and may not overflow."""
    w = (16 * torch.eye(tokens, 64)).expand(1, 2, tokens, 64).to(device, dtype)
    g = (1e-3 * torch.randn(1, 2, tokens, 64)).to(device, dtype)
    torch.testing.assert_close(gradient(w, g, backend), g.double(), rtol=2 * torch.finfo(dtype).eps, atol=1e-7)


@TURNS
@HALF
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize(("backend", "device"), KERNELS)
def test_a_delta_that_cancels(case, dtype, backend, device):
    assert worst(case, dtype, backend, device) < 1


@HALF
@pytest.mark.parametrize(("backend", "device"), KERNELS)
def test_gradients_of_lse_for_tokens_of_zeros(dtype, backend, device):
    """No multiple of such a token is as long as the gradient."""
    w = torch.zeros(1, 2, 40, 16, dtype=dtype, device=device, requires_grad=True)
    _, lse = mssa(w, return_lse=True, backend=backend)
    assert not torch.autograd.grad(lse.sum(), w)[0].any()


@HALF
@pytest.mark.parametrize(("backend", "device"), KERNELS)
def test_small_gradients_of_long_tokens(dtype, backend, device):
    assert worst(SMALL, dtype, backend, device) < 1


@HALF
@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize(("backend", "device"), KERNELS)
def test_weights_of_one_beside_small_gradients(tokens, dtype, backend, device):
    check_weights_of_one(tokens, dtype, backend, device)


@FORMS
@pytest.mark.parametrize(("backend", "device"), KERNELS)
def test_float32_tokens_that_are_long_and_alike(causal, backend, device):
    assert worst((alike, {"causal": causal}, (0, 1)), torch.float32, backend, device) < 1


@NEEDS_EXTENSION
@pytest.mark.parametrize("name", LEVELS)
def test_float32_tokens_that_are_long_and_alike_at_every_level(name, level):
    level(name)
    assert worst((alike, {}, (0, 1)), torch.float32, "cpp") < 1


@NEEDS_EXTENSION
@HALF
@pytest.mark.parametrize("name", LEVELS)
@pytest.mark.parametrize("case", ["four", "causal", "more", "ones"])
def test_a_delta_that_cancels_at_every_level(case, name, dtype, level):
    level(name)
    assert worst(CASES[case], dtype, "cpp") < 1
