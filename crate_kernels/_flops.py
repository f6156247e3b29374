"""FLOP formulas of the ops, handed to PyTorch's FLOP counter when that is imported, not before.

``torch.utils.flop_counter`` imports Triton, or logs a warning where there is none; importing this package
must do neither. So the formulas wait, and a finder that steps aside at once delivers them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_COUNTER = "torch.utils.flop_counter"
_waiting: list[tuple[Any, Callable]] = []


class _OnImport(MetaPathFinder):
    """Deliver the waiting formulas after the counter's module has run."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != _COUNTER:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_deliver(module: ModuleType) -> None:
            execute(module)
            for packet, formula in _waiting:
                module.register_flop_formula(packet)(formula)

        spec.loader.exec_module = execute_and_deliver
        return spec


def register(packet: Any, formula: Callable) -> None:
    """Register the formula of an op: now if the counter is imported, else when it is."""
    counter = sys.modules.get(_COUNTER)
    if counter is not None:
        counter.register_flop_formula(packet)(formula)
        return
    if not _waiting:
        sys.meta_path.insert(0, _OnImport())
    _waiting.append((packet, formula))
