"""Fused operators for white-box transformers: CRATE, CRATE-MAE, CRATE-alpha, causal CRATE, AoT, ToST."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from crate_kernels import analysis, models, nn
from crate_kernels._patch import PatchReport, patch, unpatch
from crate_kernels.ops.ista import ista, ista_overcomplete
from crate_kernels.ops.mssa import SubspaceCache, mssa
from crate_kernels.ops.tssa import TokenStatsCache, tssa

if TYPE_CHECKING:
    from crate_kernels import distributed

__all__ = [
    "PatchReport",
    "SubspaceCache",
    "TokenStatsCache",
    "analysis",
    "distributed",
    "ista",
    "ista_overcomplete",
    "models",
    "mssa",
    "nn",
    "patch",
    "tssa",
    "unpatch",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> ModuleType:
    """Import ``distributed`` when it is first asked for: one process needs none of it."""
    if name == "distributed":
        return importlib.import_module("crate_kernels.distributed")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names."""
    return __all__
