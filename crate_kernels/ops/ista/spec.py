"""Sparse-coding steps for tests, ``verify`` and benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from crate_kernels._core.spec import Case, Inputs, Spec, Sweep, Timed, Work, timed
from crate_kernels.ops.ista.api import ista

_AXES = ("batch", "seqlen", "dim")
_WIDE = (*_AXES, "hidden")

_CASES = (
    Case("ista", "few-tokens", (2, 5, 48)),
    Case("ista", "switch", (1, 32, 48)),  # the backward takes one product, the forward two
    Case("ista", "many-tokens", (3, 65, 48)),
    Case("ista", "one-token", (1, 1, 64)),
    Case("ista", "vit", (2, 197, 96)),
    Case("ista", "strided", (3, 65, 48), layout="strided"),
    Case("ista", "parameters", (3, 65, 48), {"step_size": 0.3, "lambd": 0.5}),
    Case("ista", "two-sided", (3, 65, 48), {"nonnegative": False, "lambd": 2.0}),
    Case("ista", "two-sided-few", (1, 9, 48), {"nonnegative": False, "lambd": 2.0}),
    Case("ista", "empty-batch", (0, 65, 48)),
)
_OVERCOMPLETE_CASES = (
    Case("ista_overcomplete", "two-steps", (3, 33, 24, 96)),
    Case("ista_overcomplete", "one-step", (3, 33, 24, 96), {"steps": 1}),
    Case("ista_overcomplete", "three-steps", (3, 33, 24, 96), {"steps": 3, "lambd": 0.2}),
    Case("ista_overcomplete", "tied", (3, 33, 24, 96), special="tied"),
    Case("ista_overcomplete", "empty-batch", (0, 33, 24, 96)),
)
_TIMED = (
    *timed("ista", "tokens-197", "CRATE-Ti, one image", (197, 384), (1, None), axes=_AXES),
    *timed("ista", "tokens-1576", "CRATE-S, batch 8", (197, 576), (8, None), brief=True, axes=_AXES),
    *timed("ista", "tokens-12608", "CRATE-S, batch 64", (197, 576), (64, 256), axes=_AXES),
    *timed("ista", "crate-b", "CRATE-B", (197, 768), (8, 256), axes=_AXES),
    *timed("ista", "lm-base", "causal CRATE base", (1024, 768), (2, 32), axes=_AXES),
)
_OVERCOMPLETE_TIMED = (
    *timed(
        "ista_overcomplete", "alpha-s", "CRATE-alpha, 384 wide", (197, 384, 1536), (8, None), brief=True, axes=_WIDE
    ),
    *timed("ista_overcomplete", "alpha-b", "CRATE-alpha B/16", (197, 768, 3072), (2, 128), axes=_WIDE),
)


def _draw(case: Case, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
    """Draw tokens none of which has an activation at its threshold.

    Raises:
        ValueError: nearly every token has one.
    """
    overcomplete = len(case.shape) == 4
    batch, seqlen, dim = case.shape[:3]
    tokens, hidden = batch * seqlen, case.shape[-1]

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    weight = (draw(dim, hidden) * dim**-0.5).to(dtype)
    x = weight.new_empty(0, dim)
    for some in draw(64 * tokens, dim).to(dtype).split(tokens):
        clear = _clear_of_kinks(case, some.double(), weight.double(), torch.finfo(dtype).eps)
        x = torch.cat([x, some[clear]])[:tokens]
        if len(x) == tokens:
            break
    if len(x) < tokens:
        raise ValueError(f"{case}: too few tokens of {case.shape} are clear of their thresholds in {dtype}")
    x = x.view(batch, seqlen, dim).to(device)
    if case.layout == "strided":
        x = x.repeat_interleave(2, -1)[..., ::2]
    tensors = {"x": x, "weight": weight.to(device)}
    if overcomplete and case.special != "tied":
        tensors["decoder"] = (draw(dim, hidden) * dim**-0.5).to(device, dtype)
    return Inputs(tensors, {})


def _arguments(case: Case, generator: torch.Generator) -> list[Tensor]:
    """Draw any tokens: benchmarks compare norms, to which an activation at its threshold adds nothing."""
    batch, seqlen, dim = case.shape[:3]
    weights = 2 * [(dim, case.shape[3])] if len(case.shape) == 4 else [(dim, dim)]
    x = torch.randn(batch, seqlen, dim, generator=generator)
    return [x, *(torch.randn(*shape, generator=generator) * dim**-0.5 for shape in weights)]


def _clear_of_kinks(case: Case, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Say which tokens have no activation within rounding of its threshold.

    There the gradient jumps, and a last-bit difference in the activation is no error. The distance is
    several times the rounding of the update, which ``step_size`` scales: ``eps`` in units of the tokens at 0.1.
    """
    step_size, lambd = case.options.get("step_size", 0.1), case.options.get("lambd", 0.1)
    if len(case.shape) == 3:
        update = x + step_size * (x - x @ weight.T) @ weight
        size = update if case.options.get("nonnegative", True) else update.abs()
        return ((size - step_size * lambd).abs() > 10 * step_size * eps).all(-1)
    code, clear = x.new_zeros(x.shape[0], weight.shape[1]), torch.ones(x.shape[0], dtype=torch.bool)
    for _ in range(case.options.get("steps", 2)):
        update = code + step_size * (x - code @ weight.T) @ weight - step_size * lambd
        clear &= (update.abs() > 2 * eps * step_size).all(-1)
        code = update.relu()
    return clear


