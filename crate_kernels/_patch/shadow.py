"""Shadows of a module, on which probes run: the same classes and attributes, other tensors, no hooks.

A probe calls no hook of the user, and changes neither the random state nor the module.
"""

from __future__ import annotations

import contextlib
import copy
import io
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

from crate_kernels._core import operator, philox

_ABSENT = object()


def shadow_of(
    module: nn.Module,
    tensor: Callable[[str, Tensor], Tensor],
    training: bool,
    rates: Iterator[float],
    memo: dict[int, nn.Module] | None = None,
) -> nn.Module:
    """Copy a module with its attributes: each tensor is ``tensor`` of the old one, each dropout has the next rate."""
    memo = {} if memo is None else memo
    if id(module) in memo:
        return memo[id(module)]
    shadow = memo[id(module)] = object.__new__(type(module))
    state = vars(shadow)
    for name, value in vars(module).items():
        value = copy.copy(value) if isinstance(value, (dict, list, set)) else value
        state[name] = tensor(name, value) if isinstance(value, Tensor) else value
    for group in ("_parameters", "_buffers"):
        state[group] = {name: None if t is None else tensor(name, t) for name, t in state[group].items()}
    children = state["_modules"].items()
    state["_modules"] = {n: None if c is None else shadow_of(c, tensor, training, rates, memo) for n, c in children}
    state["training"] = training
    if isinstance(module, _DropoutNd):
        state["p"] = next(rates)
    # Module.compile sets this attribute. A call then goes there directly and skips global hooks too.
    state["_compiled_call_impl"] = shadow.forward
    return shadow


def same_state(a: nn.Module, b: nn.Module, seen: set[int] | None = None) -> bool:
    """Say if two shadows of one module have equal attributes and buffers."""
    seen = set() if seen is None else seen
    if id(a) in seen:
        return True
    seen.add(id(a))
    left, right = vars(a), vars(b)
    ours = {"_parameters", "_modules", "_compiled_call_impl"}  # shared; compared below; differs per shadow
    names = (left.keys() | right.keys()) - ours
    if not all(_equal(left.get(name, _ABSENT), right.get(name, _ABSENT)) for name in names):
        return False
    return left["_modules"].keys() == right["_modules"].keys() and all(
        child is None or same_state(child, right["_modules"][name], seen) for name, child in left["_modules"].items()
    )


def _equal(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, equal_nan=True)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_equal, a, b))
    return bool(a == b)


class KnownMasks(TorchFunctionMode):
    """Draw every dropout mask as the reference operators do: from one seed and the position."""

    def __init__(self) -> None:
        super().__init__()
        torch.default_generator.manual_seed(0)  # also done before each probe: the operator's first draw is this seed
        self.seed = operator.draw_seed(torch.device("cpu"))

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is F.dropout or func is torch.dropout:
            return self._dropout(*args, **(kwargs or {}))
        if func is F.scaled_dot_product_attention and (kwargs or {}).get("dropout_p"):
            return self._attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0.0:
            return input
        *leading, rows, columns = input.shape
        heads = torch.arange(math.prod(leading)).reshape(*leading, 1, 1)
        factor = philox.keep_factor(
            self.seed, p, heads, torch.arange(rows)[:, None], torch.arange(columns), input.dtype
        )
        return input * factor

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
    ) -> Tensor:
        """Compute F.scaled_dot_product_attention as documented, with the known dropout mask."""
        scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -math.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        return self._dropout(scores.softmax(-1), dropout_p) @ value


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide what a published forward prints or warns of during a probe."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
