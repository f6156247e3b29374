"""Feature maps as tokens, and tokens as feature maps: views, where the map's channels are last in memory."""

from __future__ import annotations

from typing import Any

from torch import Size, Tensor

from crate_kernels._core import checks
from crate_kernels.nn import _heads

LAST, FIRST = "channels_last", "channels_first"


def check_format(owner: str, data_format: str) -> str:
    """Require the name of a data format; return it."""
    if data_format not in (LAST, FIRST):
        raise ValueError(f"{owner}: data_format must be {LAST!r} or {FIRST!r}, got {data_format!r}")
    return data_format


def tokens(owner: str, x: Tensor, dim: int, data_format: str) -> tuple[Tensor, Size | None]:
    """Return (batch, seqlen, dim) tokens, and the (height, width) of the map that they are of; None of tokens."""
    if data_format == FIRST:
        return tokens_of(owner, x, dim)
    if isinstance(x, Tensor) and x.dim() == 4:
        raise ValueError(
            f"{owner}: x must be (batch, seqlen, dim={dim}), got {tuple(x.shape)}: "
            f"maps (batch, dim, height, width) need data_format={FIRST!r}"
        )
    _heads.tokens(owner, x, dim)
    return x, None


def refuse_map(owner: str, x: Tensor, dim: int) -> None:
    """Refuse what is a map (batch, dim, height, width), and no tokens (..., dim), where tokens are taken."""
    if isinstance(x, Tensor) and x.dim() == 4 and x.shape[1] == dim != x.shape[3]:
        raise ValueError(
            f"{owner}: x must be (..., dim={dim}), got {tuple(x.shape)}: "
            f"maps (batch, dim, height, width) need data_format={FIRST!r}"
        )


def tokens_of(owner: str, x: Tensor, dim: int) -> tuple[Tensor, Size]:
    """Return a map (batch, dim, height, width) as (batch, height * width, dim), and its (height, width)."""
    layout = f"(batch, dim={dim}, height, width)"
    if checks.tensor(owner, "x", x, 4, layout).shape[1] != dim:
        raise ValueError(f"{owner}: x must be {layout}, got {tuple(x.shape)}")
    return x.flatten(2).mT, x.shape[2:]


def map_of(tokens: Tensor, size: Size | None) -> Tensor:
    """Return tokens (batch, height * width, dim) as a map (batch, dim, height, width); tokens where size is None."""
    return tokens if size is None else tokens.mT.unflatten(2, size)


def mask_of(owner: str, mask: Any, x: Tensor, size: Size) -> Any:
    """Return a mask (batch, height, width) of a map as one of its tokens."""
    if not isinstance(mask, Tensor):
        return mask
    wanted = (x.shape[0], *size)
    if tuple(mask.shape) != wanted:
        raise ValueError(
            f"{owner}: key_padding_mask must be (batch, height, width) = {wanted}, got {tuple(mask.shape)}"
        )
    return mask.flatten(1)