def published(x: Tensor, weight: Tensor, step_size: float = 0.1, lambd: float = 0.1) -> Tensor:
    """CRATE's ``FeedForward``: three products, then the step and the threshold."""
    back = F.linear(F.linear(x, weight), weight.t())
    return F.relu(x + step_size * (F.linear(x, weight.t()) - back) - step_size * lambd)


def published_overcomplete(
    x: Tensor, weight: Tensor, decoder: Tensor | None = None, step_size: float = 0.1, lambd: float = 0.1
) -> Tensor:
    """CRATE-alpha's ``OvercompleteISTABlock``: two steps from zero, then the decoder."""
    code = F.relu(step_size * (x @ weight) - step_size * lambd)
    residual = code @ weight.t() - x
    code = F.relu(code - step_size * (residual @ weight) - step_size * lambd)
    return code @ (weight if decoder is None else decoder).t()


def _work(case: Case) -> Work:
    """Count one product forward and two backward: the minimum of any form, so more products give no higher rate."""
    batch, seqlen, dim = case.shape[:3]
    tensor, weights = float(batch * seqlen * dim), dim**2
    product = 2.0 * tensor * dim
    return Work((product, 2 * product), (2 * tensor + weights, 4 * tensor + 2 * weights))


def _overcomplete_work(case: Case) -> Work:
    """Count the products of two steps, four forward and twice as many backward."""
    batch, seqlen, dim, hidden = case.shape
    tensor, weights = float(batch * seqlen * dim), 2 * dim * hidden
    product = 2.0 * tensor * hidden
    return Work((4 * product, 8 * product), (2 * tensor + weights, 4 * tensor + 2 * weights))


def _tiny(device: torch.device, tracked: bool, backend: str) -> dict[str, Callable[[], Any]]:
    x, weight = torch.randn(4, 32, device=device), torch.randn(32, 32, device=device)
    x.requires_grad_(tracked)
    return {
        "raw op": lambda: torch.ops.crate_kernels.ista_fwd(x, weight, 0.1, 0.1, True, torch.float32, backend),
        "public": lambda: ista(x, weight),
    }


SPECS = (
    Spec(
        "ista",
        package="ista",
        outputs=("out",),
        cases=_CASES,
        draw=_draw,
        published=lambda case: published,
        work=_work,
        tiny=_tiny,
        timed=_TIMED,
        sweep=Sweep(
            "ista: 768 x 768 dictionary",
            Timed(Case("ista", "base", (1, 0, 768)), "", (), axes=_AXES),
            (256, 1024, 4096),
            Timed(Case("ista", "base", (8, 197, 576)), "", (), axes=_AXES),
        ),
        arguments=_arguments,
    ),
    Spec(
        "ista_overcomplete",
        package="ista",
        outputs=("out",),
        cases=_OVERCOMPLETE_CASES,
        draw=_draw,
        published=lambda case: published_overcomplete,
        work=_overcomplete_work,
        timed=_OVERCOMPLETE_TIMED,
        arguments=_arguments,
    ),
)
