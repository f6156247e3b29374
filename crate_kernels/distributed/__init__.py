"""Sequences and models over several processes, on torch.distributed.

Every function takes a ``ProcessGroup``, or a ``DeviceMesh`` of one dimension. All ranks of the group make the same
calls in the same order, and all of them run the backward pass. Once this is imported, DTensors pass through the public
functions of the package: ``ista`` with tokens sharded, ``mssa`` with sequences or heads, ``tssa`` with sequences.
"""

from crate_kernels.distributed import rules
from crate_kernels.distributed.api import mssa, tssa
from crate_kernels.distributed.sequence import sequence_parallel
from crate_kernels.distributed.sharding import shard, unshard
from crate_kernels.distributed.tensor import tensor_parallel
from crate_kernels.distributed.traffic import Traffic, traffic

__all__ = ["Traffic", "mssa", "sequence_parallel", "shard", "tensor_parallel", "traffic", "tssa", "unshard"]

rules.register()


def __dir__() -> list[str]:
    """List the public names."""
    return __all__
