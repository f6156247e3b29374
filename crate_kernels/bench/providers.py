"""Lists the providers of a case: the reference implementation, others from the operator's spec, and our backends.

``"default"`` is ``backend=None``, which may take one backend forward and another backward; a named one is obeyed.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

import crate_kernels
from crate_kernels._core import backends
from crate_kernels._core.spec import Case, Function, Provider
from crate_kernels.testing import SPECS

DEFAULT = "default"
OURS = ("composite", "cpp", "triton")


def eager(case: Case) -> Function:
    """Return the reference implementation of a case."""
    return SPECS[case.op].published(case)


def _compiled(case: Case) -> Function:
    torch._dynamo.reset()  # without it, the fifth shape of one function compiles for any shape
    return torch.compile(eager(case), dynamic=False)


def _own(case: Case, backend: str | None) -> Function:
    function: Any = getattr(crate_kernels, case.op)

    def call(*args: Tensor) -> Tensor:
        if len(args) == 3 and case.options.get("causal"):  # tssa's third argument is keyword-only
            return function(*args[:2], denom_bias=args[2], backend=backend, **case.options)
        return function(*args, backend=backend, **case.options)

    return call


def unavailable_reason(op: str, dtype: torch.dtype, device: torch.device, backend: str | None) -> str | None:
    """Say why one of our backends, or the default, cannot be timed on an operator; None if it can."""
    if backend == "triton" and device.type == "cpu":
        return "Triton's kernels are for GPUs; its interpreter is not worth timing"
    try:
        backends.resolve(SPECS[op].package, backend, device, dtype)
    except (RuntimeError, NotImplementedError) as error:
        return str(error)
    return None


def _ours(name: str) -> Provider:
    backend = None if name == DEFAULT else name
    return Provider(
        name,
        functools.partial(_own, backend=backend),
        lambda case, dtype, device: unavailable_reason(case.op, dtype, device, backend),
    )


def of(op: str) -> list[Provider]:
    """List the providers of an operator."""
    others = (Provider("eager", eager), Provider("compile", _compiled), *SPECS[op].providers)
    return [*others, *(_ours(name) for name in (DEFAULT, *OURS))]
