"""A linear layer as our modules apply it beside nn.Linear, and what both give."""

import copy

import pytest
import torch
from torch import nn

from crate_kernels.nn import _linear
from crate_kernels.testing import FORWARD_FACTOR, GRADIENT_FACTOR

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs a PyTorch with oneDNN")


IN, OUT = 48, 80
SHAPES = {"2d": (65, IN), "3d": (2, 37, IN), "1d": (IN,), "4d": (2, 3, 5, IN), "empty": (0, 7, IN)}


class Applied(nn.Module):
    """A linear layer as our modules apply it; as it is, for backend="reference"."""

    def __init__(self, linear, backend):
        super().__init__()
        self.linear, self.backend = linear, backend

    def forward(self, x):
        return _linear.linear(self.linear, x, self.backend)


def pair(bias=True, backend=None, dtype=torch.float32):
    """Return nn.Linear as our modules apply it, and as it is, with the same weights."""
    torch.manual_seed(0)
    linear = nn.Linear(IN, OUT, bias, dtype=dtype)
    return Applied(linear, backend), Applied(copy.deepcopy(linear), "reference")


def outcome(layer, x):
    """Return the output and all gradients by name."""
    x = x.detach().clone().requires_grad_()
    y = layer(x)
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.dtype)
    named = {"x": x, **{name: p for name, p in layer.named_parameters() if p.requires_grad}}
    grads = torch.autograd.grad(y, list(named.values()), g)
    return {"y": y.detach(), **dict(zip(named, grads, strict=True))}


def check(ours, plain, x):
    actual, eager, eps = outcome(ours, x), outcome(plain, x), torch.finfo(x.dtype).eps
    exact = outcome(copy.deepcopy(plain).double(), x.double())
    assert actual.keys() == exact.keys()
    for name, target in exact.items():
        assert actual[name].shape == target.shape
        if not target.numel():
            continue
        factor = FORWARD_FACTOR if name == "y" else GRADIENT_FACTOR
        size = target.abs().max()
        tolerance = factor * ((eager[name].double() - target).abs().max() + eps * size)
        assert (actual[name].double() - target).abs().max() <= tolerance, name
