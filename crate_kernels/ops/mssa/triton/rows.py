"""A block of query rows in the forward: its walk over tiles of keys, in either form of the softmax.

Exponentials are powers of two: on a GPU that is one instruction, and ``tl.exp`` five. The maximum is of products, and
what a product is below it is multiplied by scale * log2(e). The largest weight of a row is then exactly 1: nothing is
fused with what is subtracted from it. Products times scale * log2(e) would save the subtraction, which is then part of
a multiply-add, but lse would be rounded there and back, and the backward would see large weights of 1 as 1.001 where
scores reach thousands. The bounded form has scores too small for that.

Two forms of the softmax:

- online: the usual running maximum, with which the accumulator is rescaled;
- bounded: query and key are one matrix, so for scale > 0 ``s_ij <= n_i + n_j`` with ``n_k = s_kk / 2``, and
  ``n_i + max_j n_j`` bounds row i before any score is known: no maximum, no rescaling. The row's sum is at least
  ``exp(n_i - max n)``; rows for which that could leave fp32's range take the online form instead. So do rows that see
  an n above HIGHEST: their largest weight would not be exactly 1, and out not exactly w where that weight is all, which
  the backward would magnify by s_ii. The bound is rounded up to a whole number of powers of two.

In the causal form the maximum of n is over j <= i, and each row takes its form by itself: no bit of a prefix depends
on what comes after it.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false
# Triton's compiler reads these functions; their types are not Python's.

from __future__ import annotations

import triton
import triton.language as tl

from crate_kernels._triton.jit import rounded_product
from crate_kernels.ops.mssa.triton import tile
from crate_kernels.ops.mssa.triton.head import allowed, kept, key_range, signed_products

LOG2_E = tl.constexpr(1.4426950408889634)
SUMS = tl.constexpr(8)  # columns: the narrowest product
LN_2 = tl.constexpr(0.6931471805599453)
# A row's sum is then at least 2^-80, and a weight that underflows at most 2^-46 of it.
RANGE = tl.constexpr(55.0)
# Up to this n every weight of a row is above fp32's rounding of the largest: none is all.
HIGHEST = tl.constexpr(4.0)


@triton.jit
def empty_state(BLOCK_M: tl.constexpr, FORM: tl.constexpr):
    """Return the state of rows that have met no key: (accumulator, maximum, sum); the bounded form has its bound."""
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    return tile.zeros(BLOCK_M, FORM), l_i - float("inf"), l_i


@triton.jit
def _add_sums(sums, p):
    """Add the sums of the rows of rounded weights to each of equal columns.

    The sum is of the weights that the other product takes: one that is all of a row then gives its token exactly. It is
    a product with ones, because adding up what was rounded would convert every weight twice.
    """
    if p.dtype == tl.float32:
        return sums + tl.sum(p, 1)[:, None]
    else:
        return tl.dot(p, tl.full((p.shape[1], SUMS), 1.0, p.dtype), sums)


@triton.jit
def attend_tiles(
    state, w_m, w, scores, offs_m, start, stop, PASS: tl.constexpr, MASKED: tl.constexpr, FORM: tl.constexpr
):
    """Walk over the keys [start, stop) of the tokens ``w``, starting from a state and returning the next."""
    BLOCK_N: tl.constexpr = FORM.TAIL if MASKED else FORM.BLOCK
    acc, m_i, l_i = state
    for start_n in range(start, stop, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        if MASKED:
            w_n = tile.load(w, offs_n, offs_n < scores.length, FORM)  # (BLOCK_N, HEAD_DIM)
        else:
            w_n = tile.load_whole(w, offs_n, FORM)  # (BLOCK_N, HEAD_DIM)
        s = signed_products(w_m, w_n, FORM)  # (BLOCK_M, BLOCK_N)
        if PASS == "bounded":
            p = tl.exp2(s * (scores.call.qk_scale * LOG2_E) - m_i[:, None])  # (BLOCK_M, BLOCK_N)
            if MASKED:
                p = tl.where(allowed(scores, offs_m[:, None], offs_n[None, :], FORM), p, 0.0)
            p = p.to(w_n[0].dtype)
            l_i = _add_sums(l_i, p)  # (BLOCK_M, SUMS)
        else:
            to_log2 = scores.call.qk_scale * LOG2_E
            if MASKED:
                s = tl.where(allowed(scores, offs_m[:, None], offs_n[None, :], FORM), s, -float("inf"))
            old_max = m_i
            if PASS != "select":
                m_i = tl.maximum(m_i, tl.max(s, 1))
            # Rows without a key so far: any finite number for -inf makes their weights 0 instead of NaN.
            base = tl.where(m_i == -float("inf"), 0.0, m_i) if MASKED else m_i  # (BLOCK_M,)
            if PASS != "select":
                shrink = tl.exp2((old_max - base) * to_log2)  # (BLOCK_M,)
                l_i = l_i * shrink
                if PASS == "online":
                    acc = tile.scale(acc, shrink)
            p = tl.exp2((s - base[:, None]) * to_log2)  # (BLOCK_M, BLOCK_N)
            if FORM.APART:
                # Of a range out is fp32, and delta made of it: the sum is of the weights as the product has them, too.
                p = p.to(w_n[0].dtype).to(tl.float32)
            if PASS == "select":
                # Against the sum, not divided by it: a probability equal to the threshold is not above it.
                p = tl.where(p > scores.call.threshold * l_i[:, None], 1.0, 0.0)
            else:
                l_i += tl.sum(p, 1)
        if PASS != "statistics":
            if FORM.DROPOUT:
                p = tl.where(kept(scores, offs_m[:, None], offs_n[None, :]), p, 0.0)
            acc = tile.add_product(acc, p.to(w_n[0].dtype), w_n, FORM, APART=True)
    return acc, m_i, l_i


@triton.jit
def walk_keys(state, w_m, w, scores, start_m, PASS: tl.constexpr, BLOCK_M: tl.constexpr, FORM: tl.constexpr):
    """Walk over all the keys of a block of rows: unmasked as far as possible, then with masks."""
    offs_m = start_m + tl.arange(0, BLOCK_M)
    whole, stop = key_range(scores, start_m, BLOCK_M, FORM)
    if not FORM.PADDED:
        state = attend_tiles(state, w_m, w, scores, offs_m, 0, whole, PASS, False, FORM)
    return attend_tiles(state, w_m, w, scores, offs_m, whole, stop, PASS, True, FORM)


@triton.jit
def norms(w, qk_scale):
    """Return n_k = s_kk / 2 of the rows of a tile."""
    return tile.row_products(w, w) * (0.5 * qk_scale)


@triton.jit
def finish(state, max_scale, out, lse_ptr, offs_m, mask_m, out_scale, DIMS: tl.constexpr):
    """Write out and lse of the rows of ``mask_m``, 0 and -inf without a key; ``max_scale`` is the maximum's scale."""
    acc, m_i, l_i = state  # (BLOCK_M, HEAD_DIM), (BLOCK_M,), (BLOCK_M,)
    empty = l_i == 0.0
    sums = tl.where(empty | (mask_m == 0), 1.0, l_i)  # a row outside the mask may have a sum too small to divide by
    tile.store(out, tile.scale(acc, out_scale / sums), offs_m, mask_m, DIMS)
    if lse_ptr is not None:
        # The only key's score is lse, rounded as the backward rounds it. The sum of a row with an infinite one is NaN.
        row_max = rounded_product(m_i, max_scale)  # (BLOCK_M,)
        lse = tl.where(row_max == float("inf"), row_max, row_max + tl.log(sums))
        tl.store(lse_ptr + offs_m, tl.where(empty, -float("inf"), lse), mask=mask_m)


