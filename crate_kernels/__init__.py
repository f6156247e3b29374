"""Fused operators for white-box transformers: CRATE, CRATE-MAE, CRATE-alpha, causal CRATE, AoT, ToST."""

from crate_kernels.ops.ista import ista, ista_overcomplete
from crate_kernels.ops.mssa import SubspaceCache, mssa
from crate_kernels.ops.tssa import TokenStatsCache, tssa

__all__ = ["SubspaceCache", "TokenStatsCache", "ista", "ista_overcomplete", "mssa", "tssa"]
__version__ = "0.1.0"
