"""Upstream gradients of every layout, which need not be that of the tokens."""

import pytest
import torch

from crate_kernels import ista, ista_overcomplete, mssa, tssa
from tests.ops.common import LAYOUTS, backends, interpreted, offsets, padding, randn

PACKED = {"cu_seqlens": offsets((20, 0, 13, 37)), "max_seqlen": 37}
MASK = padding("scattered", 2, 35)
TEMP, BIAS = torch.tensor([0.8, 1.0, 1.3]), 0.1 * randn(3, 37, seed=3).float()


def pack(w):
    return w.transpose(1, 2).flatten(0, 1)


def weight(x, hidden):
    return (randn(x.shape[-1], hidden, seed=2) / x.shape[-1] ** 0.5).to(x.dtype)


CALLS = {  # functions of (batch, nheads, seqlen, head_dim)
    "mssa": lambda w, **b: mssa(w, return_lse=True, **b),
    "mssa-causal": lambda w, **b: mssa(w, causal=True, **b),
    "mssa-padded": lambda w, **b: mssa(w, key_padding_mask=MASK, **b),
    "mssa-packed": lambda w, **b: mssa(pack(w), **PACKED, **b),
    "tssa": lambda w, **b: tssa(w, TEMP.to(w.dtype), return_membership=True, **b),
    "tssa-causal": lambda w, **b: tssa(w, TEMP.to(w.dtype), causal=True, denom_bias=BIAS.to(w.dtype), **b),
    "tssa-padded": lambda w, **b: tssa(w, TEMP.to(w.dtype), key_padding_mask=MASK, **b),
    "tssa-packed": lambda w, **b: tssa(pack(w), TEMP.to(w.dtype), causal=True, **PACKED, **b),
    "ista": lambda w, **b: ista(w, weight(w, w.shape[-1]), **b),
    "ista_overcomplete": lambda w, **b: ista_overcomplete(w, weight(w, 40), **b),
}
TOKENS = ("contiguous", "projection", "channels-apart")
WIDTHS = (32, 20)  # whole vectors, and not
EQUAL = {"rtol": 0, "atol": 0}


def gradients(call, w, upstream, backend):
    """Return the gradient of w; autograd hands ``upstream`` on as it lies in memory."""
    leaf = w.detach().requires_grad_()
    outputs = call(leaf, backend=backend)
    return torch.autograd.grad(outputs, leaf, upstream[: len(outputs)] if isinstance(outputs, tuple) else upstream[0])


def marks(backend, place):
    """Leave every other layout to make test-all where gradients are PyTorch's own."""
    return pytest.mark.exhaustive if backend == "composite" and place % 2 else ()


@pytest.mark.parametrize(
    ("name", "backend", "laid"),
    [
        pytest.param(name, backend, laid, id=f"{name}-{backend}-{laid}", marks=marks(backend, place))
        for name in CALLS
        for backend, device in (p.values for p in backends(name.partition("-")[0].removesuffix("_overcomplete"), False))
        if device == "cpu"
        # A call takes seconds in the interpreter.
        for place, laid in enumerate(("one-number",) if interpreted(backend, device) else LAYOUTS)
    ],
)
def test_gradients_do_not_depend_on_the_layout_of_an_upstream_gradient(name, backend, laid):
    """In a kernel no bit does; PyTorch's own sums may go in another order, and so do those of tssa's CUDA kernels,
    whose threads have as many channels as one access of the gradient takes.
    """
    rounded = backend == "composite" or (backend == "emulated" and name.startswith("tssa"))
    slow, lay, call = interpreted(backend, "cpu"), LAYOUTS[laid], CALLS[name]
    for width in WIDTHS[: 1 if slow else None]:
        for tokens in TOKENS[: 1 if slow else None]:
            for dtype in (torch.float32,) if slow else (torch.float32, torch.bfloat16):
                w = LAYOUTS[tokens](randn(2, 3, 35, width, dtype=dtype))
                outputs = call(w, backend=backend)
                outputs = outputs if isinstance(outputs, tuple) else (outputs,)
                upstream = [lay(randn(*out.shape, seed=seed, dtype=out.dtype)) for seed, out in enumerate(outputs, 1)]
                dense = [one.contiguous() for one in upstream]
                actual, expected = (gradients(call, w, grad_out, backend) for grad_out in (upstream, dense))
                torch.testing.assert_close(actual, expected, **({} if rounded else EQUAL))
