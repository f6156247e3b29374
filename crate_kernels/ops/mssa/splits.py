"""The number of parts that Triton's and CUDA's kernels cut a sequence into."""

from __future__ import annotations

import functools
import math


def cdiv(length: int, block: int) -> int:
    """Return the number of blocks that cover a length."""
    return -(-length // block)


_MAX_SPLITS = 128


@functools.lru_cache(maxsize=1024)  # counts up to 128 numbers, and a step of decoding asks in every layer
def choose_splits(blocks: int, processors: int, tiles: int) -> int:
    """Choose the number of stretches that a sequence of ``tiles`` is split into, as FlashAttention does.

    1 if the blocks nearly fill the device. Else the fewest whose last wave is nearly as full as that of the best
    number: each stretch costs a partial result.
    """
    if blocks >= 0.8 * processors:
        return 1
    counts = range(1, min(_MAX_SPLITS, processors, max(tiles, 1)) + 1)
    fullness = [waves / math.ceil(waves) for waves in (blocks * count / processors for count in counts)]
    return next(count for count, full in zip(counts, fullness, strict=True) if full >= 0.85 * max(fullness))
