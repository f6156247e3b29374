"""Compares two files of results: rows that changed by more than the noise of their samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from crate_kernels.bench.rows import Results

_RESAMPLES = 2000


@dataclass(frozen=True)
class Change:
    """The ratio of a row's time in the second file to its time in the first.

    Attributes:
        key: the row.
        ratio: ratio of the medians.
        low, high: 95% confidence interval of the ratio, by bootstrap over the samples of both files.
    """

    key: str
    ratio: float
    low: float
    high: float

    def moved(self, least: float) -> bool:
        """Return whether the whole interval is further than ``least`` from no change."""
        return self.low > 1 + least or self.high < 1 / (1 + least)


def changes(first: Results, second: Results) -> Iterator[Change]:
    """Yield the change of every row with times in both files."""
    earlier = {row.key: row for row in first.rows if row.times}
    draws = np.random.default_rng(0)
    for row in second.rows:
        if row.times and row.key in earlier:
            a, b = np.array(earlier[row.key].times), np.array(row.times)
            medians = [np.median(draws.choice(t, (_RESAMPLES, len(t))), axis=1) for t in (a, b)]
            low, high = np.percentile(medians[1] / medians[0], [2.5, 97.5])
            yield Change(row.key, float(np.median(b) / np.median(a)), float(low), float(high))


def missing(first: Results, second: Results) -> tuple[list[str], list[str]]:
    """List the rows with times in the first file only, and in the second file only."""
    a, b = ({row.key for row in results.rows if row.times} for results in (first, second))
    return sorted(a - b), sorted(b - a)
