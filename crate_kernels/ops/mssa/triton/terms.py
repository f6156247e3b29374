"""The walk of the backward: tiles of rows i add to the gradient of a block of rows j; backward.py has the equations.

Where no L of a sequence is beyond EXTENT, both weights come from one exponential, ``P_ij = exp(s_ij) exp(-L_i)``.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false
# Triton's compiler reads these functions; their types are not Python's.

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from crate_kernels._triton.jit import rounded_product
from crate_kernels.ops.mssa.triton import tile
from crate_kernels.ops.mssa.triton.head import Scores, allowed, kept, signed_products
from crate_kernels.ops.mssa.triton.rows import LOG2_E
from crate_kernels.ops.mssa.triton.tile import TokenRows

# exp(s) is then finite, as no s is above its L, and a weight that underflows on the way below 2^-62.
EXTENT = tl.constexpr(44.0)


@triton.jit
def shared_factor(lse):
    """Return exp(-L), of L that are not beyond EXTENT."""
    return tl.exp2(tl.minimum(-lse, EXTENT) * LOG2_E)


class GradientTerms(NamedTuple):
    """The terms of the gradient that a walk adds up."""

    VALUES: bool = False  # P g
    SCORES: bool = False  # A w
    PRODUCTS: bool = False  # A has g.w - delta in it
    HAS_DLSE: bool = False  # A has dlse in it
    SELECT: bool = False  # phi="threshold": P is 1 where a forward selects it, else 0
    DERIVED: bool = False  # one exponential for both directions, where that is exact
    SYMMETRIC: bool = False  # gradients are divided by their rows' sums, where that is exact: symmetric.py
    RAISED: bool = False  # weights are raised before they are rounded to fp16: raised.py


class BackwardInputs(NamedTuple):
    """Tensors that the backward of a head reads, from its first row on."""

    w: TokenRows
    g: TokenRows
    lse_ptr: tl.tensor
    factor_ptr: tl.tensor  # exp(-L); with SELECT the largest product
    delta_ptr: tl.tensor  # with SELECT what a weight is compared with
    dlse_ptr: tl.tensor
    raised: tl.tensor  # the factor of weights; 1 but for fp16


class OwnRows(NamedTuple):
    """The rows j that a program owns."""

    scores: Scores  # of those that see them
    offs: tl.tensor  # (BLOCK_J,), places as the scores count them
    w: tl.tuple  # (BLOCK_J, HEAD_DIM), as is g
    g: tl.tuple
    lse: tl.tensor  # (BLOCK_J,), as are delta and dlse
    delta: tl.tensor
    dlse: tl.tensor


class MetRows(NamedTuple):
    """The rows i of a tile that the owned rows meet."""

    length: tl.tensor  # of the sequence
    offs: tl.tensor  # (BLOCK_I,)
    w: tl.tuple  # (BLOCK_I, HEAD_DIM)
    lse: tl.tensor  # (BLOCK_I,), as are delta and dlse; exp(-L) where both weights share an exponential
    delta: tl.tensor
    dlse: tl.tensor


@triton.jit
def load_number(ptr, offs, length, absent, MASKED: tl.constexpr):
    """Load a number of some rows; MASKED, of those that exist."""
    return tl.load(ptr + offs, mask=offs < length, other=absent) if MASKED else tl.load(ptr + offs)


@triton.jit
def _load_numbers(inputs, offs, length, MASKED: tl.constexpr, SHARED: tl.constexpr, TERMS: tl.constexpr):
    """Load L, delta and dlse of some rows; L is inf, and every weight then 0, where a row is absent or sees no key.

    SHARED, exp(-L) in place of L.
    """
    lse = load_number(inputs.factor_ptr if SHARED else inputs.lse_ptr, offs, length, -float("inf"), MASKED)
    delta = load_number(inputs.delta_ptr, offs, length, 0.0, MASKED) if TERMS.PRODUCTS else 0.0
    dlse = load_number(inputs.dlse_ptr, offs, length, 0.0, MASKED) if TERMS.HAS_DLSE else 0.0
    return tl.where(lse == -float("inf"), float("inf"), lse) if MASKED else lse, delta, dlse


@triton.jit
def load_rows(tokens, offs, length, MASKED: tl.constexpr, FORM: tl.constexpr):
    """Load a tile (rows, HEAD_DIM); MASKED, those of its rows that exist."""
    return tile.load(tokens, offs, offs < length, FORM) if MASKED else tile.load_whole(tokens, offs, FORM)


@triton.jit
def load_block(
    inputs, scores, start_j, length, BLOCK_J: tl.constexpr, FORM: tl.constexpr, TERMS: tl.constexpr, offset=0
):
    """Load the rows [start_j, start_j + BLOCK_J), whose places are ``offset`` more."""
    # Beyond the end the last row again: zeros would be keys whose weights can overflow.
    offs = tl.minimum(start_j + tl.arange(0, BLOCK_J), length - 1)
    w = tile.load(inputs.w, offs, offs >= 0, FORM)  # (BLOCK_J, HEAD_DIM), as is g
    g = tile.load(inputs.g, offs, offs >= 0, FORM) if TERMS.PRODUCTS else w
    lse, delta, dlse = _load_numbers(inputs, offs, length, True, False, TERMS)  # (BLOCK_J,) each
    return OwnRows(scores=scores, offs=offs + offset, w=w, g=g, lse=lse, delta=delta, dlse=dlse)


@triton.jit
def _probabilities(s, base, scores, queries, keys, MASKED: tl.constexpr, FORM: tl.constexpr):
    """Return exp(s - base), 0 where a row may not see a key."""
    exponent = rounded_product(s, scores.call.qk_scale) - base  # exactly 0 where one weight is all of a row
    if not MASKED:
        return tl.exp2(exponent * LOG2_E)
    # A masked score may be large: bound its exponent. Masking the weights keeps fewer values alive than masking scores.
    p = tl.exp2(tl.minimum(exponent * LOG2_E, 0.0, propagate_nan=tl.PropagateNan.ALL))
    return tl.where(allowed(scores, queries, keys, FORM), p, 0.0)


@triton.jit
def _selected(s, inputs, offs_i, scores, queries, keys, MASKED: tl.constexpr, FORM: tl.constexpr):
    """Return 1 where the forward of rows i selects a weight, else 0; lse, which is rounded, might say otherwise."""
    largest = load_number(inputs.factor_ptr, offs_i, scores.length, 0.0, MASKED)
    threshold = load_number(inputs.delta_ptr, offs_i, scores.length, 0.0, MASKED)
    if MASKED:
        s = tl.where(allowed(scores, queries, keys, FORM), s, -float("inf"))
        largest = tl.where(largest == -float("inf"), 0.0, largest)  # of a row without keys
    p = tl.exp2((s - largest[None, :]) * (scores.call.qk_scale * LOG2_E))
    return tl.where(p > threshold[None, :], 1.0, 0.0)


@triton.jit
def dropped(x, scores, queries, keys, FORM: tl.constexpr):
    """Return ``x`` times the dropout factor of every (query, key)."""
    if FORM.DROPOUT:
        x = tl.where(kept(scores, queries, keys), x * scores.call.keep_factor, 0.0)
    return x


@triton.jit
def _key_terms(
    acc, own, met, inputs, scores_ij, exps, scale,
    MASKED: tl.constexpr, FORM: tl.constexpr, TERMS: tl.constexpr, SHARED: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    """Return the sum with P g, and the gradient of scores, of the owned rows as keys of the rows met."""
    key_j, key_i = own.offs[:, None], met.offs[None, :]
    dscores = tl.zeros_like(scores_ij)  # (BLOCK_J, BLOCK_I), as are exps, probs and dprobs
    if TERMS.SELECT:
        probs = _selected(scores_ij, inputs, met.offs, own.scores, key_i, key_j, MASKED, FORM)
    elif SHARED:
        probs = exps * met.lse[None, :]
    else:
        probs = _probabilities(scores_ij, met.lse[None, :], own.scores, key_i, key_j, MASKED, FORM)
    if TERMS.VALUES:
        g_i = load_rows(inputs.g, met.offs, met.length, MASKED, FORM)  # (BLOCK_I, HEAD_DIM)
        weights = dropped(probs, own.scores, key_i, key_j, FORM)
        weights = weights * inputs.raised if TERMS.RAISED and not SHARED else weights
        acc = tile.add_product(acc, weights.to(met.w[0].dtype), g_i, FORM)
    weight = (met.lse * own.scores.call.scale)[None, :] if SHARED else probs * scale
    if FUSED:
        dscores = tile.products(own.w, g_i, FORM) * weight - weight * met.delta[None, :]
    elif TERMS.PRODUCTS:
        dprobs = tile.products(own.w, g_i, FORM)
        dprobs = dropped(dprobs, own.scores, key_i, key_j, FORM) - met.delta[None, :]
        # Add dlse to the difference, which may be small: delta - dlse would be rounded as coarsely as delta.
        dscores = weight * (dprobs + met.dlse[None, :] if TERMS.HAS_DLSE else dprobs)
    elif TERMS.HAS_DLSE:
        dscores = weight * met.dlse[None, :]
    return acc, dscores


@triton.jit
def _query_terms(
    dscores, own, met, scores, scores_ij, scale, factor_j, weighted_delta_j,
    MASKED: tl.constexpr, FORM: tl.constexpr, TERMS: tl.constexpr, SHARED: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    """Return the gradient of scores (BLOCK_J, BLOCK_I) with that of the owned rows as queries of the rows met."""
    key_j, key_i = own.offs[:, None], met.offs[None, :]
    if SHARED:
        weight = factor_j
    else:
        weight = _probabilities(scores_ij, own.lse[:, None], scores, key_j, key_i, MASKED, FORM) * scale
    if FUSED:
        dscores += tile.products(own.g, met.w, FORM) * weight - weighted_delta_j
    elif TERMS.PRODUCTS:
        dprobs = tile.products(own.g, met.w, FORM)
        dprobs = dropped(dprobs, scores, key_j, key_i, FORM) - own.delta[:, None]
        dscores += weight * (dprobs + own.dlse[:, None] if TERMS.HAS_DLSE else dprobs)
    else:
        dscores += weight * own.dlse[:, None]
    return dscores


@triton.jit
def _add_tiles(
    acc, own, inputs, scores, start, stop,
    MASKED: tl.constexpr, FORM: tl.constexpr, TERMS: tl.constexpr, KEY: tl.constexpr = True, QUERY: tl.constexpr = True,
):  # fmt: skip
    """Add the terms of rows [start, stop) to the owned rows, which take part as KEY, as QUERY or as both."""
    BLOCK_I: tl.constexpr = FORM.TAIL if MASKED else FORM.BLOCK
    SHARED: tl.constexpr = TERMS.DERIVED and not MASKED
    length = scores.length
    scale = scores.call.scale * inputs.raised if TERMS.RAISED else scores.call.scale
    factor_j = (shared_factor(own.lse) * scale)[:, None] if SHARED else 0.0
    # A difference and its weight in one multiply-add. It rounds the weighted delta, where a difference that cancels
    # would be exact: by 2^-24, and scores, which magnify it, are not beyond EXTENT here.
    FUSED: tl.constexpr = SHARED and KEY and QUERY and TERMS.PRODUCTS and not (TERMS.HAS_DLSE or FORM.DROPOUT)
    # Of own rows, where registers are left for what is subtracted; wider heads wait for their products anyway.
    FUSED_OWN: tl.constexpr = FUSED and FORM.HEAD_DIM <= 64
    weighted_delta_j = factor_j * own.delta[:, None] if FUSED_OWN else 0.0
    for start_i in range(start, stop, BLOCK_I):
        offs_i = start_i + tl.arange(0, BLOCK_I)
        w_i = load_rows(inputs.w, offs_i, length, MASKED, FORM)  # (BLOCK_I, HEAD_DIM)
        l_i, delta_i, dlse_i = _load_numbers(inputs, offs_i, length, MASKED, SHARED, TERMS)  # (BLOCK_I,) each
        if SHARED and TERMS.RAISED:
            l_i *= inputs.raised
        met = MetRows(length=length, offs=offs_i, w=w_i, lse=l_i, delta=delta_i, dlse=dlse_i)
        scores_ij = signed_products(own.w, w_i, FORM)  # (BLOCK_J, BLOCK_I)
        dscores = tl.zeros_like(scores_ij)
        exps = tl.exp2(scores_ij * (scores.call.qk_scale * LOG2_E)) if SHARED else scores_ij
        if KEY:
            acc, dscores = _key_terms(acc, own, met, inputs, scores_ij, exps, scale, MASKED, FORM, TERMS, SHARED, FUSED)
        if QUERY and TERMS.SCORES:
            dscores = _query_terms(
                dscores,
                own,
                met,
                scores,
                scores_ij,
                scale,
                factor_j,
                weighted_delta_j,
                MASKED,
                FORM,
                TERMS,
                SHARED,
                FUSED_OWN,
            )
        if TERMS.SCORES:
            acc = tile.add_product(acc, (exps * dscores if SHARED else dscores).to(w_i[0].dtype), w_i, FORM)
    return acc


@triton.jit
def walk(acc, own, inputs, scores, extent, start_j, BLOCK_J: tl.constexpr, FORM: tl.constexpr, TERMS: tl.constexpr):
    """Walk over all the rows that owned rows meet, with masks only where they cut."""
    length = scores.length
    # Heads that symmetric.py leaves are rare: they take the masked loops alone.
    MASKED: tl.constexpr = FORM.PADDED or TERMS.SYMMETRIC
    if FORM.CAUSAL:
        # The rows see every place before the first number, and every place from the second on sees them.
        before, after = start_j, tl.minimum(start_j + BLOCK_J, length)
        if TERMS.SYMMETRIC:  # what it leaves comes in blocks that may be shorter than tiles
            before = before // FORM.TAIL * FORM.TAIL
            after = tl.minimum(tl.cdiv(after, FORM.TAIL) * FORM.TAIL, length)
        if FORM.APART:
            before = tl.minimum(tl.maximum(before, 0), length) // FORM.BLOCK * FORM.BLOCK
            after = tl.minimum(tl.cdiv(tl.maximum(after, 0), FORM.BLOCK) * FORM.BLOCK, length)
        whole = after if MASKED else after + (length - after) // FORM.BLOCK * FORM.BLOCK
        if TERMS.SCORES:
            acc = _add_tiles(acc, own, inputs, scores, 0, before, MASKED, FORM, TERMS, KEY=False)
        acc = _add_tiles(acc, own, inputs, scores, before, after, True, FORM, TERMS)
        if not MASKED:
            acc = _add_tiles(acc, own, inputs, scores, after, whole, False, FORM, TERMS, QUERY=False)
        return _add_tiles(acc, own, inputs, scores, whole, length, True, FORM, TERMS, QUERY=False)
    else:
        whole = 0 if MASKED else length // FORM.BLOCK * FORM.BLOCK
        if TERMS.DERIVED:
            # Larger L are rare: they take the masked loop from the start instead of a third one.
            whole = tl.where(extent <= EXTENT, whole, 0)
        if not MASKED:
            acc = _add_tiles(acc, own, inputs, scores, 0, whole, False, FORM, TERMS)
        return _add_tiles(acc, own, inputs, scores, whole, length, True, FORM, TERMS)
