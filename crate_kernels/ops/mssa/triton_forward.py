"""The forward of subspace attention in Triton: a tile of w, once on chip, is both key and value.

MATH.md's symbols, ``s_ij = scale * w_i . w_j``. A program owns BLOCK_M rows i and walks over tiles of BLOCK_N keys j:
two products a tile, 4 seqlen^2 head_dim FLOP a head (half of it when causal). Memory gives w once, and once more to
``_mssa_norms_kernel`` where the softmax is bounded; it takes out and lse once.

Scores are not scaled by log2(e), which would save the exponential a multiplication: lse would be rounded there and
back, and the backward would see large weights of 1 as 1.001 where scores reach thousands.

Two forms of the softmax:

- online: the usual running maximum, with which the accumulator is rescaled;
- bounded: query and key are one matrix, so for scale > 0 ``s_ij <= n_i + n_j`` with ``n_k = s_kk / 2``, and
  ``n_i + max_j n_j`` bounds row i before any score is known: no maximum, no rescaling. The row's sum is at least
  ``exp(n_i - max n)``; rows for which that could leave fp32's range take the online form instead.

In the causal form the maximum of n is over j <= i, and each row takes its form by itself: no bit of a prefix depends
on what comes after it.

In the kernels ``call`` is (mask_ptr, length, head, seed, qk_scale, drop_last, threshold) and ``FORM`` is (CAUSAL,
PADDED, DROPOUT, NEGATIVE, PRECISION); NEGATIVE says that qk_scale is the magnitude of a scale below 0.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# Triton's compiler reads these functions; their types are not Python's.

from __future__ import annotations

import triton
import triton.language as tl

from crate_kernels import _jit
from crate_kernels.ops.mssa import triton_tile as tile

# A row's sum is at least 2^-80, and a weight that underflows is 2^-46 of it.
RANGE = tl.constexpr(55.0)


@triton.jit
def _mask_scores(s, call, offs_m, offs_n, FORM: tl.constexpr):
    """Scale scores and put -inf where a row may not see a key: in this order, as 0 * -inf is NaN."""
    mask_ptr, length, _, _, qk_scale, _, _ = call
    allowed = (offs_n < length)[None, :]
    if FORM[0]:
        allowed = allowed & (offs_n[None, :] <= offs_m[:, None])
    if FORM[1]:
        allowed = allowed & (tl.load(mask_ptr + offs_n, mask=offs_n < length, other=0) != 0)[None, :]
    return tl.where(allowed, s * qk_scale, -float("inf"))


@triton.jit
def attend_tiles(
    state,
    w_m,
    at,
    call,
    offs_m,
    start,
    stop,
    PASS: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FORM: tl.constexpr,
    DIMS: tl.constexpr,
):
    """Walk over the keys [start, stop), starting from and returning (accumulator, maximum or bound, sum)."""
    acc, m_i, l_i = state
    _, length, head, seed, qk_scale, drop_last, threshold = call
    for start_n in range(start, stop, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        w_n = tile.load(at, offs_n, offs_n < length, DIMS)  # (BLOCK_N, head_dim)
        s = tile.products(w_m, w_n, FORM[4])  # (BLOCK_M, BLOCK_N)
        if FORM[3]:
            s = -s
        if MASKED:
            s = _mask_scores(s, call, offs_m, offs_n, FORM)
        before = m_i
        if PASS == "online" or PASS == "statistics":
            m_i = tl.maximum(m_i, tl.max(s, 1) if MASKED else tl.max(s, 1) * qk_scale)
        # Rows without a key so far: any finite number for -inf makes their weights 0 instead of NaN.
        base = tl.where(m_i == -float("inf"), 0.0, m_i) if MASKED else m_i
        if PASS == "online" or PASS == "statistics":
            shrink = tl.exp(before - base)
            l_i = l_i * shrink
            if PASS == "online":
                acc = tile.scale(acc, shrink)
        # Where nothing is masked, the scaling is part of the exponent's multiply-add.
        p = tl.exp((s if MASKED else s * qk_scale) - base[:, None])
        if PASS == "select":
            # Against the sum, not divided by it: a probability equal to the threshold is not above it.
            p = tl.where(p > threshold * l_i[:, None], 1.0, 0.0)
        else:
            l_i += tl.sum(p, 1)
        if PASS != "statistics":
            if FORM[2]:
                p = tl.where(_jit.keep_mask(seed, head, offs_m[:, None], offs_n[None, :], drop_last), p, 0.0)
            acc = tile.add_product(acc, p.to(w_n[0].dtype), w_n, FORM[4])
    return acc, m_i, l_i


@triton.jit
def _walk(
    state,
    w_m,
    at,
    call,
    start_m,
    PASS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TAIL_N: tl.constexpr,
    FORM: tl.constexpr,
    DIMS: tl.constexpr,
):
    """Walk over all the keys of a block of rows: unmasked as far as possible, then TAIL_N at a time with masks."""
    length = call[1]
    offs_m = start_m + tl.arange(0, BLOCK_M)
    if FORM[1]:
        whole = 0
    elif FORM[0]:
        whole = (start_m + 1) // BLOCK_N * BLOCK_N
    else:
        whole = length // BLOCK_N * BLOCK_N
    stop = tl.minimum(start_m + BLOCK_M, length) if FORM[0] else length
    if not FORM[1]:
        state = attend_tiles(state, w_m, at, call, offs_m, 0, whole, PASS, False, BLOCK_N, FORM, DIMS)
    return attend_tiles(state, w_m, at, call, offs_m, whole, stop, PASS, True, TAIL_N, FORM, DIMS)


@triton.jit
def _norms(w, qk_scale):
    """Return n_k = s_kk / 2 of the rows of a tile."""
    return tile.row_products(w, w) * (0.5 * qk_scale)


@triton.jit
def _finish(state, out_at, lse_ptr, offs_m, mask_m, factor, DIMS: tl.constexpr):
    """Write out and lse of the rows of ``mask_m``; without a key they are 0 and -inf."""
    acc, m_i, l_i = state
    empty = l_i == 0.0
    sums = tl.where(empty | (mask_m == 0), 1.0, l_i)  # rows of no concern may have a sum too small to divide by
    tile.store(out_at, tile.scale(acc, factor / sums), offs_m, mask_m, DIMS)
    tl.store(lse_ptr + offs_m, tl.where(empty, -float("inf"), m_i + tl.log(sums)), mask=mask_m)


@triton.jit
def _rows(
    at,
    out_at,
    lse_ptr,
    call,
    start_m,
    before,
    factor,
    SOFTMAX: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TAIL_N: tl.constexpr,
    FORM: tl.constexpr,
    DIMS: tl.constexpr,
):
    """Attend with the rows [start_m, start_m + BLOCK_M) of a head.

    SOFTMAX is "online", "bounded" or "threshold"; ``before`` is the largest n of the keys that all these rows see.
    """
    length, qk_scale = call[1], call[4]
    offs_m = start_m + tl.arange(0, BLOCK_M)
    mask_m = offs_m < length
    w_m = tile.load(at, offs_m, mask_m, DIMS)  # (BLOCK_M, head_dim)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    state = (tile.zeros(BLOCK_M, DIMS), l_i - float("inf"), l_i)
    if SOFTMAX == "bounded":
        n_m = _norms(w_m, qk_scale)
        top = tl.zeros((BLOCK_M,), tl.float32) + before
        if FORM[0]:
            # Over the block's own rows up to each: prefixes must not depend on later rows.
            own = tl.arange(0, BLOCK_M)
            top = tl.maximum(top, tl.max(tl.where(own[None, :] <= own[:, None], n_m[None, :], 0.0), 1))
        far = mask_m & (top - n_m > RANGE)
        some = tl.max(far.to(tl.int32), 0) > 0
        bounded = (state[0], n_m + top, l_i)
        if FORM[0]:
            bounded = _walk(bounded, w_m, at, call, start_m, "bounded", BLOCK_M, BLOCK_N, TAIL_N, FORM, DIMS)
            _finish(bounded, out_at, lse_ptr, offs_m, mask_m & (far == 0), factor, DIMS)
            if some:
                state = _walk(state, w_m, at, call, start_m, "online", BLOCK_M, BLOCK_N, TAIL_N, FORM, DIMS)
                _finish(state, out_at, lse_ptr, offs_m, far, factor, DIMS)
        else:
            if some:
                state = _walk(state, w_m, at, call, start_m, "online", BLOCK_M, BLOCK_N, TAIL_N, FORM, DIMS)
            else:
                state = _walk(bounded, w_m, at, call, start_m, "bounded", BLOCK_M, BLOCK_N, TAIL_N, FORM, DIMS)
            _finish(state, out_at, lse_ptr, offs_m, mask_m, factor, DIMS)
    elif SOFTMAX == "threshold":
        state = _walk(state, w_m, at, call, start_m, "statistics", BLOCK_M, BLOCK_N, TAIL_N, FORM, DIMS)
        acc, m_i, l_i = _walk(state, w_m, at, call, start_m, "select", BLOCK_M, BLOCK_N, TAIL_N, FORM, DIMS)
        # What _finish divides by the sum is to be weights of ``threshold``.
        state = (tile.scale(acc, l_i * call[6]), m_i, l_i)
        _finish(state, out_at, lse_ptr, offs_m, mask_m, factor, DIMS)
    else:
        state = _walk(state, w_m, at, call, start_m, "online", BLOCK_M, BLOCK_N, TAIL_N, FORM, DIMS)
        _finish(state, out_at, lse_ptr, offs_m, mask_m, factor, DIMS)


@triton.jit
def _largest(top_ptr, count):
    """Return the largest of ``count`` numbers, none of which is negative."""
    top = tl.zeros((64,), tl.float32)
    for start in range(0, count, 64):
        offs = start + tl.arange(0, 64)
        top = tl.maximum(top, tl.load(top_ptr + offs, mask=offs < count, other=0.0))
    return tl.max(top, 0)


# Lengths change from call to call: none of them may have kernels compiled of its own.
@triton.jit(do_not_specialize=["nheads", "seqlen", "total", "num_m"])
def _mssa_norms_kernel(
    w_ptr,
    cu_seqlens_ptr,
    top_ptr,
    stride_wb,
    stride_wh,
    stride_ws,
    stride_wd,
    nheads,
    seqlen,
    total,
    num_m,
    qk_scale,
    HEAD_DIM: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Write the largest n of every block of BLOCK_M rows to top (heads, num_m); w is read once."""
    DIMS: tl.constexpr = (HEAD_DIM, D0, D1, D2)
    pid = tl.program_id(0)
    head = pid // num_m
    batch, h = head // nheads, head % nheads
    start, length = _jit.sequence_bounds(cu_seqlens_ptr, batch, seqlen, total, PACKED)
    offset = batch.to(tl.int64) * stride_wb + h.to(tl.int64) * stride_wh + start.to(tl.int64) * stride_ws
    offs_m = pid % num_m * BLOCK_M + tl.arange(0, BLOCK_M)
    w = tile.load((w_ptr + offset, stride_ws, stride_wd), offs_m, offs_m < length, DIMS)
    tl.store(top_ptr + pid, tl.max(_norms(w, qk_scale), 0))


