"""Overhead of the public functions over the op underneath."""

from benchmarks.common import What, grid
from crate_kernels.bench import overhead

OPS = [What(f"overhead-{op}", op, ("cpu", "cuda"), True) for op in overhead.OPS]


@grid(OPS, ["forward"], overhead.PROVIDERS, ["fp32"])
def test_overhead(timed, what, dtype, direction, provider):
    timed(overhead.blank(what.subject, provider), overhead.measure)
