"""Sparse coding: the FLOP that PyTorch counts are those of the products that run."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from crate_kernels import ista, ista_overcomplete
from crate_kernels._core import backends as _backend
from crate_kernels.ops.ista.call import ISTACall
from tests.ops.common import backends, randn
from tests.ops.ista.inputs import dictionary

FUSED = backends("ista", reference=False)


def flops(call):
    """Return what PyTorch counts of a call, and its result."""
    with FlopCounterMode(display=False) as counter:
        result = call()
    return counter.get_total_flops(), result


class Products(TorchDispatchMode):
    """Adds up the FLOP of the matrix products that run; PyTorch's counter leaves out those in place."""

    flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            left, right = args[-2:]
            self.flops += 2 * left.shape[0] * left.shape[1] * right.shape[1]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("asked", ["xw", "x", "w"])
@pytest.mark.parametrize("tokens", [1, 4, 9, 11, 40])
def test_flops_are_those_of_the_products_that_run(tokens, asked):
    """By shapes alone one token counted as dim of them, in the form that its backend does not take."""
    x, weight = randn(tokens, 12).requires_grad_("x" in asked), dictionary(12, 12).requires_grad_("w" in asked)
    counted, y = flops(lambda: ista(x, weight, backend="composite"))
    counted_back, _ = flops(lambda: y.sum().backward())
    kernel, call = _backend.kernel("ista", "composite"), ISTACall(0.1, 0.1, True, x.dtype)
    plain = x.detach(), weight.detach()
    with Products() as forward:
        kernel.forward(*plain, call)
    with Products() as backward:
        kernel.backward(torch.ones_like(y), *plain, y.detach(), "x" in asked, "w" in asked, call)
    assert (counted, counted_back) == (forward.flops, backward.flops)


@pytest.mark.parametrize(("backend", "device"), FUSED)
@pytest.mark.parametrize("one", [True, False], ids=["one-product", "two-products"])
def test_flops_follow_the_form_that_a_backend_takes(one, backend, device, monkeypatch):
    x, weight = randn(5, 12).to(device, torch.float32), dictionary(12, 12).to(device, torch.float32)
    engine = type(_backend.kernel("ista", backend, device).engine(x))
    monkeypatch.setattr(engine, "one_product", lambda *_: one)
    monkeypatch.setattr(engine, "one_product_back", lambda *_: one)
    counted, y = flops(lambda: ista(x, weight.requires_grad_(), backend=backend))
    product, square = 2 * 5 * 12 * 12, 2 * 12**3
    assert counted == (product + square if one else 2 * product)
    assert flops(lambda: y.sum().backward())[0] == (product + square if one else 4 * product)


def test_flops_of_the_overcomplete_form():
    tokens, dim, hidden, steps = 4, 12, 20, 3
    x = randn(tokens, dim).requires_grad_()
    product, weight = 2 * tokens * dim * hidden, dictionary(dim, hidden).requires_grad_()
    counted, out = flops(lambda: ista_overcomplete(x, weight, steps=steps, backend="composite"))
    # z_0 = 0 spares the first step one of its two products, and decoding is one more.
    assert counted == 2 * steps * product
    assert flops(lambda: out.sum().backward())[0] == 4 * steps * product
