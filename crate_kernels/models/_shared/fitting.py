"""Say which sizes of a config do not fit a checkpoint, as far as its shapes tell."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from crate_kernels.models._shared import skeleton

Shape = tuple[int, ...] | None
_INDEX = re.compile(r"(.*?)\.(\d+)\.")


def reason(
    build: Callable[[dict[str, Any]], nn.Module],
    settings: Mapping[str, Any],
    defaults: Mapping[str, Any],
    weights: Mapping[str, Any],
) -> str:
    """Name the sizes that must differ for all weights to fit; "" if there are none.

    They are changed one after the other, each time what leaves the fewest misfits. Where two changes leave the same,
    both are named: the width of all heads has two factors.

    Args:
        build: from arguments to the model.
        settings: the arguments that the user chose.
        defaults: the values of other arguments.
        weights: the checkpoint, under our names.
    """
    if not all(isinstance(weight, Tensor) and not weight.is_nested for weight in weights.values()):
        return ""
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}

    def says(name: str, value: int) -> str:
        return f"{name} must be {value}, got {settings[name] if name in settings else f'{defaults[name]} by default'}"

    changes: dict[str, Any] = {}
    steps: list[str] = []
    left = _misfits(build, settings, shapes)
    while left:
        tried = {}
        for change in sorted(_candidates({**defaults, **settings, **changes}, left, shapes)):
            misfits = _misfits(build, {**settings, **changes, change[0]: change[1]}, shapes)
            if misfits is not None and len(misfits) < len(left):
                tried[change] = misfits
        if not tried:
            return ""
        left = min(tried.values(), key=len)
        # Sizes left to their default come first: they may have been forgotten.
        equal = sorted(
            (change for change in tried if tried[change] == left), key=lambda each: (each[0] in settings, each)
        )
        steps.append(", or ".join(says(*change) for change in equal))
        changes[equal[0][0]] = equal[0][1]
    return "; ".join(steps)


def _misfits(
    build: Any, settings: Mapping[str, Any], shapes: Mapping[str, Shape]
) -> dict[str, tuple[Shape, Shape]] | None:
    """Return (the model's shape, the checkpoint's) where they differ, None for a weight that one lacks."""
    try:
        wanted = skeleton.build(lambda: build(dict(settings)), len(shapes)).state_dict()
    except (TypeError, ValueError, RuntimeError):  # not a config, or far too large
        return None
    ours = {name: tuple(tensor.shape) for name, tensor in wanted.items()}
    pairs = {name: (ours.get(name), shapes.get(name)) for name in ours | dict(shapes)}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _candidates(
    settings: Mapping[str, Any], misfits: Mapping[str, tuple[Shape, Shape]], shapes: Mapping[str, Shape]
) -> set[tuple[str, int]]:
    """Return (size, value): in proportion to a dimension, as a side of a square of it, or as a number of layers."""
    ratios = set()
    for ours, theirs in misfits.values():
        if ours and theirs and len(ours) == len(theirs):
            ratios |= {(b, a) for a, b in zip(ours, theirs, strict=True) if a != b}
            if len(ours) == 3 and ours[1] != theirs[1] > 1:  # positions, with one of the class token
                ratios.add((theirs[1] - 1, ours[1] - 1))
    layers: dict[str, int] = {}
    if any(None in pair for pair in misfits.values()):
        for found in map(_INDEX.match, shapes):
            if found:
                layers[found[1]] = max(layers.get(found[1], 0), int(found[2]) + 1)
    sizes = {name: value for name, value in settings.items() if type(value) is int and value > 0}
    tried = {(name, count) for name in sizes for count in layers.values()}
    for name, value in sizes.items():
        for b, a in ratios:
            if value * b % a == 0:
                tried.add((name, value * b // a))
            side = math.isqrt(value * value * b // a)
            if side * side * a == value * value * b:
                tried.add((name, side))
    return {(name, value) for name, value in tried if value != sizes[name]}
