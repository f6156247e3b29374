"""Sequences and models over several processes, on torch.distributed.

Every function takes a ``ProcessGroup``, or a ``DeviceMesh`` of one dimension. All ranks of the group make the same
calls in the same order, and all of them run the backward pass.
"""

from crate_kernels.distributed.api import mssa, tssa
from crate_kernels.distributed.sequence import sequence_parallel
from crate_kernels.distributed.sharding import shard, unshard
from crate_kernels.distributed.traffic import Traffic, traffic

__all__ = ["Traffic", "mssa", "sequence_parallel", "shard", "traffic", "tssa", "unshard"]
