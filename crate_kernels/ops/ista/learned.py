"""Steps whose size or threshold is a tensor, or which have a bias: learned, and per channel or atom if of that width.

The kernels take numbers. These are composed from PyTorch's operators, which differentiate in every argument, in any
order. Products are as few as the kernels': one of the tokens with K = W - W^T W where tokens are many.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from crate_kernels._core import backends, checks

_COMPOSED = (None, "composite", "reference")


class LearnedTerms(NamedTuple):
    """What a step multiplies its product by and adds to it: numbers, or tensors () or (width,)."""

    step_size: float | Tensor
    lambd: float | Tensor
    bias: Tensor | None

    def in_dtype(self, dtype: torch.dtype) -> LearnedTerms:
        """Return the tensors in a dtype."""
        moved = {name: term.to(dtype) for name, term in self._asdict().items() if isinstance(term, Tensor)}
        return self._replace(**moved)

    def less(self, threshold: Any) -> Any:
        """Return the bias minus a threshold."""
        return -threshold if self.bias is None else self.bias - threshold


def takes(step_size: object, lambd: object, bias: object) -> bool:
    """Return whether a call has a term that only this module takes: a tensor or a bias."""
    return bias is not None or isinstance(step_size, Tensor) or isinstance(lambd, Tensor)


def check(op: str, x: Tensor, width: tuple[str, int], terms: LearnedTerms, backend: str | None) -> LearnedTerms:
    """Require terms that fit ``width``, a name and a number, and a backend that composes them; return them."""
    name, size = width
    for argument, term in terms._asdict().items():
        if isinstance(term, Tensor):
            layout = f"() or ({name},) = ({size},)"
            checks.tensor(op, argument, term, None, layout)
            if term.dim() > 1 or (term.dim() == 1 and term.shape[0] != 1 and term.shape[0] != size):
                raise ValueError(f"{op}: {argument} must be {layout}, got {tuple(term.shape)}")
            checks.same_device(op, argument, term, x, "x")
        elif argument != "bias":
            terms = terms._replace(**{argument: checks.number(op, argument, term, minimum=0.0)})
        elif term is not None:
            checks.tensor(op, argument, term, None, f"() or ({name},) = ({size},)")
    backends.resolve("ista", backend, x.device, x.dtype, op)
    if backend not in _COMPOSED:
        raise NotImplementedError(
            f"{op}: backend={backend!r} takes numbers for step_size and lambd, and no bias; use backend='composite'"
        )
    return terms


def ista(
    x: Tensor, weight: Tensor, terms: LearnedTerms, nonnegative: bool, compute: torch.dtype, backend: str | None
) -> Tensor:
    """Return one step, with products in ``compute``; the sum is in float32 or better and rounded once."""
    wide = torch.promote_types(x.dtype, torch.float32)
    terms = terms.in_dtype(wide)
    threshold = terms.step_size * terms.lambd
    with torch.autocast(x.device.type, enabled=False):
        update = terms.step_size * _update(x.to(compute), weight, backend).to(wide)
        if nonnegative:
            out = F.relu(x.to(wide) + update + terms.less(threshold))
        else:
            moved = x.to(wide) + update + terms.less(0.0)
            out = moved.sign() * F.relu(moved.abs() - threshold)
    return out.to(x.dtype)


def _update(x: Tensor, weight: Tensor, backend: str | None) -> Tensor:
    """Return x W - x W^T W; the same form for any number of tokens where a graph is compiled for all of these."""
    many = torch.compiler.is_compiling() or prod(x.shape[:-1]) >= x.shape[-1]
    if backend == "reference" or not many:
        matrix = weight.to(x.dtype)
        return (x - F.linear(x, matrix)) @ matrix
    matrix = weight.to(torch.promote_types(weight.dtype, x.dtype))
    return x @ torch.addmm(matrix, matrix.mT, matrix, alpha=-1).to(x.dtype)


def ista_overcomplete(
    x: Tensor, weight: Tensor, decoder: Tensor | None, terms: LearnedTerms, steps: int, compute: torch.dtype
) -> Tensor:
    """Return the decoded code after some steps from zero, with products in ``compute``."""
    wide = torch.promote_types(compute, torch.float32)
    terms = terms.in_dtype(wide)
    shift = terms.less(terms.step_size * terms.lambd)
    code: Tensor | None = None
    with torch.autocast(x.device.type, enabled=False):
        tokens, matrix = x.to(compute), weight.to(compute)
        for _ in range(steps):
            residual = tokens if code is None else tokens - F.linear(code.to(compute), matrix)
            update = terms.step_size * (residual @ matrix).to(wide) + shift
            code = F.relu(update if code is None else code + update)
        assert code is not None
        out = F.linear(code.to(compute), matrix if decoder is None else decoder.to(compute))
    return out.to(x.dtype)