@triton.jit
def attend_rows(w, out, lse_ptr, scores, start_m, max_norm, BLOCK_M: tl.constexpr, FORM: tl.constexpr):
    """Attend with the rows [start_m, start_m + BLOCK_M) of a head; ``max_norm`` is the largest n of keys all see."""
    offs_m = start_m + tl.arange(0, BLOCK_M)
    mask_m = offs_m < scores.length
    out_scale = scores.call.keep_factor
    w_m = tile.load(w, offs_m, mask_m, FORM)  # (BLOCK_M, HEAD_DIM)
    max_scale = scores.call.qk_scale
    if FORM.SOFTMAX == "bounded":
        n_m = norms(w_m, max_scale)  # (BLOCK_M,), as are the bound and the masks
        row_bound = tl.zeros((BLOCK_M,), tl.float32) + max_norm
        if FORM.CAUSAL:
            # Over the block's own rows up to each: prefixes must not depend on later rows.
            own = tl.arange(0, BLOCK_M)
            row_bound = tl.maximum(row_bound, tl.max(tl.where(own[None, :] <= own[:, None], n_m[None, :], 0.0), 1))
        # A token alone has weight 1, and its score is lse: exactly in the online form.
        needs_online = mask_m & ((row_bound - n_m > RANGE) | (row_bound > HIGHEST) | (scores.length == 1))
        bounded_ok = mask_m & (needs_online == 0)
        # A whole number of powers of two is exact, and the scaling then one multiply-add.
        shift = tl.ceil((n_m + row_bound) * LOG2_E)
        if tl.max(bounded_ok.to(tl.int32), 0) > 0:
            COLUMNS: tl.constexpr = 1 if w.ptr.dtype.element_ty == tl.float32 else SUMS
            acc, sums = tile.zeros(BLOCK_M, FORM), tl.zeros((BLOCK_M, COLUMNS), tl.float32)
            acc, _, sums = walk_keys((acc, shift, sums), w_m, w, scores, start_m, "bounded", BLOCK_M, FORM)
            finish((acc, shift, tl.max(sums, 1)), LN_2, out, lse_ptr, offs_m, bounded_ok, out_scale, FORM)
        if tl.max(needs_online.to(tl.int32), 0) > 0:
            state = walk_keys(empty_state(BLOCK_M, FORM), w_m, w, scores, start_m, "online", BLOCK_M, FORM)
            finish(state, max_scale, out, lse_ptr, offs_m, needs_online, out_scale, FORM)
    elif FORM.SOFTMAX == "threshold":
        state = walk_keys(empty_state(BLOCK_M, FORM), w_m, w, scores, start_m, "statistics", BLOCK_M, FORM)
        acc, m_i, l_i = walk_keys(state, w_m, w, scores, start_m, "select", BLOCK_M, FORM)
        # finish() divides by l_i: multiply by it here, so that each selected weight ends as the threshold.
        state = (tile.scale(acc, l_i * scores.call.threshold), m_i, l_i)
        finish(state, max_scale, out, lse_ptr, offs_m, mask_m, out_scale, FORM)
    else:
        state = walk_keys(empty_state(BLOCK_M, FORM), w_m, w, scores, start_m, "online", BLOCK_M, FORM)
        finish(state, max_scale, out, lse_ptr, offs_m, mask_m, out_scale, FORM)
