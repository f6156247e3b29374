"""Check the fields of a config by their annotations, all at once, so that no family forgets a field."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from crate_kernels._core import checks
from crate_kernels.models._shared import vision

_CHECKS: dict[str, Callable[[str, str, Any], object]] = {
    "int": checks.integer,
    "float": checks.number,
    "bool": checks.flag,
    "str": checks.text,
    "str | None": lambda owner, name, value: checks.backend(owner, value),
    "vision.Size": lambda owner, name, value: vision.pair(owner, name, value),
}


def check_types(owner: str, config: Any) -> None:
    """Require every field of a config to be of its annotated type, and every number to be finite.

    Raises:
        TypeError: a field of another type.
        ValueError: a number that is not finite, or a size below 1.
    """
    for field in fields(config):
        kind, value = str(field.type), getattr(config, field.name)
        if kind not in _CHECKS:  # optional
            if value is None:
                continue
            kind = kind.removesuffix(" | None")
        _CHECKS[kind](owner, field.name, value)
