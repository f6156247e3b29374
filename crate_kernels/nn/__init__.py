"""The operators as modules: parameters under their published names and one public call each.

The projection always runs as a submodule, so that forward hooks on it see what they saw in the
published code, and the heads are a strided view of its output: nothing is copied on the way in or out.
Constructors raise ValueError or TypeError for a size, number or name that cannot be.

Under tensor parallelism the modules of ``mssa`` compute the heads that a process has: ``ColwiseParallel`` for the
projection in, ``RowwiseParallel`` for the one out (none where it is tied), and no dropout in training. Those of
``tssa`` refuse, since their softmax is over all heads.
"""

from crate_kernels.nn.attention import MSSA, TSSA
from crate_kernels.nn.causal import CausalMSSA, CausalTSSA
from crate_kernels.nn.sparse import ISTA, OvercompleteISTA

__all__ = ["ISTA", "MSSA", "TSSA", "CausalMSSA", "CausalTSSA", "OvercompleteISTA"]
