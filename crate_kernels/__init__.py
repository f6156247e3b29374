"""Fused operators for white-box transformers: CRATE, CRATE-MAE, CRATE-alpha, causal CRATE, AoT, ToST."""

from crate_kernels import analysis, models, nn
from crate_kernels._patch import PatchReport, patch, unpatch
from crate_kernels.ops.ista import ista, ista_overcomplete
from crate_kernels.ops.mssa import SubspaceCache, mssa
from crate_kernels.ops.tssa import TokenStatsCache, tssa

__all__ = [
    "PatchReport",
    "SubspaceCache",
    "TokenStatsCache",
    "analysis",
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
