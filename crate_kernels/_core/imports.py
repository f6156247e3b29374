"""Runs functions once a module of PyTorch is imported that this package must not import itself."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_waiting: dict[str, list[Callable[[ModuleType], object]]] = {}


class _Finder(MetaPathFinder):
    """Call the functions that wait for a module, after the module has run. This finder finds nothing itself."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        waiting = _waiting.pop(fullname, None)
        if waiting is None:
            return None
        spec = find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_call(module: ModuleType) -> None:
            execute(module)
            for call in waiting:
                call(module)

        spec.loader.exec_module = execute_and_call
        return spec


def when_imported(name: str, call: Callable[[ModuleType], object]) -> None:
    """Call ``call`` with the module of that name: now if it is imported, else after its import."""
    module = sys.modules.get(name)
    if module is not None:
        call(module)
        return
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    _waiting.setdefault(name, []).append(call)
