"""The public functions of sparse coding: validation and choice of backend."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from crate_kernels._core import autograd, backends, checks, measured, op_checks, operator
from crate_kernels._core.shortcuts import may_repeat
from crate_kernels.ops.ista import learned, op, reference
from crate_kernels.ops.ista.call import ISTACall, OvercompleteCall

_HALF = (torch.float16, torch.bfloat16)


@checks.closed
def ista(
    x: Tensor,
    weight: Tensor,
    *,
    step_size: float | Tensor = 0.1,
    lambd: float | Tensor = 0.1,
    bias: Tensor | None = None,
    nonnegative: bool = True,
    backend: str | None = None,
    **unknown: NoReturn,
) -> Tensor:
    """Take one proximal step of sparse coding.

    ``y = relu(x + step_size * (x W - x W^T W) - step_size * lambd)`` with tokens as rows: the ISTA block of
    CRATE (Yu et al., 2023), with its non-negative threshold. Differentiable once on every backend, in
    any order on ``backend="reference"``. If the step size or the threshold is a tensor, or with a bias, the step is
    composed from PyTorch's operators, and these have gradients too: the kernels take numbers.

    Args:
        x: tokens, (..., dim), floating.
        weight: dictionary, (dim, dim), x's dtype, or float32 beside half-precision ``x``; under autocast also half
            beside float32 or the other half, converted to float32.
        step_size: step of the gradient descent, non-negative, 0.1 by default; or a tensor () or (dim,), of any sign.
        lambd: weight of the sparsity penalty, non-negative, 0.1 by default; or a tensor () or (dim,), of any sign.
        bias: () or (dim,), added before the threshold is applied; None (the default) adds nothing.
        nonnegative: True (the default) thresholds with ReLU; False with the two-sided soft threshold of CRATE
            Eq. 116-117, ``sign(v) max(|v| - step_size * lambd, 0)``.
        backend: None (the default) takes the best available one; a name is obeyed or refused.

    Returns:
        (..., dim) in x's dtype. Under autocast float32 ``x`` stays the residual and only the products run in
        the autocast dtype; ``W - W^T W`` is formed from the weight as passed and rounded once. Do not change
        ``x``, ``weight`` or the output in place before the backward, which reads them.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: a shape, dtype or value that does not fit.
        RuntimeError: the requested backend is unavailable.
        NotImplementedError: forward-mode AD, double backward or a dtype that the backend does not have.
    """
    if unknown:
        checks.no_keyword(ista, unknown)
    key = fastest = None
    if bias is None and may_repeat(x):
        options = step_size, lambd, nonnegative, backend
        fastest = None if backend is not None else _fastest("ista", x, weight)
        compute = _compute_dtype(x) if operator.autocast_is_on() else x.dtype
        key = (x.dtype, compute, fastest, *options, *map(type, options))  # types, for True is 1
        if (found := op.shortcuts.repeat(key, x, weight)) is not None:
            return found
    weight = _dictionary("ista", x, weight, "(dim, dim)")
    if weight.shape[0] != weight.shape[1]:
        raise ValueError(f"ista: weight must be (dim, dim), got {tuple(weight.shape)}")
    if learned.takes(step_size, lambd, bias):
        checks.flag("ista", "nonnegative", nonnegative)
        terms = learned.check(
            "ista", x, ("dim", weight.shape[0]), learned.LearnedTerms(step_size, lambd, bias), backend
        )
        return learned.ista(x, weight, terms, nonnegative, _compute_dtype(x), backend)
    step_size = checks.number("ista", "step_size", step_size, minimum=0.0, below=_beyond(x))
    lambd = checks.number("ista", "lambd", lambd, minimum=0.0)
    checks.flag("ista", "nonnegative", nonnegative)
    call = ISTACall(step_size, lambd, nonnegative, _compute_dtype(x))
    name = backends.resolve("ista", backend, x.device, x.dtype)
    if name == "reference":
        return reference.forward(*_promote(x, weight), call).to(x.dtype)
    checks.transforms("ista", name, x, weight)
    named = backends.to_op_arg(name, backend, fastest)
    y = op.ista(x, weight, call, named)
    if key is not None:
        op.shortcuts.remember(key, (x, weight), call, named)
    return y


@checks.closed
def ista_overcomplete(
    x: Tensor,
    weight: Tensor,
    decoder: Tensor | None = None,
    *,
    step_size: float | Tensor = 0.1,
    lambd: float | Tensor = 0.1,
    bias: Tensor | None = None,
    steps: int = 2,
    backend: str | None = None,
    **unknown: NoReturn,
) -> Tensor:
    """Take proximal steps of sparse coding in an overcomplete dictionary, and decode.

    From ``z = 0``, ``steps`` times ``z = relu(z + step_size * (x - z D^T) D - step_size * lambd)``; returns
    ``z D1^T``: the ISTA block of CRATE-alpha (Yang et al., 2024). The published block adds a residual around it.

    Args:
        x: tokens, (..., dim), floating.
        weight: dictionary D, (dim, hidden), x's dtype, or float32 beside half-precision ``x``; under autocast also
            half beside float32 or the other half, converted to float32.
        decoder: D1, (dim, hidden), weight's dtype; None (the default) ties it to ``weight``.
        step_size: step of the gradient descent, non-negative, 0.1 by default; or a tensor () or (hidden,).
        lambd: weight of the sparsity penalty, non-negative, 0.1 by default; or a tensor () or (hidden,).
        bias: () or (hidden,), added before each threshold; None (the default) adds nothing.
        steps: number of proximal steps, at least 1, 2 by default.
        backend: None (the default) takes the best available one; a name is obeyed or refused.

    Returns:
        (..., dim) in x's dtype; under autocast everything runs in the autocast dtype in between. Do not change an input
        in place before the backward, which reads them.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: a shape, dtype or value that does not fit.
        RuntimeError: the requested backend is unavailable.
        NotImplementedError: forward-mode AD, double backward or a dtype that the backend does not have.
    """
    if unknown:
        checks.no_keyword(ista_overcomplete, unknown)
    key = fastest = operand = None
    keep = False
    if (
        bias is None
        and may_repeat(x)
        and isinstance(weight, Tensor)
        and (decoder is None or isinstance(decoder, Tensor))
    ):
        options = step_size, lambd, steps, backend
        fastest = None if backend is not None else _fastest("ista_overcomplete", x, weight, decoder)
        operand, keep = _operand(x), autograd.needs_grad(x, weight, decoder)
        # A half dictionary beside other tokens is converted to float32.
        kind = x.dtype, operand.dtype, weight.dtype, decoder is None, keep
        key = (*kind, fastest, *options, *map(type, options))  # types, for True is 1
        if (found := op.overcomplete_shortcuts.repeat(key, operand, weight, decoder)) is not None:
            return found.to(x.dtype)
    dictionary = _dictionary("ista_overcomplete", x, weight, "(dim, hidden)")
    if decoder is not None:
        checks.tensor("ista_overcomplete", "decoder", decoder, 2, "(dim, hidden)")
        checks.shape("ista_overcomplete", "decoder", decoder, tuple(weight.shape), "weight's shape")
        checks.same_device("ista_overcomplete", "decoder", decoder, x, "x")
        if decoder.dtype != weight.dtype:
            raise ValueError(f"ista_overcomplete: decoder must be {weight.dtype} as weight, got {decoder.dtype}")
        decoder = decoder.to(dictionary.dtype)
    checks.integer("ista_overcomplete", "steps", steps, minimum=1)
    if learned.takes(step_size, lambd, bias):
        width, terms = ("hidden", weight.shape[1]), learned.LearnedTerms(step_size, lambd, bias)
        terms = learned.check("ista_overcomplete", x, width, terms, backend)
        return learned.ista_overcomplete(x, dictionary, decoder, terms, steps, _compute_dtype(x))
    step_size = checks.number("ista_overcomplete", "step_size", step_size, minimum=0.0, below=_beyond(x))
    lambd = checks.number("ista_overcomplete", "lambd", lambd, minimum=0.0)
    call = OvercompleteCall(step_size, lambd, steps)
    name = backends.resolve("ista", backend, x.device, x.dtype, "ista_overcomplete")
    if name == "reference":
        return reference.forward_overcomplete(*_promote(x, dictionary), decoder, call).to(x.dtype)
    checks.transforms("ista_overcomplete", name, x, dictionary, decoder)
    operand, named = _operand(x) if operand is None else operand, backends.to_op_arg(name, backend, fastest)
    out = op.ista_overcomplete(operand, dictionary, decoder, call, named)
    if key is not None and dictionary is weight:
        op.overcomplete_shortcuts.remember(key, (operand, weight, decoder), call, named, 1, keep)
    return out.to(x.dtype)


def _fastest(name: str, x: Tensor, weight: Tensor, decoder: Tensor | None = None) -> str | None:
    """Return the backend that was measured to be the fastest for a call; None for the usual one."""
    if not measured.table(x) or not isinstance(weight, Tensor) or weight.is_nested or not x.shape[-1]:
        return None
    sizes = tuple(dict.fromkeys((x.shape[-1], *weight.shape)))
    return measured.fastest(name, sizes, x.numel() // x.shape[-1], False, (x, weight, decoder))


def _dictionary(name: str, x: Tensor, weight: Tensor, layout: str) -> Tensor:
    """Require tokens and a dictionary that fit each other; return it, as float32 where only autocast mixes the two."""
    checks.tensor(name, "x", x, None, "(..., dim)")
    checks.tensor(name, "weight", weight, 2, layout)
    if x.dim() == 0 or x.shape[-1] != weight.shape[0]:
        raise ValueError(f"{name}: x must be (..., dim) with dim = {weight.shape[0]}, got {tuple(x.shape)}")
    checks.same_device(name, "weight", weight, x, "x")
    if weight.dtype == x.dtype or (weight.dtype == torch.float32 and x.dtype in _HALF):
        return weight
    if weight.dtype in _HALF and x.dtype in (torch.float32, *_HALF) and operator.autocast_dtype(x) is not None:
        return weight.float()
    raise ValueError(f"{name}: weight must be {x.dtype} as x, or float32 beside half x, got {weight.dtype}")


def _beyond(x: Tensor) -> float | None:
    """Return what a step must be below: backends compute in float32, or float64 for float64 tokens."""
    return None if x.dtype == torch.float64 else 2.0**128


def _compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of the products: autocast's for float32 ``x``, else x's own."""
    dtype = operator.autocast_dtype(x) if x.dtype == torch.float32 else None
    return x.dtype if dtype is None else dtype


def _operand(x: Tensor) -> Tensor:
    """Return the tokens in the dtype of the products."""
    dtype = _compute_dtype(x)
    if dtype == x.dtype:
        return x
    op_checks.in_memory("ista_overcomplete", "x", x)
    return x.to(dtype)


def _promote(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Bring half tokens to a float32 dictionary's dtype for plain PyTorch, which does not mix."""
    return x.to(torch.promote_types(x.dtype, weight.dtype)), weight
