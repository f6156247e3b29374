"""The products of a model's step and nothing else: how far from them a step is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crate_kernels._core.products import product
from crate_kernels.nn import ISTA, MSSA, CausalMSSA

Work = Callable[[], object]


def products(model: nn.Module, run: Callable[[nn.Module], object], backward: bool) -> Work:
    """Return a call that repeats the products of ``run(model)``, those of its backward too if ``backward``.

    Linear layers, convolutions, the one product of a sparse-coding step and the two of subspace attention, in their own
    shapes and dtype, with the model's own weights and by the faster of PyTorch's libraries. A product has two in the
    backward; attention has five, as its weights are not kept.
    """
    found: list[Work] = []

    def record(module: nn.Module, args: tuple[Any, ...], _: object) -> None:
        if not args or not isinstance(args[0], Tensor):
            return
        x = args[0].detach()
        if isinstance(module, (nn.Linear, ISTA)):
            found.append(_linear(x.flatten(0, -2), module.weight.detach(), backward))
        elif isinstance(module, nn.Conv2d):
            found.append(_convolution(module, x, backward))
        elif isinstance(module, MSSA):
            found.append(_attention(x, module.heads, module.dim_head, backward))
        elif isinstance(module, CausalMSSA):
            found.append(_attention(x, module.n_head, module.n_embd // module.n_head, backward))

    hooks = [module.register_forward_hook(record) for module in model.modules()]
    with torch.no_grad():
        run(model)
    for hook in hooks:
        hook.remove()

    def work() -> None:
        for multiply in found:
            multiply()

    return work


def _linear(x: Tensor, weight: Tensor, backward: bool) -> Work:
    g = x.new_ones(x.shape[0], weight.shape[0])  # (tokens, out)

    def work() -> None:
        product(x, weight)
        if backward:
            product(g, weight.t())
            product(g.t(), x.t())

    return work


def _convolution(module: nn.Conv2d, x: Tensor, backward: bool) -> Work:
    weight = module.weight.detach()
    operands = [t.detach().requires_grad_(backward) for t in (x, weight)]
    sizes = {"stride": module.stride, "padding": module.padding, "dilation": module.dilation, "groups": module.groups}

    def work() -> None:
        y = F.conv2d(*operands, **sizes)  # pyright: ignore[reportArgumentType,reportCallIssue]
        if backward:
            torch.autograd.grad(y, operands, torch.ones_like(y))

    return work


def _attention(x: Tensor, heads: int, head_dim: int, backward: bool) -> Work:
    batch, seqlen, _ = x.shape
    w = x.new_ones(batch * heads, seqlen, head_dim)
    weights = x.new_ones(batch * heads, seqlen, seqlen)

    def work() -> None:
        for _ in range(3 if backward else 1):  # scores; again, and the gradient of the weights
            torch.bmm(w, w.mT, out=weights)
        for _ in range(4 if backward else 1):  # rows out; gradients of value, query and key
            torch.bmm(weights, w)

    return work
