"""Multi-head subspace self-attention: attention whose query, key and value are one projection."""

from crate_kernels.ops.mssa.api import mssa
from crate_kernels.ops.mssa.cache import SubspaceCache

__all__ = ["SubspaceCache", "mssa"]
