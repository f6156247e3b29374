"""The imaginary part of a conjugate is a view whose sign PyTorch applies when it is read: kernels read addresses."""

import pytest
import torch

from crate_kernels import ista, ista_overcomplete, mssa, tssa
from tests.ops.common import backends, interpreted, randn


def lazy(t):
    """Return the same numbers, which lie in memory with the other sign."""
    return torch.complex(torch.zeros_like(t), -t).conj().imag


def inputs(op, device):
    if op in ("mssa", "tssa", "tssa-causal"):
        tokens = randn(1, 2, 5, 16, dtype=torch.float32, device=device)
        if op == "mssa":
            return (tokens,)
        heads = torch.tensor([0.5, 1.5], device=device)
        bias = randn(2, 5, seed=1, dtype=torch.float32, device=device).abs()
        return (tokens, heads) if op == "tssa" else (tokens, heads, bias)
    x = randn(1, 5, 16, dtype=torch.float32, device=device)
    dictionary = randn(16, 16, seed=1, dtype=torch.float32, device=device) / 4
    return (x, dictionary) if op == "ista" else (x, dictionary, randn(16, 16, seed=2).to(x) / 4)


CALLS = {
    "mssa": mssa,
    "tssa": tssa,
    "tssa-causal": lambda w, temp, bias, backend: tssa(w, temp, causal=True, denom_bias=bias, backend=backend),
    "ista": ista,
    "ista_overcomplete": ista_overcomplete,
}
EACH = [
    pytest.param(op, *p.values, id=f"{op}-{p.id}", marks=p.marks)
    for op in CALLS
    for p in backends(op.partition("-")[0].partition("_")[0])
]


@pytest.mark.parametrize(("op", "backend", "device"), EACH)
def test_the_sign_is_applied(op, backend, device):
    tensors = inputs(op, device)

    def call(*arguments):
        return CALLS[op](*arguments, backend=backend)

    once = interpreted(backend, device)
    with torch.no_grad():
        expected = call(*tensors)
        for i in range(len(tensors)):
            arguments = [lazy(t) if n == i else t for n, t in enumerate(tensors)]
            for _ in range(1 if once else 3):  # later calls may repeat a plan
                torch.testing.assert_close(call(*arguments), expected)
    dout = randn(*expected.shape, seed=3).to(expected)
    found = []
    for sign in (torch.clone, lazy):
        leaves = [t.clone().requires_grad_() for t in tensors]
        found.append(torch.autograd.grad(call(*leaves), leaves, sign(dout)))
    torch.testing.assert_close(found[1], found[0])
