"""Series of a sweep: time and memory against a size, and the exponent of their growth."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from crate_kernels._core import spec
from crate_kernels.bench.rows import Results, Row
from crate_kernels.testing import SPECS


@dataclass(frozen=True)
class Series:
    """One provider along one sweep.

    Attributes:
        provider: name of the provider.
        sizes: the sizes with times.
        rows: the row of each size.
        exhausted: the first size at which memory ran out; None if there is none.
    """

    provider: str
    sizes: list[int]
    rows: list[Row]
    exhausted: int | None

    def exponent(self, values: list[float]) -> float | None:
        """Fit ``value ~ size ** exponent`` by least squares over the largest half of the sizes, three at least."""
        count = max(3, len(self.sizes) // 2)
        if len(self.sizes) < 3 or min(values[-count:]) <= 0:
            return None
        slope, _ = np.polyfit(np.log(self.sizes[-count:]), np.log(values[-count:]), 1)
        return float(slope)

    @property
    def seconds(self) -> list[float]:
        """Time at each size."""
        return [row.time for row in self.rows]

    @property
    def memory(self) -> list[float]:
        """Peak bytes at each size: of tensors, or of the process if its own scratch memory makes that more."""
        return [float(max(row.peak_bytes or 0, row.resident_bytes or 0)) for row in self.rows]


def size_of(row: Row) -> int:
    """Return a row's value of the size that its sweep varies."""
    return spec.size_of(row.shape, SPECS[row.op].axes, row.sweep)


def series(results: Results, op: str, sweep: str, direction: str) -> list[Series]:
    """Return the series of every provider with at least one time, in the order of the file."""
    rows = results.find(bench="scaling", op=op, sweep=sweep, direction=direction)
    found = []
    for provider in dict.fromkeys(row.provider for row in rows):
        own = sorted((row for row in rows if row.provider == provider), key=size_of)
        timed = [row for row in own if row.times]
        spent = [size_of(row) for row in own if row.skipped == "out of memory"]
        if timed:
            found.append(Series(provider, [size_of(r) for r in timed], timed, min(spent, default=None)))
    return found
