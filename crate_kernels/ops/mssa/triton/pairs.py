"""The forward of short sequences in Triton: one program per head, each pair of tiles of tokens met once.

Scores are symmetric, and so are weights ``P_ij = exp(s_ij - shift)`` with one shift for the whole head: what tile i
gives to tile j is the transpose of what j gives to i. A pair of tiles i < j takes three products instead of four, and
one exponential instead of two,

    out_i += P_ij w_j,        out_j += P_ij^T w_i,

and every tile of w is in shared memory and every accumulator in registers from start to end: w is read once, out is
written once, nothing is added atomically. The last tile is as narrow as what is left: 197 tokens take 82% of the
products and 64% of the exponentials of the row form, 256 take 81% and 62%.

With ``n_k = s_kk / 2``, ``2 min n <= s_kk`` and ``s_ij <= 2 max n``: for the shift in their middle no weight is above
``exp(max n - min n)``, and no row's sum below ``exp(min n - max n)``. Heads for which that leaves the range of the
weights' dtype, or whose norms are too large for it to be exact, take the online softmax of rows.py, row by row.
Sums are of the weights as the products have them, rounded.

Tiles are unrolled, as registers cannot be indexed. Compiled for head_dim 64 and bf16, in tiles of 64 and with 4 warps,
sm_90 takes 220 registers for 197 tokens and 238 for 256, sm_100 126 and 112; neither spills. 320 tokens spill on sm_90.
sm_80 spills 1.8 kB for 197 tokens, because the operands of its products are registers too, and has but 255 registers
and no spill for 128; gfx942 takes 362, which leaves one program a compute unit. Both keep the row form.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false
# Triton's compiler reads these functions; their types are not Python's.

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from crate_kernels._triton import launch
from crate_kernels.ops.mssa.triton import tile
from crate_kernels.ops.mssa.triton.head import Scores, find_head, tokens_of
from crate_kernels.ops.mssa.triton.launch import Launch, strided
from crate_kernels.ops.mssa.triton.rows import HIGHEST, LOG2_E, RANGE, attend_rows, finish, norms

MOST_TILES = 4  # tuples are unrolled: the pairs are code

# fp16 holds weights from 2^-24 to 2^16. The largest are put at e^10; rows at this distance then sum to e^-2 or more,
# of which 256 times half of 2^-24 is an eighth of the rounding of fp16.
_TOP_FP16 = tl.constexpr(10.0)
_RANGE_FP16 = tl.constexpr(6.0)
# Tokens of 16 bits survive the rounding of out that HIGHEST is there for. From 2^29 on, what scores and norms are
# rounded to is enough for weights of equal tokens to overflow.
_HIGHEST_HALF = tl.constexpr(1048576.0)


@triton.jit
def _weights(a, b, start_b, shift, scores, MASKED: tl.constexpr, FORM: tl.constexpr):
    """Return exp(s - shift) of the rows of ``a`` and of ``b``; MASKED, 0 for rows of ``b`` beyond the length."""
    s = tl.dot(a, tl.trans(b), input_precision=FORM.PRECISION) * scores.call.qk_scale - shift  # (rows of a, rows of b)
    if MASKED:
        s = tl.where((start_b + tl.arange(0, b.shape[0]) < scores.length)[None, :], s, -float("inf"))
    return tl.exp2(s * LOG2_E).to(b.dtype)


@triton.jit
def _zeros(ROWS: tl.constexpr, WIDTH: tl.constexpr, TURNED: tl.constexpr):
    """Return the state of a tile: its accumulator (ROWS, WIDTH) and its rows' sums, as several equal columns.

    TURNED is transposed: the smallest product of warp groups has 64 rows, but may have 8 columns.
    """
    if TURNED:
        return tl.zeros((WIDTH, ROWS), tl.float32), tl.zeros((64, ROWS), tl.float32)
    else:
        return tl.zeros((ROWS, WIDTH), tl.float32), tl.zeros((ROWS, 16), tl.float32)


@triton.jit
def _add(state, p, w, TURNED: tl.constexpr, FORM: tl.constexpr):
    """Add p w and the sums of p's rows to a state; TURNED, w^T p and the sums of its columns.

    Sums are products with ones. tl.sum would leave every weight in a register until the sum is wanted, and spill; and
    the sums of columns would pass through shared memory.
    """
    acc, sums = state
    if TURNED:
        ones = tl.full((64, p.shape[0]), 1.0, p.dtype)
        return tl.dot(tl.trans(w), p, acc, input_precision=FORM.PRECISION), tl.dot(
            ones, p, sums, input_precision=FORM.PRECISION
        )
    else:
        ones = tl.full((p.shape[1], 16), 1.0, p.dtype)
        return tl.dot(p, w, acc, input_precision=FORM.PRECISION), tl.dot(p, ones, sums, input_precision=FORM.PRECISION)


@triton.jit
def _write(state, start, shift, out, lse_ptr, length, MASKED: tl.constexpr, TURNED: tl.constexpr, DIMS: tl.constexpr):
    """Write out and lse of a tile."""
    acc, sums = state
    if TURNED:
        acc, sums = tl.trans(acc), tl.trans(sums)
    rows = start + tl.arange(0, acc.shape[0])
    mask = rows < length if MASKED else tl.full((acc.shape[0],), 1, tl.int1)
    finish(((acc,), shift, tl.max(sums, 1)), 1.0, out, lse_ptr, rows, mask, 1.0, DIMS)


@triton.jit
def _attend(tiles, shift, out, lse_ptr, scores, BLOCK: tl.constexpr, FORM: tl.constexpr):
    """Write out and lse: each tile meets itself and those before it, which are done when they have met the last."""
    LAST: tl.constexpr = len(tiles) - 1
    NARROW: tl.constexpr = tiles[LAST].shape[0] < BLOCK
    length = scores.length
    states = ()
    for j in tl.static_range(len(tiles)):
        w_j = tiles[j]
        state_j = _zeros(w_j.shape[0], FORM.WIDTHS[0], NARROW and j == LAST)
        before = states
        states = ()
        for i in tl.static_range(j):
            p = _weights(tiles[i], w_j, j * BLOCK, shift, scores, j == LAST, FORM)  # (BLOCK, rows of j)
            state_i = _add(before[i], p, w_j, False, FORM)
            if j == LAST:
                _write(state_i, i * BLOCK, shift, out, lse_ptr, length, False, False, FORM)
            else:
                states += (state_i,)
            p = p if NARROW and j == LAST else tl.trans(p)
            state_j = _add(state_j, p, tiles[i], NARROW and j == LAST, FORM)
        # Keys beyond the end are masked as columns, and are rows to a turned state.
        p = _weights(w_j, w_j, j * BLOCK, shift, scores, j == LAST, FORM)
        p = tl.trans(p) if NARROW and j == LAST else p
        state_j = _add(state_j, p, w_j, NARROW and j == LAST, FORM)
        if j == LAST:
            _write(state_j, j * BLOCK, shift, out, lse_ptr, length, True, NARROW, FORM)
        else:
            states += (state_j,)


# Sizes vary per call: do not specialise on them, but for the number of tiles.
@triton.jit(do_not_specialize=["nheads", "seqlen", "total"])
def _mssa_fwd_pairs_kernel(
    w, out, lse_ptr, nheads, seqlen, total, call, TAIL_M: tl.constexpr, TILES: tl.constexpr, FORM: tl.constexpr
):
    """Write out and lse of a head of at most TILES tiles of FORM.BLOCK rows, the last of them of TAIL_M."""
    BLOCK_M: tl.constexpr = FORM.BLOCK
    head = find_head(tl.program_id(0), nheads, seqlen)
    at, out = tokens_of(head, w), tokens_of(head, out)
    lse_ptr += head.row
    tiles = ()
    low, high = tl.full((BLOCK_M,), float("inf"), tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    for i in tl.static_range(TILES - 1):
        rows = i * BLOCK_M + tl.arange(0, BLOCK_M)
        tiles += tile.load(at, rows, tl.full((BLOCK_M,), 1, tl.int1), FORM)  # (BLOCK_M, HEAD_DIM)
        n = norms((tiles[i],), call.qk_scale)
        low, high = tl.minimum(low, n), tl.maximum(high, n)
    rows = (TILES - 1) * BLOCK_M + tl.arange(0, TAIL_M)
    tiles += tile.load(at, rows, rows < seqlen, FORM)  # (TAIL_M, HEAD_DIM)
    n = norms((tiles[TILES - 1],), call.qk_scale)
    least = tl.minimum(tl.min(low, 0), tl.min(tl.where(rows < seqlen, n, float("inf")), 0))
    most = tl.maximum(tl.max(high, 0), tl.max(n, 0))
    FP16: tl.constexpr = at.ptr.dtype.element_ty == tl.float16
    SINGLE: tl.constexpr = at.ptr.dtype.element_ty == tl.float32
    scores = Scores(seqlen, call)
    if (most - least <= (_RANGE_FP16 if FP16 else RANGE)) & (most <= (HIGHEST if SINGLE else _HIGHEST_HALF)):
        shift = 2 * most - _TOP_FP16 if FP16 else most + least
        _attend(tiles, shift, out, lse_ptr, scores, BLOCK_M, FORM)
    else:
        for start in range(0, seqlen, BLOCK_M):
            attend_rows(at, out, lse_ptr, scores, start, 0.0, BLOCK_M, FORM)


def forward_pairs(w: Tensor, out: Tensor, lse: Tensor, sizes: Launch, block: int, warps: int) -> None:
    """Write ``out`` and ``lse`` of a full, unmasked call of at most MOST_TILES blocks."""
    with launch.guard(w.device):
        launch.run(
            _mssa_fwd_pairs_kernel,
            sizes.heads,
            w=strided(w),
            out=strided(out),
            lse_ptr=lse,
            **sizes.arguments(),
            TAIL_M=sizes.tail(block),
            TILES=sizes.blocks(block),
            FORM=sizes.form(block, block, tile.whole_dims(sizes.head_dim)),
            # The only loop is that of the rare online softmax, whose pipeline would take registers from the pairs.
            **{"num_warps": warps, "num_stages": 1},
        )
