"""The backward of subspace attention in Triton: one accumulator, no atomics, bitwise deterministic.

MATH.md's symbols; g is the gradient of out, ``L`` is lse and ``shift = delta - dlse``. A program
owns BLOCK_J rows j of w, as keys and as queries at once, and walks over tiles of BLOCK_I rows i. One tile of scores,
which is symmetric, has both directions in it:

    P_ij = exp(s_ij - L_i)  j as key of i,        P_ji = exp(s_ij - L_j)  j as query of i
    dw_j = sum_i  P_ij g_i + A_ij w_i,           A_ij = scale (P_ij (g_i.w_j - shift_i) + P_ji (g_j.w_i - shift_j))

Five products a tile, 10 seqlen^2 head_dim FLOP a head; dq, dk and dv apart would take seven products. Off the causal
diagonal one direction exists: four products after it, three before it. Memory gives w, g, out and lse once to
``_mssa_bwd_shift_kernel``, and w, g and two numbers a row to the main kernel; it takes dw once.

Where all L of a sequence are within EXTENT, the second exponential is ``P_ji = P_ij exp(L_i - c) exp(c - L_j)``.

In the kernels ``rows`` is (where w is, where g is, lse_ptr, shift_ptr), ``call`` is (mask_ptr, length, head, seed,
qk_scale, drop_last, keep_factor, scale, threshold), ``FORM`` is as in the forward, and ``TERMS`` is (VALUES: P g,
SCORES: A w, PRODUCTS: A has g.w in it, SELECT: phi="threshold").
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# Triton's compiler reads these functions; their types are not Python's.

from __future__ import annotations

import triton
import triton.language as tl

from crate_kernels import _jit
from crate_kernels.ops.mssa import triton_tile as tile

# What underflows on the way is a weight below 2^-62, whatever the factors that follow.
EXTENT = tl.constexpr(44.0)


@triton.jit
def _numbers(rows, offs, length):
    """Load L and shift of some rows; L is inf, and every weight then 0, where a row is absent or sees no key."""
    lse = tl.load(rows[2] + offs, mask=offs < length, other=-float("inf"))
    shift = tl.load(rows[3] + offs, mask=offs < length, other=0.0)
    return tl.where(lse == -float("inf"), float("inf"), lse), shift


@triton.jit
def _probabilities(s, base, call, queries, keys, MASKED: tl.constexpr, FORM: tl.constexpr):
    """Return exp(s - base); what is masked may be large, so it is masked before the exponential."""
    mask_ptr, length, _, _, qk_scale, _, _, _, _ = call
    if MASKED:
        allowed = keys < length
        if FORM[1]:
            allowed = allowed & (tl.load(mask_ptr + keys, mask=allowed, other=0) != 0)
        if FORM[0]:
            allowed = allowed & (keys <= queries)
        return tl.exp(tl.where(allowed, s * qk_scale - base, -float("inf")))
    else:
        return tl.exp(s * qk_scale - base)


@triton.jit
def _dropped(x, call, queries, keys, FORM: tl.constexpr):
    """Return ``x`` times the dropout factor of every (query, key)."""
    if FORM[2]:
        _, _, head, seed, _, drop_last, keep_factor, _, _ = call
        return tl.where(_jit.keep_mask(seed, head, queries, keys, drop_last), x * keep_factor, 0.0)
    else:
        return x


@triton.jit
def _tiles(
    acc,
    own,
    rows,
    call,
    offs_j,
    start,
    stop,
    centre,
    KEY: tl.constexpr,
    QUERY: tl.constexpr,
    MASKED: tl.constexpr,
    DERIVED: tl.constexpr,
    BLOCK_I: tl.constexpr,
    FORM: tl.constexpr,
    TERMS: tl.constexpr,
    DIMS: tl.constexpr,
):
    """Add what rows [start, stop) give to the owned rows, which take part as KEY, as QUERY or as both."""
    w_j, g_j, l_j, shift_j = own
    _, length, _, _, _, _, _, scale, threshold = call
    key_j = offs_j[:, None]
    for start_i in range(start, stop, BLOCK_I):
        offs_i = start_i + tl.arange(0, BLOCK_I)
        key_i = offs_i[None, :]
        w_i = tile.load(rows[0], offs_i, offs_i < length, DIMS)  # (BLOCK_I, head_dim)
        l_i, shift_i = _numbers(rows, offs_i, length)
        s = tile.products(w_j, w_i, FORM[4])  # (BLOCK_J, BLOCK_I)
        if FORM[3]:
            s = -s
        a = tl.zeros_like(s)
        if KEY:
            p = _probabilities(s, l_i[None, :], call, key_i, key_j, MASKED, FORM)
            if TERMS[0]:
                g_i = tile.load(rows[1], offs_i, offs_i < length, DIMS)  # (BLOCK_I, head_dim)
                weights = tl.where(p > threshold, 1.0, 0.0) if TERMS[3] else p
                weights = _dropped(weights, call, key_i, key_j, FORM)
                acc = tile.add_product(acc, weights.to(w_i[0].dtype), g_i, FORM[4])
            if TERMS[2]:
                a = p * (_dropped(tile.products(w_j, g_i, FORM[4]), call, key_i, key_j, FORM) - shift_i[None, :])
            elif TERMS[1]:
                a = -p * shift_i[None, :]
        if QUERY and TERMS[1]:
            if DERIVED:
                t = p * tl.exp(l_i - centre)[None, :] * tl.exp(centre - l_j)[:, None]
            else:
                t = _probabilities(s, l_j[:, None], call, key_j, key_i, MASKED, FORM)
            if TERMS[2]:
                a += t * (_dropped(tile.products(g_j, w_i, FORM[4]), call, key_j, key_i, FORM) - shift_j[:, None])
            else:
                a -= t * shift_j[:, None]
        if TERMS[1]:
            acc = tile.add_product(acc, (a * scale).to(w_i[0].dtype), w_i, FORM[4])
    return acc


@triton.jit
def _walk(
    acc,
    own,
    rows,
    call,
    extent,
    start_j,
    BLOCK_J: tl.constexpr,
    BLOCK_I: tl.constexpr,
    TAIL_I: tl.constexpr,
    DERIVED: tl.constexpr,
    FORM: tl.constexpr,
    TERMS: tl.constexpr,
    DIMS: tl.constexpr,
):
    """Walk over all the rows that owned rows meet, with masks only where they cut."""
    length = call[1]
    offs_j = start_j + tl.arange(0, BLOCK_J)
    if FORM[0]:
        after = tl.minimum(start_j + BLOCK_J, length)
        if TERMS[1]:
            acc = _tiles(
                acc, own, rows, call, offs_j, 0, start_j, 0.0, False, True, FORM[1], False, BLOCK_I, FORM, TERMS, DIMS
            )
        acc = _tiles(
            acc, own, rows, call, offs_j, start_j, after, 0.0, True, True, True, False, BLOCK_I, FORM, TERMS, DIMS
        )
        return _tiles(
            acc, own, rows, call, offs_j, after, length, 0.0, True, False, FORM[1], False, BLOCK_I, FORM, TERMS, DIMS
        )
    else:
        low, high = extent
        whole = 0 if FORM[1] else length // BLOCK_I * BLOCK_I
        if DERIVED:
            # Rows further apart are rare: they take the masked loop from the start instead of a third one.
            whole = tl.where(high - low <= EXTENT, whole, 0)
        if not FORM[1]:
            acc = _tiles(
                acc, own, rows, call, offs_j, 0, whole, 0.5 * (low + high),
                True, True, False, DERIVED, BLOCK_I, FORM, TERMS, DIMS,
            )  # fmt: skip
        return _tiles(
            acc, own, rows, call, offs_j, whole, length, 0.0, True, True, True, False, TAIL_I, FORM, TERMS, DIMS
        )


@triton.jit
def _block(
    rows,
    dw_at,
    call,
    extent,
    start_j,
    BLOCK_J: tl.constexpr,
    BLOCK_I: tl.constexpr,
    TAIL_I: tl.constexpr,
    DERIVED: tl.constexpr,
    FORM: tl.constexpr,
    TERMS: tl.constexpr,
    DIMS: tl.constexpr,
):
    """Write the gradient of the rows [start_j, start_j + BLOCK_J) of a head."""
    length, threshold = call[1], call[8]
    offs_j = start_j + tl.arange(0, BLOCK_J)
    mask_j = offs_j < length
    # Beyond the end the last row again: zeros would be keys whose weights can overflow.
    held_j = tl.minimum(offs_j, length - 1)
    w_j = tile.load(rows[0], held_j, held_j >= 0, DIMS)
    g_j = tile.load(rows[1], held_j, held_j >= 0, DIMS) if TERMS[2] else w_j
    l_j, shift_j = _numbers(rows, held_j, length)
    own = (w_j, g_j, l_j, shift_j)
    acc = tile.zeros(BLOCK_J, DIMS)
    if TERMS[3]:
        # Apart: the threshold is exact as a factor of the sum, and would be rounded as one of the weights.
        VALUES: tl.constexpr = (True, False, False, True)
        acc = _walk(acc, own, rows, call, extent, start_j, BLOCK_J, BLOCK_I, TAIL_I, False, FORM, VALUES, DIMS)
        acc = tile.scale(acc, tl.zeros((BLOCK_J,), tl.float32) + threshold)
        if TERMS[1]:
            REST: tl.constexpr = (False, True, False, False)
            acc = _walk(acc, own, rows, call, extent, start_j, BLOCK_J, BLOCK_I, TAIL_I, False, FORM, REST, DIMS)
    else:
        acc = _walk(acc, own, rows, call, extent, start_j, BLOCK_J, BLOCK_I, TAIL_I, DERIVED, FORM, TERMS, DIMS)
    tile.store(dw_at, acc, offs_j, mask_j, DIMS)


# Lengths change from call to call: none of them may have kernels compiled of its own.
@triton.jit(do_not_specialize=["stride_lb", "stride_lh", "nheads", "seqlen", "total", "num_m"])
def _mssa_bwd_shift_kernel(
    g_ptr,
    out_ptr,
    dlse_ptr,
    lse_ptr,
    cu_seqlens_ptr,
    shift_ptr,
    extent_ptr,
    stride_gb,
    stride_gh,
    stride_gs,
    stride_gd,
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
    HEAD_DIM: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PACKED: tl.constexpr,
    PRODUCTS: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write shift = sum_d g out - dlse of every row, and the least and the largest lse of every block of BLOCK_M."""
    DIMS: tl.constexpr = (HEAD_DIM, D0, D1, D2)
    pid = tl.program_id(0)
    head = pid // num_m
    batch, h = head // nheads, head % nheads
    start, length = _jit.sequence_bounds(cu_seqlens_ptr, batch, seqlen, total, PACKED)
    batch64, h64, start64 = batch.to(tl.int64), h.to(tl.int64), start.to(tl.int64)
    offs_m = pid % num_m * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = offs_m < length
    offset = batch64 * stride_lb + h64 * stride_lh + start64
    shift = tl.zeros((BLOCK_M,), tl.float32)
    if PRODUCTS:
        g_at = (g_ptr + batch64 * stride_gb + h64 * stride_gh + start64 * stride_gs, stride_gs, stride_gd)
        out_at = (out_ptr + batch64 * stride_ob + h64 * stride_oh + start64 * stride_os, stride_os, stride_od)
        # The diagonal of a product as the main kernel makes them, not a sum in an order of its own: where a weight is
        # near 1, out is near w, and g.w - delta is what remains of two numbers that cancel.
        s = tile.products(tile.load(g_at, offs_m, mask_m, DIMS), tile.load(out_at, offs_m, mask_m, DIMS), PRECISION)
        own = tl.arange(0, BLOCK_M)
        shift = tl.sum(tl.where(own[:, None] == own[None, :], s, 0.0), 1)
    if HAS_DLSE:
        shift -= tl.load(dlse_ptr + offset + offs_m, mask=mask_m, other=0.0)
    tl.store(shift_ptr + offset + offs_m, shift, mask=mask_m)
    base = tl.load(lse_ptr + offset + offs_m, mask=mask_m, other=0.0)
    tl.store(extent_ptr + 2 * pid.to(tl.int64), tl.min(tl.where(mask_m, base, float("inf")), 0))
    tl.store(extent_ptr + 2 * pid.to(tl.int64) + 1, tl.max(tl.where(mask_m, base, -float("inf")), 0))


