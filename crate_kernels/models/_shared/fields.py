"""Check the fields of a config by their annotations, all at once, so that no family forgets a field."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

from crate_kernels._core import checks
from crate_kernels.models._shared import vision

Count = int  # may be 0; a plain int of a config is at least 1
Rate = float  # in [0, 1)
_CHECKS: dict[str, Callable[[str, str, Any], object]] = {
    "int": partial(checks.integer, minimum=1),
    "fields.Count": partial(checks.integer, minimum=0),
    "fields.Rate": partial(checks.number, minimum=0.0, below=1.0),
    "float": checks.number,
    "bool": checks.flag,
    "str": checks.text,
    "str | None": lambda owner, name, value: checks.backend(owner, value),
    "vision.Size": lambda owner, name, value: vision.pair(owner, name, value),
}


def check_types(owner: str, config: Any) -> None:
    """Require every field of a config to be of its annotated type and in its range, and every number to be finite."""
    for field in fields(config):
        kind, value = str(field.type), getattr(config, field.name)
        if kind not in _CHECKS:  # optional
            if value is None:
                continue
            kind = kind.removesuffix(" | None")
        _CHECKS[kind](owner, field.name, value)
