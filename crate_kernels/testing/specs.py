"""The specs of all operators, and their cases and inputs."""

from __future__ import annotations

from importlib import import_module

import torch

from crate_kernels._core import backends, checks
from crate_kernels._core.spec import Case, Inputs, Spec

SPECS: dict[str, Spec] = {
    spec.op: spec for op in backends.OPS for spec in import_module(f"crate_kernels.ops.{op}.spec").SPECS
}
CASES = tuple(case for spec in SPECS.values() for case in spec.cases)
TIMED_CASES = tuple(timed for spec in SPECS.values() for timed in spec.timed)


@checks.suggesting
def cases(package: str) -> tuple[Case, ...]:
    """Return the cases of the operators in one package of ``ops/``.

    Raises:
        ValueError: there is no such package.
    """
    if package not in backends.OPS:
        raise ValueError(f"cases: package must be one of {', '.join(backends.OPS)}, got {package!r}")
    return tuple(case for case in CASES if SPECS[case.op].package == package)


@checks.suggesting
def excluded(case: Case, backend: str, dtype: torch.dtype, device: torch.device | str = "cpu") -> str | None:
    """Say why ``case`` is not compared with the error tolerance on ``backend``; None if it is.

    The reasons are properties of a backend's building blocks, and of Triton's interpreter, which runs kernels on CPU
    tensors.
    """
    if backend == "triton" and dtype == torch.bfloat16 and torch.device(device).type == "cpu":
        return "Triton's interpreter computes bfloat16 wrong: make gpu runs it"
    return SPECS[case.op].excluded(case, backend, dtype)


@checks.suggesting
def make_inputs(case: Case, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0) -> Inputs:
    """Draw the tensors of ``case`` in ``dtype``, so that a promotion to float64 changes no value.

    Args:
        case: the call.
        dtype: dtype of the drawn tensors; temp, denom_bias and weights have it too.
        device: device of the tensors. They are drawn on the CPU, so they are equal on every device.
        seed: seed of the draw.

    Raises:
        ValueError: an ista case in which nearly every token has an activation at its threshold.
    """
    return SPECS[case.op].draw(case, dtype, torch.device(device), torch.Generator().manual_seed(seed))
