"""The public function of subspace self-attention: validation and choice of backend."""

from __future__ import annotations

from typing import Literal, NoReturn, overload

import torch
from torch import Tensor

from crate_kernels._core import backends, checks, measured, op_checks, operator
from crate_kernels._core.shortcuts import may_repeat
from crate_kernels.ops.mssa import composite, op, order, reference
from crate_kernels.ops.mssa.cache import SubspaceCache
from crate_kernels.ops.mssa.call import DecodeCall, MSSACall, default_scale
from crate_kernels.ops.mssa.repeat import remember, repeat

_PHI = ("softmax", "threshold", "relu", "identity")
_PLAIN_PHI = ("relu", "identity")
_CPP_THRESHOLD_HEAD_DIM = 64
_MAX_HEAD_DIM = 256  # the kernels hold tiles of a head on chip
_CAST = (torch.float32, torch.float16, torch.bfloat16)
_LAYOUT = "(batch, nheads, seqlen, head_dim)"
_PACKED_LAYOUT = "(total, nheads, head_dim) with cu_seqlens"


@overload
def mssa(
    w: Tensor,
    *,
    causal: bool = ...,
    scale: float | None = ...,
    dropout_p: float = ...,
    phi: str = ...,
    threshold: float | None = ...,
    key_padding_mask: Tensor | None = ...,
    cu_seqlens: Tensor | None = ...,
    max_seqlen: int | None = ...,
    cache: SubspaceCache | None = ...,
    return_lse: Literal[False] = False,
    backend: str | None = ...,
) -> Tensor: ...
@overload
def mssa(
    w: Tensor,
    *,
    causal: bool = ...,
    scale: float | None = ...,
    dropout_p: float = ...,
    phi: str = ...,
    threshold: float | None = ...,
    key_padding_mask: Tensor | None = ...,
    cu_seqlens: Tensor | None = ...,
    max_seqlen: int | None = ...,
    cache: SubspaceCache | None = ...,
    return_lse: Literal[True],
    backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...
@checks.closed
def mssa(
    w: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    phi: str = "softmax",
    threshold: float | None = None,
    key_padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    cache: SubspaceCache | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    **unknown: NoReturn,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend with one projection as query, key and value.

    For each head, ``out = phi(softmax(scale * w w^T)) w`` over the allowed keys: multi-head subspace
    self-attention, CRATE (Yu et al., 2023) Eq. 11-12. Differentiable once on every backend, in any
    order on ``backend="reference"``.

    Args:
        w: projected tokens, (batch, nheads, seqlen, head_dim) with any strides, or packed
            (total, nheads, head_dim) with ``cu_seqlens``; floating.
        causal: each token attends to itself and earlier ones only; False by default.
        scale: factor of the scores, a number; head_dim ** -0.5 by default.
        dropout_p: probability in [0, 1) with which an attention weight is dropped, 0 by default. The
            seed comes from torch's generator of w's device.
        phi: what becomes of the probabilities: "softmax" (the default) keeps them; "threshold" replaces
            those above ``threshold`` by it and the others by 0 (AoT, Theorem 3.1); "relu" and "identity" use
            ReLU of the scores and the scores themselves, without a softmax.
        threshold: a number of at least 0; required with phi="threshold" and refused otherwise.
        key_padding_mask: (batch, seqlen) bool, True = keep, on w's device; all keys by default. It removes keys
            only: padded queries still attend, so their values must be finite. A query without any key gives 0,
            gradient 0 and lse -inf.
        cu_seqlens: (sequences + 1,) int32 on w's device, offsets of packed sequences, which rise within 0 to total;
            None (the default) for a batch. Rows of no sequence get 0. Its values are checked on the CPU only.
        max_seqlen: length of the longest packed sequence; required with ``cu_seqlens``.
        cache: append ``w`` to it and attend over everything cached so far; none by default. Needs
            ``causal=True`` and phi="softmax"; inference only. With ``key_padding_mask``, right-padded, the
            lengths advance by its row sums.
        return_lse: also return the logsumexp of the scores; False by default.
        backend: None (the default) takes the best available one; a name is obeyed or refused.

    Returns:
        ``out`` in w's shape and dtype, laid out so that ``out.transpose(1, 2).flatten(2)`` is a view; or
        ``(out, lse)`` with the differentiable natural-log lse, scale included, (batch, nheads, seqlen) or
        (nheads, total), in float32 (float64 for float64 ``w``). Under autocast ``w`` is cast as
        ``F.scaled_dot_product_attention`` casts it. Do not change ``w``, ``out`` or lse in place before the
        backward, which reads them and then raises an error; write ``out = out + x``.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: a shape, dtype or value that does not fit, or a full cache.
        RuntimeError: the requested backend is unavailable.
        NotImplementedError: forward-mode AD, double backward or a dtype or phi that the backend does not
            have.
    """
    if unknown:
        checks.no_keyword(mssa, unknown)
    options = causal, scale, dropout_p, phi, threshold, key_padding_mask, cu_seqlens, max_seqlen, return_lse, backend
    seed = None
    if cache is not None:
        if operator.autocast_is_on() and may_repeat(w):
            w = _cast_by_autocast(w)
        if (result := repeat(w, cache, options)) is not None:
            return result
        key, fastest = None, None
    else:
        key = _key(w, options)
        if key is not None and operator.autocast_is_on():
            w = _cast_by_autocast(w)
        fastest = None if key is None or backend is not None or not measured.table(w) else _fastest(w, options)
        if fastest is not None:
            key = None if fastest == "composite" else (*key, fastest)  # pyright: ignore
        if key is not None:
            seed = op.shortcuts.draw_seed(key, w) if dropout_p else None
            if (found := op.shortcuts.repeat(key, w, key_padding_mask, cu_seqlens, seed)) is not None:
                return found
    packed = cu_seqlens is not None
    checks.tensor("mssa", "w", w, 3 if packed else 4, _PACKED_LAYOUT if packed else _LAYOUT)
    checks.flag("mssa", "causal", causal)
    checks.flag("mssa", "return_lse", return_lse)
    factor = default_scale(w) if scale is None else checks.number("mssa", "scale", scale)
    dropout_p = checks.number("mssa", "dropout_p", dropout_p, minimum=0.0, below=1.0)
    if not isinstance(phi, str) or phi not in _PHI:
        raise ValueError(f"mssa: phi must be one of {', '.join(_PHI)}, got {phi!r}")
    if phi == "threshold":
        if threshold is None:
            raise ValueError("mssa: threshold must be given with phi='threshold', got None")
        threshold = checks.number("mssa", "threshold", threshold, minimum=0.0)
    elif threshold is not None:
        raise ValueError(f"mssa: threshold must be None with phi={phi!r}, got {threshold!r}")
    if return_lse and phi in _PLAIN_PHI:
        raise ValueError(f"mssa: return_lse must be False with phi={phi!r}, which has no softmax")
    if packed:
        if key_padding_mask is not None:
            raise ValueError("mssa: key_padding_mask must be None with cu_seqlens")
        max_seqlen = checks.packing("mssa", cu_seqlens, max_seqlen, w)
    elif max_seqlen is not None:
        raise ValueError("mssa: max_seqlen must be None without cu_seqlens")
    elif key_padding_mask is not None:
        checks.padding_mask("mssa", key_padding_mask, w)
    w = _cast_by_autocast(w)
    name = "composite" if fastest == "composite" else _choose_backend(w, phi, backend)
    if name != "reference":
        checks.transforms("mssa", name, w)
    if cache is not None:
        _check_cache(w, cache, causal, dropout_p, phi, packed, key_padding_mask)
        # Without a token there is nothing to append, and the plain call returns the same empty result.
        if w.shape[2] > 0:
            step = DecodeCall(key_padding_mask, cache._bound, cache._uniform, factor, return_lse)
            named = backends.to_op_arg(name, backend)
            result = _decode(w, cache, step, named)
            if name != "reference":
                remember(w, cache, step, named, options)
            return result

    # PyTorch's own attention draws from the generator itself.
    if seed is None and dropout_p and name != "composite":
        seed = operator.draw_seed(w.device)
    if scale is None and name != "reference" and torch.compiler.is_compiling():
        factor = None
    call = MSSACall(key_padding_mask, cu_seqlens, max_seqlen or 0, seed, causal, factor, dropout_p, threshold)  # pyright: ignore
    plain = phi if phi in _PLAIN_PHI else None
    if name == "composite":
        out, lse = composite.mssa(w, call, plain, return_lse)
    elif name == "reference":
        out, lse = reference.forward(w, call, plain)
        lse = lse.float() if lse.dtype in (torch.float16, torch.bfloat16) else lse
    else:
        named = backends.to_op_arg(name, backend, fastest)
        out, lse = op.mssa(w, call, named)
        if key is not None:
            op.shortcuts.remember(key, (w,), call, named, results=2 if return_lse else 1)
    return (out, lse) if return_lse else out  # pyright: ignore[reportReturnType]


def _key(w: Tensor, options: tuple) -> tuple | None:
    """Return the key of calls that are checked alike; None where values are checked each time."""
    causal, scale, dropout_p, phi, threshold, mask, cu_seqlens, max_seqlen, return_lse, backend = options
    if not (may_repeat(w, dropout_p, cu_seqlens) and type(causal) is type(return_lse) is bool):
        return None
    # The default of scale depends on head_dim.
    key = (w.shape[-1], causal, phi, mask is None, cu_seqlens is None, return_lse, backend)
    if scale is threshold is max_seqlen is None and not dropout_p:
        return key
    numbers = scale, threshold, max_seqlen, dropout_p
    # A seed is drawn before the backend is known, and composite's dropout draws by itself: what is repeated has the
    # backend of its key.
    of_backend = (w.dtype, w.device) if dropout_p else ()
    return (*key, *numbers, *map(type, numbers), *of_backend)  # types, for True is 1 and is no scale


def _fastest(w: Tensor, options: tuple) -> str | None:
    """Return the backend that was measured to be the fastest for these options; None for the usual one."""
    causal, _, dropout_p, phi, threshold, mask, cu_seqlens, _, return_lse, _ = options
    timed = type(causal) is bool and type(phi) is str and phi == "softmax" and return_lse is False
    others = dropout_p or [option for option in (threshold, mask, cu_seqlens) if option is not None]
    return order.fastest(w, causal) if timed and not others and w.dim() == 4 else None


def _cast_by_autocast(w: Tensor) -> Tensor:
    """Cast to the autocast dtype, as PyTorch does for its own attention: all but float64. What may be no w stays."""
    dtype = operator.autocast_dtype(w)
    if dtype in (None, w.dtype) or w.dtype not in _CAST:
        return w
    op_checks.in_memory("mssa", "w", w)
    return w.to(dtype)


def _choose_backend(w: Tensor, phi: str, requested: str | None) -> str:
    """Resolve the backend; None is composite for the calls that kernels do not have."""
    name = backends.resolve("mssa", requested, w.device, w.dtype)
    if name in ("reference", "composite"):
        return name
    lacking = f"phi={phi!r}" if phi in _PLAIN_PHI else None
    if not 1 <= w.shape[-1] <= _MAX_HEAD_DIM:
        lacking = f"head_dim > {_MAX_HEAD_DIM}, got {w.shape[-1]}" if w.shape[-1] else "head_dim = 0"
    if lacking is None:
        # The thresholded kernels compute every score twice: composite takes 0.8-1.0 of their time in wide heads.
        slow = phi == "threshold" and w.shape[-1] > _CPP_THRESHOLD_HEAD_DIM and name == "cpp" and w.device.type == "cpu"
        return "composite" if slow and requested is None else name
    if requested is not None:
        raise NotImplementedError(f"mssa: backend={name!r} does not have {lacking}; use backend='composite'")
    return "composite"


def _check_cache(
    w: Tensor,
    cache: SubspaceCache,
    causal: bool,
    dropout_p: float,
    phi: str,
    packed: bool,
    key_padding_mask: Tensor | None,
) -> None:
    """Refuse arguments that decoding does not have, before anything is written."""
    if not isinstance(cache, SubspaceCache):
        raise TypeError(f"mssa: cache must be a SubspaceCache, got {type(cache).__name__}")
    if not causal:
        raise ValueError("mssa: causal must be True with a cache, got False")
    if packed:
        raise ValueError("mssa: cu_seqlens must be None with a cache; pad w and give key_padding_mask")
    if dropout_p:
        raise ValueError(f"mssa: dropout_p must be 0 with a cache, got {dropout_p}")
    if phi != "softmax":
        raise ValueError(f"mssa: phi must be 'softmax' with a cache, got {phi!r}")
    checks.inference_only("mssa", w=w)
    checks.writable("mssa", cache.data)
    cache._check_space(w)
    if key_padding_mask is not None:
        checks.right_padded("mssa", key_padding_mask)


def _decode(w: Tensor, cache: SubspaceCache, call: DecodeCall, name: str) -> Tensor | tuple[Tensor, Tensor]:
    """Append to the cache and attend over it."""
    if name == "reference":
        out, lse = reference.decode(w, cache.data, cache.lengths, call)
        lse = lse.to(operator.stat_dtype(w.dtype))
    else:
        out, lse = op.decode(w, cache.data, cache.lengths, call, name)
    cache._advance(w.shape[2], ragged=call.key_padding_mask is not None)
    return (out, lse) if call.need_lse else out
