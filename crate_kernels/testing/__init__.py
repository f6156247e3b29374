"""Named cases, inputs and the error budget: shared by tests, ``verify`` and benchmarks.

A case says what is computed; ``make_inputs`` draws its tensors, ``run`` calls the public function
and takes its gradients, and ``measure`` holds the result against float64.
"""

from crate_kernels.testing.budget import (
    FORWARD_FACTOR,
    GRADIENT_FACTOR,
    Measurement,
    check_cu_seqlens,
    measure,
    run,
)
from crate_kernels.testing.cases import CASES, ISTA_CASES, MSSA_CASES, TSSA_CASES, Case, excluded
from crate_kernels.testing.inputs import Inputs, make_inputs, padding_mask
from crate_kernels.testing.timed import TIMED_CASES, Timed

__all__ = [
    "CASES",
    "FORWARD_FACTOR",
    "GRADIENT_FACTOR",
    "ISTA_CASES",
    "MSSA_CASES",
    "TIMED_CASES",
    "TSSA_CASES",
    "Case",
    "Inputs",
    "Measurement",
    "Timed",
    "check_cu_seqlens",
    "excluded",
    "make_inputs",
    "measure",
    "padding_mask",
    "run",
]
