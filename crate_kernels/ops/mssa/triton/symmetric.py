"""The walk of the backward over divided gradients: one weight serves both directions, without another factor.

With ``r_i = exp(L_i - shift)``, ``h_i = g_i / r_i`` rounded once, and ``delta_i`` made of that very h_i, the rest is
symmetric (docs/derivations.md); divided.py prepares h and delta, in which the gradient of L is too:

    E_ij = exp(s_ij - shift)
    A_ij = E_ij (h_i.w_j + h_j.w_i - delta_i - delta_j)
    dw_j = sum_i  E_ij h_i + scale A_ij w_i

In fp16 the shift has a factor of E in it, by which dw is divided (raised.py).
The two products in A are one sum. Between them stands another product: two in a row into one sum wait for each other.
The sum does not start from minus the deltas: Triton loads in advance what a product is multiplied by, not what it is
added to.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false
# Triton's compiler reads these functions; their types are not Python's.

from __future__ import annotations

import triton
import triton.language as tl

from crate_kernels.ops.mssa.triton import tile
from crate_kernels.ops.mssa.triton.head import allowed, signed_products
from crate_kernels.ops.mssa.triton.rows import LOG2_E
from crate_kernels.ops.mssa.triton.terms import dropped, load_number, load_rows


@triton.jit
def _add_tiles(
    acc, own, inputs, scores, shift, start, stop,
    MASKED: tl.constexpr, FORM: tl.constexpr, KEY: tl.constexpr = True, QUERY: tl.constexpr = True,
):  # fmt: skip
    """Add the terms of rows [start, stop) to the owned rows, which take part as KEY, as QUERY or as both."""
    BLOCK_I: tl.constexpr = FORM.TAIL if MASKED else FORM.BLOCK
    # Where only one direction of a pair may exist, or each has a dropout factor, their terms are apart.
    CUT: tl.constexpr = MASKED and (FORM.CAUSAL or FORM.PADDED)
    JOINT: tl.constexpr = KEY and QUERY and not (CUT or FORM.DROPOUT)
    length = scores.length
    to_log2 = scores.call.qk_scale * LOG2_E
    key_j = own.offs[:, None]
    for start_i in range(start, stop, BLOCK_I):
        offs_i = start_i + tl.arange(0, BLOCK_I)
        key_i = offs_i[None, :]
        w_i = load_rows(inputs.w, offs_i, length, MASKED, FORM)  # (BLOCK_I, HEAD_DIM)
        s = signed_products(own.w, w_i, FORM)  # (BLOCK_J, BLOCK_I)
        if KEY:
            g_i = load_rows(inputs.g, offs_i, length, MASKED, FORM)  # (BLOCK_I, HEAD_DIM)
            delta_i = load_number(inputs.delta_ptr, offs_i, length, 0.0, MASKED)[None, :]  # (1, BLOCK_I)
        if JOINT:
            d = tile.products(own.w, g_i, FORM)  # (BLOCK_J, BLOCK_I)
        e = tl.exp2(s * to_log2 - shift)  # (BLOCK_J, BLOCK_I)
        if MASKED:
            e = tl.where(key_i < length, e, 0.0)
        if KEY:
            e_i = tl.where(allowed(scores, key_i, key_j, FORM), e, 0.0) if CUT else e
            acc = tile.add_product(acc, dropped(e_i, scores, key_i, key_j, FORM).to(w_i[0].dtype), g_i, FORM)
        if JOINT:
            a = e * (tile.add_products(d, own.g, w_i, FORM) - own.delta[:, None] - delta_i)  # (BLOCK_J, BLOCK_I)
        else:
            a = tl.zeros_like(s)  # (BLOCK_J, BLOCK_I)
            if KEY:
                a = e_i * (dropped(tile.products(own.w, g_i, FORM), scores, key_i, key_j, FORM) - delta_i)
            if QUERY:
                e_j = tl.where(allowed(scores, key_j, key_i, FORM), e, 0.0) if CUT else e  # (BLOCK_J, BLOCK_I)
                d = dropped(tile.products(own.g, w_i, FORM), scores, key_j, key_i, FORM) - own.delta[:, None]
                a += e_j * d
        acc = tile.add_product(acc, (a * scores.call.scale).to(w_i[0].dtype), w_i, FORM)
    return acc


@triton.jit
def walk(acc, own, inputs, scores, shift, start_j, BLOCK_J: tl.constexpr, FORM: tl.constexpr):
    """Walk over all the rows that owned rows meet, with masks only where they cut."""
    length = scores.length
    if FORM.CAUSAL:
        after = tl.minimum(start_j + BLOCK_J, length)
        whole = after if FORM.PADDED else after + (length - after) // FORM.BLOCK * FORM.BLOCK
        acc = _add_tiles(acc, own, inputs, scores, shift, 0, start_j, FORM.PADDED, FORM, KEY=False)
        acc = _add_tiles(acc, own, inputs, scores, shift, start_j, after, True, FORM)
        if not FORM.PADDED:
            acc = _add_tiles(acc, own, inputs, scores, shift, after, whole, False, FORM, QUERY=False)
        return _add_tiles(acc, own, inputs, scores, shift, whole, length, True, FORM, QUERY=False)
    else:
        whole = 0 if FORM.PADDED else length // FORM.BLOCK * FORM.BLOCK
        if not FORM.PADDED:
            acc = _add_tiles(acc, own, inputs, scores, shift, 0, whole, False, FORM)
        return _add_tiles(acc, own, inputs, scores, shift, whole, length, True, FORM)
