"""Modules around the operators: parameters under their published names and one operator call each.

The projection always runs as a submodule, so forward hooks on it see the same tensors as in the
published code. The heads are a strided view of its output: nothing is copied on the way in or out.
Constructors raise ValueError or TypeError for an invalid size, number or name.

Under tensor parallelism each process computes its own heads in the modules of ``mssa``: use ``ColwiseParallel`` for
the input projection, ``RowwiseParallel`` for the output projection (none if tied), and no dropout in training.
The modules of ``tssa`` refuse, since their softmax is over all heads.
"""

from crate_kernels.nn.attention import MSSA, TSSA
from crate_kernels.nn.causal import CausalMSSA, CausalTSSA
from crate_kernels.nn.loss import MCR2Loss
from crate_kernels.nn.sparse import ISTA, OvercompleteISTA

__all__ = ["ISTA", "MSSA", "TSSA", "CausalMSSA", "CausalTSSA", "MCR2Loss", "OvercompleteISTA"]


def __dir__() -> list[str]:
    """List the public names."""
    return __all__
