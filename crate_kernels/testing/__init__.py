"""Named cases, inputs and the error tolerance: shared by tests, ``verify`` and benchmarks.

``make_inputs`` draws the tensors of a case, ``run`` calls the public function and takes its
gradients, and ``measure`` compares the results with float64.
"""

from crate_kernels._core.draw import padding_mask
from crate_kernels._core.spec import Case, Inputs, Timed
from crate_kernels.testing.specs import CASES, SPECS, TIMED_CASES, cases, excluded, make_inputs
from crate_kernels.testing.tolerance import (
    FORWARD_FACTOR,
    GRADIENT_FACTOR,
    Measurement,
    check_cu_seqlens,
    measure,
    run,
)

__all__ = [
    "CASES",
    "FORWARD_FACTOR",
    "GRADIENT_FACTOR",
    "SPECS",
    "TIMED_CASES",
    "Case",
    "Inputs",
    "Measurement",
    "Timed",
    "cases",
    "check_cu_seqlens",
    "excluded",
    "make_inputs",
    "measure",
    "padding_mask",
    "run",
]


def __dir__() -> list[str]:
    """List the public names."""
    return __all__
