"""The public function of token-statistics attention: validation and choice of backend."""

from __future__ import annotations

from typing import Any, Literal, NoReturn, overload

import torch
from torch import Tensor

from crate_kernels._core import backends, checks, measured, operator
from crate_kernels._core.shortcuts import may_repeat
from crate_kernels.ops.tssa import op, reference
from crate_kernels.ops.tssa.cache import TokenStatsCache
from crate_kernels.ops.tssa.call import TSSACall
from crate_kernels.ops.tssa.repeat import remember, repeat

_LAYOUT = "(batch, nheads, seqlen, head_dim)"
_PACKED_LAYOUT = "(total, nheads, head_dim) with cu_seqlens"


@overload
def tssa(
    w: Tensor,
    temp: Tensor,
    *,
    causal: bool = ...,
    denom_bias: Tensor | None = ...,
    dropout_p: float = ...,
    key_padding_mask: Tensor | None = ...,
    cu_seqlens: Tensor | None = ...,
    max_seqlen: int | None = ...,
    cache: TokenStatsCache | None = ...,
    return_membership: Literal[False] = False,
    backend: str | None = ...,
) -> Tensor: ...
@overload
def tssa(
    w: Tensor,
    temp: Tensor,
    *,
    causal: bool = ...,
    denom_bias: Tensor | None = ...,
    dropout_p: float = ...,
    key_padding_mask: Tensor | None = ...,
    cu_seqlens: Tensor | None = ...,
    max_seqlen: int | None = ...,
    cache: TokenStatsCache | None = ...,
    return_membership: Literal[True],
    backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...
@checks.closed
def tssa(
    w: Tensor,
    temp: Tensor,
    *,
    causal: bool = False,
    denom_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    key_padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    cache: TokenStatsCache | None = None,
    return_membership: bool = False,
    backend: str | None = None,
    **unknown: NoReturn,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend through second moments, in time linear in the sequence.

    With ``c_hd = max(sum_n w^2, 1e-24)``: ``Pi = softmax over heads of temp_h sum_d w^2 / c``, ``M = sum_n Pi w^2 /
    (sum_n Pi + 1e-8)`` and ``out = -w Pi / (1 + M)``: ToST (Wu et al., 2025). ``causal=True`` is ToST's
    language form, another function: running sums, a floor of 1e-12, and ``denom_bias`` added to each ``w^2 / c``.
    Differentiable once on every backend, in any order on ``backend="reference"``.

    Args:
        w: projected tokens, (batch, nheads, seqlen, head_dim) with any strides, or packed (total, nheads, head_dim)
            with ``cu_seqlens``; floating.
        temp: temperature of each head, (nheads,) or (nheads, 1); w's dtype, or float32 beside half.
        causal: the causal form; False by default.
        denom_bias: (nheads, >= seqlen) or (nheads, >= seqlen, 1), causal only, none by default; dtype as ``temp``. The
            gradient beyond the sequence is 0.
        dropout_p: probability in [0, 1) with which 1 / (1 + M) is dropped, by channel (causal: by element),
            0 by default. The seed comes from torch's generator of w's device.
        key_padding_mask: (batch, seqlen) bool, True = keep, on w's device; all tokens by default. The sums leave out
            padded tokens, which still get an output: their values must be finite. Where every token is padded, output,
            membership and gradient are 0.
        cu_seqlens: (sequences + 1,) int32 on w's device, offsets of packed sequences, which rise within 0 to total;
            None (the default) for a batch. Rows of no sequence get 0. Its values are checked on the CPU only.
        max_seqlen: length of the longest packed sequence; required with ``cu_seqlens``.
        cache: running sums to continue, none by default; needs ``causal=True``; inference only. With
            ``key_padding_mask``, right-padded, the lengths advance by its row sums, and padded tokens count as zeros.
        return_membership: also return Pi; False by default.
        backend: None (the default) takes the best available one; a name is obeyed or refused.

    Returns:
        ``out`` in w's shape and dtype, laid out so that ``out.transpose(1, 2).flatten(2)`` is a view; or
        ``(out, membership)`` with the differentiable Pi, (batch, nheads, seqlen) or (nheads, total), in float32
        (float64 for float64 ``w``). Do not change an input or Pi in place before the backward, which reads them and
        then raises an error; ``out`` may be changed.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: a shape, dtype or value that does not fit.
        RuntimeError: the requested backend is unavailable.
        NotImplementedError: forward-mode AD, double backward or a dtype that the backend does not have.
    """
    if unknown:
        checks.no_keyword(tssa, unknown)
    key = fastest = seed = step = None
    if cache is not None:
        if key_padding_mask is None:
            step = causal, dropout_p, cu_seqlens, max_seqlen, return_membership, backend
            if (found := repeat(w, temp, denom_bias, cache, step)) is not None:
                return found if return_membership else found[0]
    else:
        options = causal, dropout_p, max_seqlen, return_membership, backend, denom_bias is None
        key = _key(w, options, key_padding_mask, cu_seqlens)
        if key is not None and backend is None and measured.table(w):
            plain = key_padding_mask is None and cu_seqlens is None and return_membership is False and not dropout_p
            fastest = _fastest(w, temp, denom_bias, causal) if plain else None
            key = (*key, fastest)
        if key is not None:
            known = op.causal_shortcuts if causal is True else op.shortcuts
            seed = known.draw_seed(key, w) if dropout_p else None
            if (found := _repeat(key, w, temp, denom_bias, (key_padding_mask, cu_seqlens, seed))) is not None:
                return found
    inputs = w, temp, denom_bias  # as they were passed
    packed = cu_seqlens is not None
    checks.tensor("tssa", "w", w, 3 if packed else 4, _PACKED_LAYOUT if packed else _LAYOUT)
    checks.flag("tssa", "causal", causal)
    checks.flag("tssa", "return_membership", return_membership)
    nheads = w.shape[1]
    temp = per_head("temp", temp, w, nheads)
    dropout_p = checks.number("tssa", "dropout_p", dropout_p, minimum=0.0, below=1.0)
    if packed:
        if key_padding_mask is not None:
            raise ValueError("tssa: key_padding_mask must be None with cu_seqlens")
        max_seqlen = checks.packing("tssa", cu_seqlens, max_seqlen, w)
    elif max_seqlen is not None:
        raise ValueError("tssa: max_seqlen must be None without cu_seqlens")
    elif key_padding_mask is not None:
        checks.padding_mask("tssa", key_padding_mask, w)
    if cache is not None:
        _check_cache(w, temp, denom_bias, cache, causal, dropout_p, packed, key_padding_mask)
        cache = cache if w.shape[2] > 0 else None  # no token: the result is as empty without it
    if denom_bias is not None:
        if not causal:
            raise ValueError("tssa: denom_bias must be None with causal=False")
        seqlen = max_seqlen if packed else w.shape[2] + (cache._bound if cache is not None else 0)
        denom_bias = _denom_bias(denom_bias, w, nheads, seqlen, cut=cache is None)  # pyright: ignore
    name = backends.resolve("tssa", backend, w.device, w.dtype)
    named = backends.to_op_arg(name, backend, fastest)
    if name != "reference":
        checks.transforms("tssa", name, w, temp, denom_bias)
    if cache is not None:
        if key_padding_mask is not None:
            # Padded tokens times 0 enter the sums, which NaN and infinity would corrupt for good.
            w = w.masked_fill(~key_padding_mask[:, None, :, None], 0.0)
        state = cache._tensors()
        if name == "reference":
            with operator.without_autocast(w):
                out, membership = reference.decode(w, temp, denom_bias, state, key_padding_mask)
            membership = membership.to(operator.stat_dtype(w.dtype))
        else:
            out, membership = op.tssa_decode(w, temp, denom_bias, *state, key_padding_mask, named)
            if step is not None:
                remember(inputs, cache, named, step)
        cache._advance(w.shape[2], ragged=key_padding_mask is not None)
        return (out, membership) if return_membership else out

    if seed is None and dropout_p:
        seed = operator.draw_seed(w.device)
    call = TSSACall(key_padding_mask, cu_seqlens, max_seqlen or 0, seed, dropout_p)
    if name == "reference":
        with operator.without_autocast(w):
            if causal:
                out, membership = reference.forward_causal(w, temp, denom_bias, call)
            else:
                out, membership = reference.forward(w, temp, call)
        out, membership = out.to(w.dtype), membership.to(operator.stat_dtype(w.dtype))
    else:
        if causal:
            out, membership = op.tssa_causal(w, temp, denom_bias, call, named)
        else:
            out, membership = op.tssa(w, temp, call, named)
        if key is not None:
            known, tensors, tracked = op.shortcuts, (w, temp), call
            if causal:
                known, tensors = op.causal_shortcuts, (w, temp, denom_bias)
                tracked = op.saving_sums(*tensors, call, named)
            known.remember(key, tensors, call, named, 2 if return_membership else 1, tracked=tracked)
    return (out, membership) if return_membership else out


def _key(w: Tensor, options: tuple, mask: Tensor | None, packed: Tensor | None) -> tuple | None:
    """Return the key of calls that are checked alike; None where values are checked each time."""
    _, dropout_p, *_ = options
    if not may_repeat(w, dropout_p, packed):
        return None
    plain = (*options, mask is None, packed is None)
    return (*plain, *map(type, plain))  # types, for True is 1


def _repeat(key: tuple, w: Tensor, temp: Tensor, denom_bias: Tensor | None, options: tuple) -> Any:
    """Repeat a call that was checked before; None if there is none."""
    causal, _, max_seqlen, *_ = key
    _, packed, _ = options
    if not (isinstance(causal, bool) and isinstance(temp, Tensor)):
        return None
    if type(max_seqlen) is not (type(None) if packed is None else int):
        return None
    if w.dim() != (4 if packed is None else 3):
        return None
    if temp.dim() == 2:
        if temp.is_nested or temp.shape[1] != 1:  # a nested one has no shape
            return None
        temp = temp.squeeze(1)  # for as many heads as w has, there is a plan
    if not causal:
        return None if denom_bias is not None else op.shortcuts.repeat(key, w, temp, *options)
    if denom_bias is not None:
        seqlen = w.shape[2] if max_seqlen is None else max_seqlen
        denom_bias = _denom_bias(denom_bias, w, w.shape[1], seqlen, cut=True)
    return op.causal_shortcuts.repeat(key, w, temp, denom_bias, *options)


def _fastest(w: Tensor, temp: Tensor, denom_bias: Tensor | None, causal: bool) -> str | None:
    """Return the backend that was measured to be the fastest for a call without masks; None for the usual one."""
    if type(causal) is not bool or w.dim() != 4 or not isinstance(temp, Tensor):
        return None
    inputs = (w, temp, denom_bias if isinstance(denom_bias, Tensor) else None)
    return measured.fastest("tssa", (w.shape[-1],), w.shape[-2], causal, inputs)


def per_head(name: str, value: Tensor, w: Tensor, nheads: int) -> Tensor:
    """Require (nheads,) or (nheads, 1), on w's device, in w's dtype or float32; return (nheads,)."""
    checks.tensor("tssa", name, value, None, "(nheads,)")
    # In parts: torch.compile takes no tuple of sizes, some of which it does not know, to be in another.
    if value.dim() not in (1, 2) or value.shape[0] != nheads or value.shape[1:].numel() != 1:
        raise ValueError(f"tssa: {name} must be (nheads,) = ({nheads},), got {tuple(value.shape)}")
    check_parameter(name, value, w)
    return value if value.dim() == 1 else value.reshape(nheads)


def check_parameter(name: str, value: Tensor, w: Tensor) -> None:
    """Require w's device, and its dtype or float32."""
    checks.same_device("tssa", name, value, w)
    if value.dtype not in (w.dtype, torch.float32):
        raise ValueError(f"tssa: {name} must be {w.dtype} as w, or float32, got {value.dtype}")


def _denom_bias(value: Tensor, w: Tensor, nheads: int, seqlen: int, cut: bool) -> Tensor:
    """Require (nheads, >= seqlen[, 1]); return (nheads, seqlen), or all of it for decoding."""
    checks.tensor("tssa", "denom_bias", value, None, "(nheads, >= seqlen)")
    if value.dim() == 3 and value.shape[2] == 1:
        value = value.squeeze(2)
    if value.dim() != 2 or value.shape[0] != nheads:
        raise ValueError(
            f"tssa: denom_bias must be (nheads, >= seqlen[, 1]) = ({nheads}, >= {seqlen}), got {tuple(value.shape)}"
        )
    if value.shape[1] < seqlen:
        raise ValueError(f"tssa: denom_bias must cover the sequence, (nheads, >= {seqlen}), got {tuple(value.shape)}")
    check_parameter("denom_bias", value, w)
    return value[:, :seqlen] if cut else value


def _check_cache(
    w: Tensor,
    temp: Tensor,
    denom_bias: Tensor | None,
    cache: TokenStatsCache,
    causal: bool,
    dropout_p: float,
    packed: bool,
    key_padding_mask: Tensor | None,
) -> None:
    """Refuse arguments that decoding does not have, before anything is written."""
    if not isinstance(cache, TokenStatsCache):
        raise TypeError(f"tssa: cache must be a TokenStatsCache, got {type(cache).__name__}")
    if not causal:
        raise ValueError("tssa: causal must be True with a cache, got False")
    if packed:
        raise ValueError("tssa: cu_seqlens must be None with a cache; pad w and give key_padding_mask")
    if dropout_p:
        raise ValueError(f"tssa: dropout_p must be 0 with a cache, got {dropout_p}")
    checks.inference_only("tssa", w=w, temp=temp, denom_bias=denom_bias)
    checks.writable("tssa", cache.energy)
    checks.cache_matches("tssa", w, cache.energy.shape, cache.energy.device, None)
    if cache.energy.dtype not in (torch.float64, operator.stat_dtype(w.dtype)):
        wanted = "torch.float64" if w.dtype == torch.float64 else "torch.float64 or torch.float32"
        raise ValueError(f"tssa: cache must be {wanted} for {w.dtype} tokens, got {cache.energy.dtype}")
    if key_padding_mask is not None:
        checks.right_padded("tssa", key_padding_mask)
