"""Token-statistics self-attention: linear-time attention through second moments."""

from crate_kernels.ops.tssa.api import tssa
from crate_kernels.ops.tssa.cache import TokenStatsCache

__all__ = ["TokenStatsCache", "tssa"]
