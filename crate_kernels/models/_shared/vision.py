"""Shared parts of the image models: sizes, patches and their positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crate_kernels._core import checks

Size = int | Sequence[int]


def head(dim: int, num_classes: int) -> nn.Module:
    """Return the last layer of a classifier; none for 0 classes."""
    return nn.Linear(dim, num_classes) if num_classes else nn.Identity()


def pair(owner: str, name: str, value: Size) -> tuple[int, int]:
    """Return (height, width) of an int or a pair."""
    pairs = isinstance(value, (tuple, list))
    if (len(value) != 2) if pairs else not isinstance(value, (int, torch.SymInt)):
        got = tuple(value) if pairs else type(value).__name__
        raise TypeError(f"{owner}: {name} must be an int or (height, width), got {got}")
    height, width = value if pairs else (value, value)
    return (
        checks.integer(owner, name, height, minimum=1),
        checks.integer(owner, name, width, minimum=1),
    )


def grid(owner: str, image_size: Size, patch_size: Size, name: str = "image_size") -> tuple[int, int]:
    """Return the number of patches of an image (down, across); its size must be a multiple of the patch size."""
    height, width = pair(owner, name, image_size)
    ph, pw = pair(owner, "patch_size", patch_size)
    if height % ph or width % pw:
        raise ValueError(f"{owner}: {name} must be a multiple of patch_size, got {height}x{width} by {ph}x{pw}")
    return height // ph, width // pw


def check_images(owner: str, img: Tensor, channels: int, patch_size: tuple[int, int]) -> None:
    """Require (batch, channels, height, width) images of whole patches."""
    ph, pw = patch_size
    wanted = f"(batch, channels={channels}, height, width) in patches of {ph}x{pw}"
    checks.tensor(owner, "img", img, 4, wanted)
    if img.shape[1] != channels or img.shape[2] % ph or img.shape[3] % pw:
        raise ValueError(f"{owner}: img must be {wanted}, got {tuple(img.shape)}")


def check_size(owner: str, img: Tensor, image_size: Size) -> None:
    """Require images of the size for which the positions are learned.

    The published code accepts another shape with as many patches, and then adds wrong positions.
    """
    height, width = pair(owner, "image_size", image_size)
    if tuple(img.shape[2:]) != (height, width):
        raise ValueError(
            f"{owner}: img must have {height}x{width} pixels, got {tuple(img.shape)}; dynamic_img_size=True resizes "
            "the positions at each call, set_input_size once"
        )


def positions_for(
    owner: str,
    img: Tensor,
    positions: Tensor,
    resize: bool,
    image_size: Size,
    patch_size: Size,
    dynamic: bool,
    antialias: bool,
) -> Tensor:
    """Return the positions, learned for ``image_size``, that images get; of another size if a flag allows it."""
    if not (resize or dynamic):
        check_size(owner, img, image_size)
        return positions
    ph, pw = pair(owner, "patch_size", patch_size)
    old = grid(owner, image_size, (ph, pw))
    return resize_positions(positions, old, (img.shape[2] // ph, img.shape[3] // pw), antialias)


def layer(owner: str, name: str, index: int | None, depth: int, defaults: Mapping[str, int]) -> int:
    """Return the number of a layer, from 0; the last of None."""
    number = depth - 1 if index is None else checks.integer(owner, name, index, minimum=0)
    if number >= depth:
        default = ", its default" if defaults.get(name) == number else ""
        raise ValueError(f"{owner}: {name} must be < {depth} layers, got {number}{default}; {name}=None is the last")
    return number


def set_input_size(model: Any, field: str, img_size: Size | None, patch_size: Size | None, *names: str) -> None:
    """Change the image size of a model's config, which calls it ``field``, and resize the positions of these names."""
    name, patch = model._name, pair(model._name, "patch_size", model.config.patch_size)
    if patch_size is not None and pair(name, "patch_size", patch_size) != patch:
        raise NotImplementedError(
            f"{name}: patch_size must be unchanged, {patch}, got {patch_size}: the weights of the stem are of one size"
        )
    if img_size is None:
        return
    old = model.grid
    model.config = replace(model.config, **{field: img_size})
    for place in names if model.grid != old else ():
        if place:
            positions = getattr(model, place)
            resized = resize_positions(positions.detach(), old, model.grid, model.config.antialias)
            learned = isinstance(positions, nn.Parameter)
            setattr(model, place, nn.Parameter(resized, positions.requires_grad) if learned else resized)


def patchify(img: Tensor, patch_size: tuple[int, int]) -> Tensor:
    """Cut (batch, channels, height, width) into (batch, patches, ph * pw * channels), channel last."""
    ph, pw = patch_size
    patches = img.unflatten(3, (-1, pw)).unflatten(2, (-1, ph))  # (b, c, h, ph, w, pw)
    return patches.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


def unpatchify(patches: Tensor, patch_size: tuple[int, int], grid: tuple[int, int]) -> Tensor:
    """Undo ``patchify`` for images of ``grid`` patches (down, across)."""
    ph, pw = patch_size
    img = patches.unflatten(2, (ph, pw, -1)).unflatten(1, grid)  # (b, h, w, ph, pw, c)
    return img.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)


# torch.fx records calls of these: a symbol has no shape to check.
for _name in ("check_images", "positions_for", "resize_positions"):
    torch.fx.wrap(_name)


def sincos_positions(dim: int, grid: tuple[int, int]) -> Tensor:
    """Return the fixed positions of MAE's code, (1, patches + 1, dim), zeros for the class token.

    The first half of the channels encodes the column and the second the row, each as sines and then
    cosines of frequencies ``10000^(-4 i / dim)``.
    """
    omega = 10000.0 ** (-torch.arange(dim // 4, dtype=torch.float64, device="cpu") / (dim // 4))
    rows, columns = (torch.arange(n, dtype=torch.float64, device="cpu") for n in grid)
    across = columns.repeat(grid[0])[:, None] * omega
    down = rows.repeat_interleave(grid[1])[:, None] * omega
    patches = torch.cat([across.sin(), across.cos(), down.sin(), down.cos()], dim=1)
    return torch.cat([torch.zeros(1, dim, dtype=torch.float64, device="cpu"), patches])[None].float()


def resize_positions(positions: Tensor, old: tuple[int, int], new: tuple[int, int], antialias: bool = False) -> Tensor:
    """Resize (1, 1 + old patches, dim) positions bicubically to another grid; the class token's does not change."""
    # A graph that is exported for every size resizes to all of them: to compare would leave out this one.
    every = torch.compiler.is_exporting() and any(isinstance(size, torch.SymInt) for size in new)
    if not every and old == new:
        return positions
    patches = positions[:, 1:].unflatten(1, old).permute(0, 3, 1, 2)
    # bicubic has no half-precision kernel on every device
    wide = patches.to(torch.promote_types(patches.dtype, torch.float32))
    resized = F.interpolate(wide, size=new, mode="bicubic", align_corners=False, antialias=antialias)
    return torch.cat([positions[:, :1], resized.to(positions.dtype).flatten(2).mT], dim=1)
