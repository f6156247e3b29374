"""The gate before the clock: compares a provider with float64 on the inputs that it will be timed on."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from crate_kernels._core.spec import Case, Function
from crate_kernels.testing import FORWARD_FACTOR, GRADIENT_FACTOR, SPECS, make_inputs


@dataclass(frozen=True)
class Verdict:
    """The result of the gate.

    Attributes:
        error: norm of the error over the norm of the exact result, the largest among output and gradients.
        times_eager: the largest ratio of the provider's error to the eager form's in the same dtype.
        share: the largest error as a share of its tolerance; the provider passes up to 1.
        output: name of the output or gradient with that share.
    """

    error: float
    times_eager: float
    share: float
    output: str

    @property
    def passed(self) -> bool:
        """True if every output and gradient is finite and within tolerance."""
        return self.share <= 1.0


class Deviation(NamedTuple):
    """The error of one output or gradient: by norm, or of its largest entry."""

    output: str
    error: float
    eager_error: float  # of the eager form in the same dtype
    size: float  # of the exact result
    factor: float = FORWARD_FACTOR


def judge(found: Iterable[Deviation], dtype: torch.dtype) -> Verdict:
    """Compare each error with its tolerance, ``factor * (eager's error + eps(dtype) * size)``.

    As in the tests, an error of eager that is not finite allows nothing.
    """
    judged = []
    for output, error, eager, size, factor in found:
        error = error if math.isfinite(error) else math.inf
        eager = eager if math.isfinite(eager) else 0.0
        tolerance = factor * (eager + torch.finfo(dtype).eps * size)
        share = error / tolerance if math.isfinite(tolerance) else math.inf  # never NaN, which max would pass over
        judged.append((share, output, error / size, error / eager if eager else 0.0))
    share, output, *_ = max(judged)
    return Verdict(max(j[2] for j in judged), max(j[3] for j in judged), share, output)


def arguments(case: Case, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Draw the differentiable arguments of a case, in the public function's order."""
    spec = SPECS[case.op]
    if spec.arguments is None:
        tensors = list(make_inputs(case, dtype, device).differentiable.values())
    else:
        tensors = [t.to(device, dtype) for t in spec.arguments(case, torch.Generator().manual_seed(0))]
    return [t.requires_grad_() for t in tensors]


def upstream(out: Tensor) -> Tensor:
    """Draw the gradient of a case's output, the same for every provider."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(out.shape, generator=generator).bfloat16().to(out.device, out.dtype)


class Gate:
    """The exact results of one case and dtype, and eager's error, computed once for all providers.

    Tolerance and factors are those of the tests. The tests bound the largest entry of an error on small cases; the gate
    bounds the Frobenius norm. A wrong tile stands out in both, but among millions of entries the largest error is luck:
    an activation within rounding of a threshold may fall on either side in any form, and running sums of few tokens may
    be near zero. If a spec has a ``sampling``, only a part of the result is compared.
    """

    def __init__(self, case: Case, dtype: torch.dtype, device: torch.device) -> None:
        self.case, self.dtype, self.device = case, dtype, device
        self.sampling = SPECS[case.op].sampling
        self.args = arguments(case, dtype, device)
        self.exact = self._results(torch.float64)
        eager = self._results(dtype)
        self.eager_errors = [self._error(e, x) for e, x in zip(eager, self.exact, strict=True)]

    def _sample(self, tensor: Tensor) -> Tensor:
        """Return the compared part of a result."""
        return tensor if self.sampling is None else self.sampling.part(tensor)

    def _results(self, dtype: torch.dtype) -> list[Tensor]:
        leaves = [t.detach().to(dtype).requires_grad_() for t in self.args]
        if self.sampling is None:
            out = SPECS[self.case.op].published(self.case)(*leaves)
            return [out.detach(), *torch.autograd.grad(out, leaves, upstream(out))]
        g = self._sample(upstream(self.args[0].detach()).to(dtype))
        return self.sampling.results(self._sample(leaves[0]).detach(), g, self.case)

    def _error(self, actual: Tensor, exact: Tensor) -> float:
        return torch.linalg.vector_norm(actual.double() - exact).item()

    def check(self, function: Function, gradients: bool) -> Verdict:
        """Run a provider and check its output, and its gradients if ``gradients``."""
        if gradients:
            out = function(*self.args)
            results = [out.detach(), *torch.autograd.grad(out, self.args, upstream(out))]
        else:
            with torch.no_grad():
                results = [function(*self.args)]
        names = ["out", *(f"gradient {i}" for i in range(len(self.args)))]
        found = []
        for name, result, exact, eager in zip(names, results, self.exact, self.eager_errors, strict=False):
            error, size = self._error(self._sample(result), exact), torch.linalg.vector_norm(exact).item()
            found.append(Deviation(name, error, eager, size, FORWARD_FACTOR if name == "out" else GRADIENT_FACTOR))
        return judge(found, self.dtype)


_last: list[Gate] = []


def gate(case: Case, dtype: torch.dtype, device: torch.device) -> Gate:
    """Return the gate of a case. The last gate is kept, because a case's providers follow one another."""
    if not _last or (_last[0].case, _last[0].dtype, _last[0].device) != (case, dtype, device):
        _last.clear()  # first free the old gate: two might not fit in memory
        _last.append(Gate(case, dtype, device))
    return _last[0]
