"""Operands of any strides, which every backend must take: results are those of contiguous ones."""

import pytest
import torch

from tests.ops.common import randn

STRIDES = {
    "channels-apart": lambda t: t.repeat_interleave(3, -1)[..., ::3],
    "rows-apart": lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
    "transposed": lambda t: t.mT.contiguous().mT,
    "expanded": lambda t: t[:1].expand(t.shape),
}
EACH_LAYOUT = pytest.mark.parametrize("lay_out", STRIDES.values(), ids=STRIDES)


def check(function, lay_out, dtype, backend, device="cpu", dim=24):
    """Compare output and gradients of a call with those of contiguous operands."""
    x, dout = (lay_out(randn(40, dim, dtype=dtype, device=device, seed=seed)) for seed in (0, 1))
    weight = lay_out(randn(dim, dim, dtype=dtype, device=device, seed=2) * dim**-0.5)

    def run(x, weight, dout):
        x, weight = (t.detach().requires_grad_() for t in (x, weight))
        out = function(x, weight, backend=backend)
        return out.detach(), *torch.autograd.grad(out, (x, weight), dout)

    expected = run(*(t.contiguous() for t in (x, weight, dout)))
    # A transposed operand may take another of the library's products, which rounds in another order.
    eps = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(run(x, weight, dout), expected, rtol=eps, atol=eps)
