"""What tiles of rows give to the gradient of the rows that a program owns; backward.py has the equations.

Where all L of a sequence are within EXTENT, the second exponential is ``P_ji = P_ij exp(L_i - c) exp(c - L_j)``.

In these functions ``rows`` is (where w is, where g is, lse_ptr, delta_ptr, dlse_ptr), ``call`` is (mask_ptr, length,
head, seed, qk_scale, drop_last, keep_factor, scale, threshold), ``FORM`` is as in the forward, and ``TERMS`` is
(VALUES: P g, SCORES: A w, PRODUCTS: A has g.w - delta in it, SELECT: phi="threshold", LSE: A has dlse in it).
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# Triton's compiler reads these functions; their types are not Python's.

from __future__ import annotations

import triton
import triton.language as tl

from crate_kernels._triton import jit
from crate_kernels.ops.mssa.triton import tile

# What underflows on the way is a weight below 2^-62, whatever the factors that follow.
EXTENT = tl.constexpr(44.0)


@triton.jit
def numbers(rows, offs, length, TERMS: tl.constexpr):
    """Load L, delta and dlse of some rows; L is inf, and every weight then 0, where a row is absent or sees no key."""
    lse = tl.load(rows[2] + offs, mask=offs < length, other=-float("inf"))
    delta = tl.load(rows[3] + offs, mask=offs < length, other=0.0) if TERMS[2] else 0.0
    dlse = tl.load(rows[4] + offs, mask=offs < length, other=0.0) if TERMS[4] else 0.0
    return tl.where(lse == -float("inf"), float("inf"), lse), delta, dlse


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
def dropped(x, call, queries, keys, FORM: tl.constexpr):
    """Return ``x`` times the dropout factor of every (query, key)."""
    if FORM[2]:
        _, _, head, seed, _, drop_last, keep_factor, _, _ = call
        return tl.where(jit.keep_mask(seed, head, queries, keys, drop_last), x * keep_factor, 0.0)
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
    w_j, g_j, l_j, delta_j, dlse_j = own
    _, length, _, _, _, _, _, scale, threshold = call
    key_j = offs_j[:, None]
    for start_i in range(start, stop, BLOCK_I):
        offs_i = start_i + tl.arange(0, BLOCK_I)
        key_i = offs_i[None, :]
        w_i = tile.load(rows[0], offs_i, offs_i < length, DIMS)  # (BLOCK_I, head_dim)
        l_i, delta_i, dlse_i = numbers(rows, offs_i, length, TERMS)
        s = tile.products(w_j, w_i, FORM[4])  # (BLOCK_J, BLOCK_I)
        if FORM[3]:
            s = -s
        a = tl.zeros_like(s)
        if KEY:
            p = _probabilities(s, l_i[None, :], call, key_i, key_j, MASKED, FORM)
            if TERMS[0]:
                g_i = tile.load(rows[1], offs_i, offs_i < length, DIMS)  # (BLOCK_I, head_dim)
                weights = tl.where(p > threshold, 1.0, 0.0) if TERMS[3] else p
                weights = dropped(weights, call, key_i, key_j, FORM)
                acc = tile.add_product(acc, weights.to(w_i[0].dtype), g_i, FORM[4])
            if TERMS[2]:
                d = dropped(tile.products(w_j, g_i, FORM[4]), call, key_i, key_j, FORM) - delta_i[None, :]
                # After the difference, which may be small: delta - dlse would be rounded as delta is.
                a = p * (d + dlse_i[None, :] if TERMS[4] else d)
            elif TERMS[4]:
                a = p * dlse_i[None, :]
        if QUERY and TERMS[1]:
            if DERIVED:
                t = p * tl.exp(l_i - centre)[None, :] * tl.exp(centre - l_j)[:, None]
            else:
                t = _probabilities(s, l_j[:, None], call, key_j, key_i, MASKED, FORM)
            if TERMS[2]:
                d = dropped(tile.products(g_j, w_i, FORM[4]), call, key_j, key_i, FORM) - delta_j[:, None]
                a += t * (d + dlse_j[:, None] if TERMS[4] else d)
            else:
                a += t * dlse_j[:, None]
        if TERMS[1]:
            acc = tile.add_product(acc, (a * scale).to(w_i[0].dtype), w_i, FORM[4])
    return acc


@triton.jit
def walk(
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
    offs_j = tl.minimum(start_j + tl.arange(0, BLOCK_J), length - 1)  # beyond the end the last row again
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
