"""Memberships of a tile: sums over channels, the softmax over heads and its gradient."""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false
# Triton's compiler reads these functions; their types are not Python's.

from __future__ import annotations

import triton
import triton.language as tl

from crate_kernels.ops.tssa.triton.quotients import reciprocal
from crate_kernels.ops.tssa.triton.tile import heads_of

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def sum_over_channels(x, DIMS: tl.constexpr):
    """Return the sums of a tile over its channels in the dtype of the logits.

    Where that is float64, eight at a time are still added in float32: eight neighbours are in one thread, and threads
    exchange one number per head. The few elements of one token, as in decoding, are float64 from the start: they would
    go through shared memory to be grouped.
    """
    if not DIMS.WIDE:
        return tl.sum(x, 2)
    elif x.shape[0] == 1:
        return tl.sum(x.to(tl.float64), 2)
    else:
        EIGHT: tl.constexpr = 8 if DIMS.BLOCK_D > 8 else DIMS.BLOCK_D
        BLOCK_H: tl.constexpr = DIMS.BLOCK_H
        x = tl.reshape(x, (x.shape[0], BLOCK_H, x.shape[2] // EIGHT, EIGHT))
        return tl.sum(tl.sum(x, 3).to(tl.float64), 2)


@triton.jit
def softmax_over_heads(temp, similarity, there, DIMS: tl.constexpr):
    """Return the membership of each token, (BLOCK_N, BLOCK_H), from temp and q of each head; 0 where no token is there.

    Of float32 tokens, logits are float64 until the largest is taken away: a token that dominates its channels has q
    near head_dim, and what tells its heads apart would be rounded off. 16-bit tokens have no such digits. log2(e) is in
    the factor, so that an exponential is one instruction. Beyond the last token q is 0, and an infinite temp times 0 is
    no number.
    """
    logits = (temp.to(similarity.dtype) * LOG2_E)[None, :] * similarity  # (BLOCK_N, BLOCK_H)
    logits = tl.where((heads_of(DIMS) < DIMS.NHEADS)[None, :], logits, -float("inf"))
    power = logits - tl.max(logits, 1)[:, None]
    weights = tl.exp2(power.to(tl.float32))  # (BLOCK_N, BLOCK_H)
    if DIMS.WIDE:
        # What a power rounds off is a factor: of 80, a membership of 1e-24 would lose 4e-6, and be all of a moment.
        finite = tl.where(power > -1000.0, power, 0.0)
        weights *= 1.0 + LN_2 * (finite - finite.to(tl.float32)).to(tl.float32)
    return tl.where(there[:, None], weights * reciprocal(tl.sum(weights, 1), DIMS)[:, None], 0.0)


@triton.jit
def softmax_backward(members, dmembers):
    """Return the gradient of the logits, (BLOCK_N, BLOCK_H).

    The mean is taken away twice. Where a head has nearly all of its token, the first difference is mostly the rounding
    of two large numbers; the second sum is of small ones, and exact enough.
    """
    dmembers -= tl.sum(members * dmembers, 1)[:, None]
    return members * (dmembers - tl.sum(members * dmembers, 1)[:, None])
