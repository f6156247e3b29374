"""Into how many parts the kernels of a GPU, Triton's and CUDA's, cut a sequence."""

from __future__ import annotations

import math


def cdiv(length: int, block: int) -> int:
    """Return how many blocks cover a length."""
    return -(-length // block)


_MOST_SPLITS = 128


def choose_splits(blocks: int, processors: int, tiles: int) -> int:
    """Choose into how many stretches a sequence of ``tiles`` is split, as FlashAttention does.

    None where the blocks all but fill the device; else the fewest whose last wave is nearly as full as that of the
    best number, for each stretch costs a partial result.
    """
    if blocks >= 0.8 * processors:
        return 1
    counts = range(1, min(_MOST_SPLITS, processors, max(tiles, 1)) + 1)
    fullness = [waves / math.ceil(waves) for waves in (blocks * count / processors for count in counts)]
    return next(count for count, full in zip(counts, fullness, strict=True) if full >= 0.85 * max(fullness))
