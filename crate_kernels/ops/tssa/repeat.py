"""Repeats the previous step with a cache: the same options and the same cache, and tensors of the same kind.

They were checked then, and a backend chosen: the op is called at once.
"""

from __future__ import annotations

from operator import is_
from typing import Any

import torch
from torch import Tensor

from crate_kernels._core import autograd, operator
from crate_kernels.ops.tssa.cache import RepeatableTSSA, TokenStatsCache
from crate_kernels.ops.tssa.op import tssa_decode

StepInputs = tuple[Tensor, Tensor, Tensor | None]  # tokens, temperature, bias


def remember(inputs: StepInputs, cache: TokenStatsCache, backend: str, options: tuple[Any, ...]) -> None:
    """Note a step without a mask that succeeded, for ``repeat``: the values of a mask are checked each time."""
    cache._last, state = None, cache._tensors()
    if not torch.compiler.is_compiling() and _is_plain(inputs, state):
        cache._last = RepeatableTSSA(options, _kinds((*inputs, *state)), state, backend)


def repeat(
    w: Tensor, temp: Tensor, denom_bias: Tensor | None, cache: TokenStatsCache, options: tuple[Any, ...]
) -> tuple[Tensor, Tensor] | None:
    """Run a step that repeats the previous one; return None, having done nothing, if this one does not."""
    # What torch.compile traces must not depend on what ran before.
    if torch.compiler.is_compiling() or type(cache) is not TokenStatsCache or (last := cache._last) is None:
        return None
    inputs, state = (w, temp, denom_bias), cache._tensors()
    if not (all(map(is_, options, last.options)) and all(map(is_, state, last.state)) and _is_plain(inputs, state)):
        return None
    if _kinds((*inputs, *state)) != last.kinds:
        return None
    if temp.dim() == 2:
        temp = temp.squeeze(1)
    if denom_bias is not None:
        if denom_bias.shape[1] < cache._bound + w.shape[2]:
            return None
        denom_bias = denom_bias.squeeze(2) if denom_bias.dim() == 3 else denom_bias
    results = tssa_decode(w, temp, denom_bias, *state, None, last.backend)
    cache._advance(w.shape[2], ragged=False)
    return results


def _kinds(tensors: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
    return tuple([None if t is None else (t.shape, t.dtype, t.device) for t in tensors])


def _is_plain(inputs: StepInputs, state: Any) -> bool:
    """Return whether nothing but the kernel has to see a step: no mode, no subclass, no derivative."""
    if not operator.is_short((*inputs, *state)) or autograd.needs_grad(*inputs):
        return False
    nested = any([t is not None and t.is_nested for t in inputs])
    return not nested and (not state.energy.is_inference() or torch.is_inference_mode_enabled())
