"""What ``torch.func.vmap`` makes of an op: one call where the mapped dimension may join the batch, else a loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# (op, size of the mapped dimension, which arguments have it, arguments with it in front) to (results, their mapped
# dimensions), or to None where one call cannot compute them.
Join = Callable[[Callable, int, tuple[bool, ...], tuple], "tuple[Any, Any] | None"]


def rule(op: Callable, join: Join | None) -> Callable:
    """Return the batching rule of an op that changes no argument, as ``torch.library.register_vmap`` takes it."""

    def map_over(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        mapped = tuple(dim is not None for dim in in_dims)
        args = tuple(a if dim is None else a.movedim(dim, 0) for a, dim in zip(args, in_dims, strict=True))
        found = None if join is None else join(op, info.batch_size, mapped, args)
        return _loop(op, info.batch_size, mapped, args) if found is None else found

    return map_over


def _loop(op: Callable, size: int, mapped: tuple[bool, ...], args: tuple) -> tuple[Any, Any]:
    """Call the op on each element; where there is none, on zeros, for the shapes of what it returns."""

    def on(index: int) -> Any:
        return op(*(_element(a, index) if m else a for a, m in zip(args, mapped, strict=True)))

    each = [on(index) for index in range(max(size, 1))]
    if isinstance(each[0], Tensor):
        return torch.stack(each)[:size], 0
    return tuple(torch.stack(parts)[:size] for parts in zip(*each, strict=True)), (0,) * len(each[0])


def _element(t: Tensor, index: int) -> Tensor:
    return t[index] if len(t) else t.new_zeros(t.shape[1:])


def batched(record: Any, shared: tuple[int, ...] = ()) -> Join:
    """Return how to call an op once whose tensors and results all have a batch but those in the places ``shared``.

    Packed sequences are called one sample after another, since rows between two samples may belong to no sequence; so
    are calls with dropout, whose masks depend on the place in the batch.
    """
    count = len(record._fields)

    def join(op: Callable, size: int, mapped: tuple[bool, ...], args: tuple) -> tuple[Any, Any] | None:
        options = record._make(args[-count - 1 : -1])
        if options.cu_seqlens is not None or options.seed is not None or any(mapped[place] for place in shared):
            return None

        def joined(place: int, t: Any) -> Any:
            if place in shared or not isinstance(t, Tensor):
                return t
            return (t if mapped[place] else t.expand(size, *t.shape)).flatten(0, 1)

        batch = next(a.shape[1] for a, m in zip(args, mapped, strict=True) if m)
        results = op(*(joined(place, a) for place, a in enumerate(args)))
        if isinstance(results, Tensor):
            return results.unflatten(0, (size, batch)), 0
        return tuple(r.unflatten(0, (size, batch)) for r in results), (0,) * len(results)

    return join
