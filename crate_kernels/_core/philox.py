"""Dropout as a function of (seed, position): Philox4x32-10, shared bit for bit by every backend.

J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. Element (i, j) of batch
element b and head h is kept iff word 0 of Philox(key = seed, counter = (j, i, b * nheads + h, 0))
is at least ``p * 2**32``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF


def word0(seed: Tensor, c0: Tensor, c1: Tensor, c2: Tensor) -> Tensor:
    """Return word 0 of Philox4x32-10 at counter (c0, c1, c2, 0), as int64 in [0, 2**32).

    Args:
        seed: int64 scalar; its low word is key word 0.
        c0, c1, c2: int64, broadcast together, in [0, 2**32).
    """
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    c3 = torch.zeros_like(c0)
    for _ in range(10):
        # int64 products wrap modulo 2**64, which keeps all 64 bits of a 32 x 32 product.
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _LOW) ^ c1 ^ k0,
            p1 & _LOW,
            ((p0 >> 32) & _LOW) ^ c3 ^ k1,
            p0 & _LOW,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _LOW, (k1 + 0xBB67AE85) & _LOW
    return c0


def keep_factor(
    seed: Tensor, dropout_p: float, heads: Tensor, rows: Tensor, columns: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return the dropout factor, 0 or ``1 / (1 - p)``, of every broadcast (head, row, column).

    Args:
        seed: int64 scalar.
        dropout_p: drop probability in [0, 1).
        heads, rows, columns: int64 counters: batch * nheads + head, i and j.
        dtype: dtype of the result.
    """
    # An integer threshold: comparing int64 with a float would round both to float32.
    keep = word0(seed, columns, rows, heads) >= math.ceil(dropout_p * 2**32)
    return keep.to(dtype) / (1.0 - dropout_p)


def head_counter(batch: int, nheads: int, device: torch.device) -> Tensor:
    """Return batch * nheads + head as (batch, nheads, 1, 1) int64."""
    return torch.arange(batch * nheads, device=device).view(batch, nheads, 1, 1)
