"""Repeats the previous step with a cache: the same options and the same cache, and tokens of the same kind.

They were checked then, and a kernel chosen. Where few tokens are cached, checks and choice take longer than the kernel.
"""

from __future__ import annotations

from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from crate_kernels._core import backends, operator
from crate_kernels.ops.mssa.cache import RepeatableMSSA, SubspaceCache
from crate_kernels.ops.mssa.call import DecodeCall
from crate_kernels.ops.mssa.op import choose_decode, decode


def remember(w: Tensor, cache: SubspaceCache, call: DecodeCall, backend: str, options: tuple[Any, ...]) -> None:
    """Note a step that succeeded, for ``repeat``. One with a mask is not noted: its values are checked each time."""
    cache._last = None
    if call.key_padding_mask is None and cache.lengths.is_contiguous() and _is_plain(w, cache):
        kernel = choose_decode(backend, w, cache.data, cache.lengths, call)
        kind, stored = (w.shape, w.dtype, w.device), (cache.data, cache.lengths, _sizes(cache), cache.max_seqlen)
        cache._last = RepeatableMSSA(options, kind, *stored, call.scale, call.need_lse, backend, kernel)


def repeat(w: Tensor, cache: SubspaceCache, options: tuple[Any, ...]) -> Tensor | tuple[Tensor, Tensor] | None:
    """Run a step that repeats the previous one; return None, having done nothing, if this one does not."""
    # What torch.compile traces must not depend on what ran before.
    if torch.compiler.is_compiling() or type(cache) is not SubspaceCache or (last := cache._last) is None:
        return None
    data, lengths, bound = cache.data, cache.lengths, cache._bound
    if not (all(map(is_, options, last.options)) and data is last.data and lengths is last.lengths):
        return None
    if not _is_plain(w, cache) or (w.shape, w.dtype, w.device) != last.kind or bound + w.shape[2] > last.capacity:
        return None
    if _sizes(cache) != last.sizes:
        return None
    call = DecodeCall(None, bound, cache._uniform, last.scale, last.need_lse)
    try:
        if w.is_cuda:
            out, lse = decode(w, data, lengths, call, last.backend)
        else:
            with operator.without_autocast(w):
                out, lse = backends.attempt("mssa", "decode", *last.kernel, w, data, lengths, call)
            torch.autograd.graph.increment_version((data, lengths))
    except backends.Refused:
        return None
    cache._advance(w.shape[2], ragged=False)
    return (out, lse) if last.need_lse else out


def _sizes(cache: SubspaceCache) -> tuple[Any, ...]:
    data, lengths = cache.data, cache.lengths
    return data.shape, data.dtype, lengths.shape, lengths.dtype


def _is_plain(w: object, cache: SubspaceCache) -> bool:
    """Return whether nothing but the kernel has to see a step: no mode, no subclass, no derivative."""
    return (
        type(w) is Tensor
        and not w.is_nested
        and operator.nothing_intercepts((w, cache.data, cache.lengths))
        and forward_ad._current_level < 0
        and (not cache.data.is_inference() or torch.is_inference_mode_enabled())
    )