@triton.jit(do_not_specialize=["stride_lb", "stride_lh", "nheads", "seqlen", "total", "num_m", "drop_last"])
def _mssa_fwd_kernel(
    w_ptr,
    out_ptr,
    lse_ptr,
    mask_ptr,
    cu_seqlens_ptr,
    seed_ptr,
    top_ptr,
    stride_wb,
    stride_wh,
    stride_ws,
    stride_wd,
    stride_ob,
    stride_oh,
    stride_os,
    stride_od,
    stride_lb,
    stride_lh,
    nheads,
    seqlen,
    total,
    num_m,
    qk_scale,
    drop_last,
    factor,
    threshold,
    HEAD_DIM: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TAIL_M: tl.constexpr,
    TAIL_N: tl.constexpr,
    SOFTMAX: tl.constexpr,
    WHOLE: tl.constexpr,
    CAUSAL: tl.constexpr,
    PADDED: tl.constexpr,
    PACKED: tl.constexpr,
    DROPOUT: tl.constexpr,
    NEGATIVE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write out and lse of a block of rows, or, WHOLE, of all rows of a head one block after the other.

    The last block has TAIL_M rows, and the last keys come in tiles of TAIL_N: 197 rows cost 208 and not 256.
    """
    DIMS: tl.constexpr = (HEAD_DIM, D0, D1, D2)
    FORM: tl.constexpr = (CAUSAL, PADDED, DROPOUT, NEGATIVE, PRECISION)
    pid = tl.program_id(0)
    head = pid if WHOLE else pid // num_m
    # The longest rows of the causal form first: they are what the last programs would wait for.
    pid_m = num_m - 1 - pid % num_m if CAUSAL else pid % num_m
    batch, h = head // nheads, head % nheads
    start, length = _jit.sequence_bounds(cu_seqlens_ptr, batch, seqlen, total, PACKED)
    batch64, h64, start64 = batch.to(tl.int64), h.to(tl.int64), start.to(tl.int64)
    at = (w_ptr + batch64 * stride_wb + h64 * stride_wh + start64 * stride_ws, stride_ws, stride_wd)
    out_at = (out_ptr + batch64 * stride_ob + h64 * stride_oh + start64 * stride_os, stride_os, stride_od)
    lse_ptr += batch64 * stride_lb + h64 * stride_lh + start64
    if PADDED:
        mask_ptr += batch64 * seqlen
    seed = tl.load(seed_ptr) if DROPOUT else 0
    call = (mask_ptr, length, head, seed, qk_scale, drop_last, threshold)
    before = 0.0
    if WHOLE:
        tl.static_assert(not PACKED and not (CAUSAL and SOFTMAX == "bounded"))
        if SOFTMAX == "bounded":
            top = tl.zeros((BLOCK_M,), tl.float32)
            for start_m in range(0, length, BLOCK_M):
                rows = start_m + tl.arange(0, BLOCK_M)
                top = tl.maximum(top, _norms(tile.load(at, rows, rows < length, DIMS), qk_scale))
            before = tl.max(top, 0)
        tail = (num_m - 1) * BLOCK_M if TAIL_M < BLOCK_M else num_m * BLOCK_M
        for start_m in range(0, tail, BLOCK_M):
            _rows(at, out_at, lse_ptr, call, start_m, before, factor, SOFTMAX, BLOCK_M, BLOCK_N, TAIL_N, FORM, DIMS)
        if TAIL_M < BLOCK_M:
            _rows(at, out_at, lse_ptr, call, tail, before, factor, SOFTMAX, TAIL_M, BLOCK_N, TAIL_N, FORM, DIMS)
    else:
        start_m = pid_m * BLOCK_M
        if SOFTMAX == "bounded":
            before = _largest(top_ptr + head.to(tl.int64) * num_m, pid_m if CAUSAL else num_m)
        if TAIL_M < BLOCK_M:
            if pid_m == num_m - 1:
                _rows(at, out_at, lse_ptr, call, start_m, before, factor, SOFTMAX, TAIL_M, BLOCK_N, TAIL_N, FORM, DIMS)
            else:
                _rows(at, out_at, lse_ptr, call, start_m, before, factor, SOFTMAX, BLOCK_M, BLOCK_N, TAIL_N, FORM, DIMS)
        elif start_m < length:
            _rows(at, out_at, lse_ptr, call, start_m, before, factor, SOFTMAX, BLOCK_M, BLOCK_N, TAIL_N, FORM, DIMS)
        if PACKED:
            sequences = tl.num_programs(0) // (nheads * num_m)
            first, stop = _jit.uncovered(cu_seqlens_ptr, batch, sequences, seqlen, total)
            tile.zero_rows((out_ptr + h64 * stride_oh, stride_os, stride_od), first, stop, pid_m, num_m, BLOCK_M, DIMS)
            tile.zero_numbers(lse_ptr - start64, first, stop, pid_m, num_m, BLOCK_M)
