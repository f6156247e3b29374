"""The error tolerance: runs a case and compares its results with float64."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

import crate_kernels
from crate_kernels._core import checks
from crate_kernels._core.spec import Case, Inputs
from crate_kernels.testing.specs import SPECS

FORWARD_FACTOR, GRADIENT_FACTOR = 2.0, 3.0


@checks.suggesting
def run(case: Case, inputs: Inputs, backend: str | None, seed: int = 0) -> dict[str, Tensor]:
    """Call the public function and differentiate it; return outputs and ``d<argument>`` by name.

    Args:
        case: the call.
        inputs: the tensors of the call; they are detached first.
        backend: as in the public function.
        seed: torch's seed before the call (dropout), and the seed of the upstream gradients.
    """
    leaves = {name: t.detach().requires_grad_() for name, t in inputs.differentiable.items()}
    torch.manual_seed(seed)
    result = getattr(crate_kernels, case.op)(**leaves, **inputs.others, **case.options, backend=backend)
    outputs = result if isinstance(result, tuple) else (result,)
    names = SPECS[case.op].outputs[: len(outputs)]
    generator = torch.Generator().manual_seed(seed + 1)
    losses = []
    for output in outputs:
        # Rounded to bf16, so that every dtype sees the same upstream values.
        upstream = torch.randn(output.shape, generator=generator).bfloat16().to(output.device, output.dtype)
        finite = output.isfinite()  # lse of a row without keys is -inf
        losses.append((torch.where(finite, output, 0.0) * upstream).sum(dtype=torch.float64))
    grads = torch.autograd.grad(sum(losses), list(leaves.values()))  # pyright: ignore
    return {
        **{name: output.detach() for name, output in zip(names, outputs, strict=True)},
        **{f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)},
    }


@dataclass(frozen=True)
class Measurement:
    """One output compared with float64.

    Attributes:
        output: name of the output or gradient.
        error: largest absolute error against float64.
        eager_error: the error of ``reference`` in the same dtype.
        tolerance: the largest error allowed.
        finite: whether the output is finite wherever float64 is.
    """

    output: str
    error: float
    eager_error: float
    tolerance: float
    finite: bool

    @property
    def passed(self) -> bool:
        """True if the output is finite and within tolerance."""
        return self.finite and self.error <= self.tolerance

    @property
    def share(self) -> float:
        """The error as a share of the tolerance; infinite where an error is and nothing is allowed."""
        return self.error / self.tolerance if self.tolerance else math.inf if self.error else 0.0


@checks.suggesting
def measure(
    actual: Mapping[str, Tensor], eager: Mapping[str, Tensor], oracle: Mapping[str, Tensor], dtype: torch.dtype
) -> list[Measurement]:
    """Compare each error with ``c * (eager's error + eps(dtype) * max|oracle|)``, c = 2, or 3 for gradients.

    Args:
        actual: outputs of ``run`` under test.
        eager: outputs of ``run`` on ``reference`` in the same dtype. If an output overflows, as in published fp16
            code, its error counts as zero, which only tightens the tolerance.
        oracle: outputs of ``run`` on ``reference`` in float64.
        dtype: the dtype under test.
    """
    results = []
    for name, exact in oracle.items():
        error = _error(actual[name], exact)
        eager_error = _error(eager[name], exact)
        eager_error = eager_error if math.isfinite(eager_error) else 0.0
        factor = GRADIENT_FACTOR if name.startswith("d") else FORWARD_FACTOR
        largest = exact[exact.isfinite()].abs().max().item() if exact.isfinite().any() else 0.0
        tolerance = factor * (eager_error + torch.finfo(dtype).eps * largest)
        same = bool(torch.equal(actual[name].isfinite().cpu(), exact.isfinite().cpu()))
        results.append(Measurement(name, error, eager_error, tolerance, same))
    return results


def _error(actual: Tensor, exact: Tensor) -> float:
    difference = (actual.double() - exact)[exact.isfinite()].abs()
    return difference.max().item() if difference.numel() else 0.0


@checks.suggesting
def check_cu_seqlens(cu_seqlens: Tensor, total: int, max_seqlen: int) -> None:
    """Check the values of packed offsets on any device; the operators check them on the CPU only.

    Args:
        cu_seqlens: (sequences + 1,) int32.
        total: number of packed tokens.
        max_seqlen: the largest length allowed.

    Raises:
        ValueError: the offsets fall, or leave 0 to ``total``, or a sequence is longer than ``max_seqlen``.
    """
    checks.cu_seqlens_values("check_cu_seqlens", cu_seqlens, total, max_seqlen)
