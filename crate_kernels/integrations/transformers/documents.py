"""Documents that follow each other in one row, without padding, as calls of transformers describe them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from crate_kernels._core import packing

NAMES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "position_ids")
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


class Documents(NamedTuple):
    """Documents of one row.

    Attributes:
        cu_seqlens: (documents + 1,) int32, their offsets.
        max_seqlen: length of the longest.
        positions: (tokens,) int64, the place of each token in its document.
    """

    cu_seqlens: Tensor
    max_seqlen: int
    positions: Tensor


def take(
    owner: str, arguments: dict[str, Any], x: Tensor, mask: Tensor | None, seen: int | Tensor, cached: bool
) -> Documents | None:
    """Return the documents that arguments of a call describe; None if every row is one document.

    All arguments must agree with each other, and ``position_ids`` with what the model computes. That
    reads their values, as transformers does for its own models.

    Args:
        owner: model to name in errors.
        arguments: those of the call whose names are in ``NAMES``.
        x: (batch, new, n_embd) tokens.
        mask: (batch, past + new), 0 for padding; None for none.
        seen: number of cached tokens of each row: one for all, or (batch,).
        cached: a cache is passed, or asked for.
    """
    values = {name: arguments[name] for name in NAMES if arguments.get(name) is not None}
    for name, value in values.items():
        if not name.startswith("max_length"):
            _check(owner, name, value)
    positions: Any = values.get("position_ids")
    alone = values.keys() == {"position_ids"}
    if not values or (alone and _counted(positions, x, mask, seen)):
        return None
    name = next(iter(values))
    beside = _beside(x, mask, cached)
    if beside is not None:
        if alone:
            raise NotImplementedError(
                f"{owner}: position_ids must be those of attention_mask and the cache, which the model counts by itself"
            )
        raise ValueError(f"{owner}: {beside} beside {name}, which describes the documents of one row")
    places_of = [name for name in values if not name.startswith("max_length")]
    found = {each: _offsets(owner, each, values[each].to(x.device), x.shape[1]) for each in places_of}
    if not found:
        raise ValueError(f"{owner}: {name} needs cu_seq_lens_q, which says where documents start")
    first, *others = found
    for other in others:
        if not torch.equal(found[first], found[other]):
            raise ValueError(f"{owner}: {other} must describe the documents of {first}, got others")
    offsets = found[first]
    longest = int(offsets.diff().max())
    for each in ("max_length_q", "max_length_k"):
        if values.get(each, longest) < longest:
            raise ValueError(f"{owner}: {each} must be at least the longest document = {longest}, got {values[each]}")
    places = packing.layout(offsets, longest, x.shape[1]).position
    if positions is not None and not torch.equal(positions[0].to(x.device), places):
        raise NotImplementedError(f"{owner}: position_ids must count the tokens of each document from 0")
    return Documents(offsets, longest, places)


def _check(owner: str, name: str, value: Any) -> None:
    """Require a tensor of integers."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{owner}: {name} must be a tensor, got {type(value).__name__}")
    if value.dtype not in _INTEGERS:
        raise ValueError(f"{owner}: {name} must have an integer dtype, got {value.dtype}")


def _beside(x: Tensor, mask: Tensor | None, cached: bool) -> str | None:
    """Say what must not come beside documents and does; None if nothing."""
    if x.shape[0] != 1:
        return f"tokens must be one row, got {x.shape[0]},"
    if mask is not None:
        return "attention_mask must be None or ones, got padding,"
    return "use_cache must be False, and no cache given," if cached else None


def _counted(positions: Tensor, x: Tensor, mask: Tensor | None, seen: int | Tensor) -> bool:
    """Say if positions are those that the model gives to the tokens of whole rows; padding may have any."""
    new = x.shape[1]
    if positions.dim() != 2 or positions.shape[1] != new or positions.shape[0] not in (1, x.shape[0]):
        return False
    kept = torch.ones(1, new) if mask is None else mask[:, -new:]
    kept = kept.to(x.device).bool()
    start = seen.to(x.device)[:, None] if isinstance(seen, Tensor) else seen
    wanted = kept.long().cumsum(1) - 1 + start
    return bool(((positions.to(x.device) == wanted) | ~kept).all())


def _offsets(owner: str, name: str, value: Tensor, total: int) -> Tensor:
    """Return the offsets of documents, int32, from an argument that says where each starts."""
    if name.startswith("cu_seq_lens"):
        offsets = value.flatten().to(torch.int32)
        if offsets[0] != 0 or offsets[-1] != total or bool((offsets.diff() <= 0).any()):
            raise ValueError(
                f"{owner}: {name} must grow from 0 to the number of tokens = {total}, got {offsets.tolist()}"
            )
        return offsets
    if tuple(value.shape) != (1, total):
        raise ValueError(f"{owner}: {name} must be (1, tokens) = (1, {total}), got {tuple(value.shape)}")
    row = value[0]
    starts = row == 0 if name == "position_ids" else torch.cat((torch.ones_like(row[:1]), row.diff())) != 0
    if not starts[:1].all():
        raise NotImplementedError(f"{owner}: position_ids must count the tokens of each document from 0")
    return torch.cat((starts.nonzero()[:, 0], torch.full((1,), total, device=value.device))).to(torch.int32)