@triton.jit
def _extent(extent_ptr, count):
    """Return the least and the largest of ``count`` pairs."""
    low = tl.full((64,), float("inf"), tl.float32)
    high = -low
    for start in range(0, count, 64):
        offs = start + tl.arange(0, 64)
        low = tl.minimum(low, tl.load(extent_ptr + 2 * offs, mask=offs < count, other=float("inf")))
        high = tl.maximum(high, tl.load(extent_ptr + 2 * offs + 1, mask=offs < count, other=-float("inf")))
    return tl.min(low, 0), tl.max(high, 0)


@triton.jit(do_not_specialize=["stride_lb", "stride_lh", "nheads", "seqlen", "total", "num_j", "num_m", "drop_last"])
def _mssa_bwd_kernel(
    g_ptr,
    w_ptr,
    dw_ptr,
    lse_ptr,
    shift_ptr,
    extent_ptr,
    mask_ptr,
    cu_seqlens_ptr,
    seed_ptr,
    stride_gb,
    stride_gh,
    stride_gs,
    stride_gd,
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
    num_j,
    num_m,
    qk_scale,
    drop_last,
    keep_factor,
    scale,
    threshold,
    HEAD_DIM: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_I: tl.constexpr,
    TAIL_J: tl.constexpr,
    TAIL_I: tl.constexpr,
    DERIVED: tl.constexpr,
    VALUES: tl.constexpr,
    SCORES: tl.constexpr,
    PRODUCTS: tl.constexpr,
    SELECT: tl.constexpr,
    CAUSAL: tl.constexpr,
    PADDED: tl.constexpr,
    PACKED: tl.constexpr,
    DROPOUT: tl.constexpr,
    NEGATIVE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write the gradient of a block of rows; the last block of a sequence has TAIL_J rows, the last tile TAIL_I."""
    DIMS: tl.constexpr = (HEAD_DIM, D0, D1, D2)
    FORM: tl.constexpr = (CAUSAL, PADDED, DROPOUT, NEGATIVE, PRECISION)
    TERMS: tl.constexpr = (VALUES, SCORES, PRODUCTS, SELECT)
    tl.static_assert(BLOCK_J % BLOCK_I == 0)  # tiles after the diagonal start where it ends
    pid = tl.program_id(0)
    head, pid_j = pid // num_j, pid % num_j
    batch, h = head // nheads, head % nheads
    start, length = _jit.sequence_bounds(cu_seqlens_ptr, batch, seqlen, total, PACKED)
    batch64, h64, start64 = batch.to(tl.int64), h.to(tl.int64), start.to(tl.int64)
    at = (w_ptr + batch64 * stride_wb + h64 * stride_wh + start64 * stride_ws, stride_ws, stride_wd)
    dw_at = (dw_ptr + batch64 * stride_ob + h64 * stride_oh + start64 * stride_os, stride_os, stride_od)
    g_at = at
    if VALUES:
        g_at = (g_ptr + batch64 * stride_gb + h64 * stride_gh + start64 * stride_gs, stride_gs, stride_gd)
    number = batch64 * stride_lb + h64 * stride_lh + start64
    rows = (at, g_at, lse_ptr + number, shift_ptr + number)
    if PADDED:
        mask_ptr += batch64 * seqlen
    seed = tl.load(seed_ptr) if DROPOUT else 0
    call = (mask_ptr, length, head, seed, qk_scale, drop_last, keep_factor, scale, threshold)
    extent = (0.0, 0.0)
    if DERIVED:
        extent = _extent(extent_ptr + 2 * head.to(tl.int64) * num_m, num_m)
    start_j = pid_j * BLOCK_J
    if TAIL_J < BLOCK_J:
        if pid_j == num_j - 1:
            _block(rows, dw_at, call, extent, start_j, TAIL_J, BLOCK_I, TAIL_I, DERIVED, FORM, TERMS, DIMS)
        else:
            _block(rows, dw_at, call, extent, start_j, BLOCK_J, BLOCK_I, TAIL_I, DERIVED, FORM, TERMS, DIMS)
    elif start_j < length:
        _block(rows, dw_at, call, extent, start_j, BLOCK_J, BLOCK_I, TAIL_I, DERIVED, FORM, TERMS, DIMS)
    if PACKED:
        sequences = tl.num_programs(0) // (nheads * num_j)
        first, stop = _jit.uncovered(cu_seqlens_ptr, batch, sequences, seqlen, total)
        tile.zero_rows((dw_ptr + h64 * stride_oh, stride_os, stride_od), first, stop, pid_j, num_j, BLOCK_J, DIMS)
