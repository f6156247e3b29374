"""What cases share: drawn tensors, equal in all processes, and comparisons with one process."""

import torch
import torch.distributed as dist
from torch.testing import assert_close

from crate_kernels import distributed

EXACT = {"rtol": 1e-12, "atol": 1e-12}


def drawn(*shape, seed=0, dtype=torch.float64):
    """Normal numbers, the same in each process."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def summed(x, group):
    """Add up over the processes."""
    x = x.clone()
    dist.all_reduce(x, group=group)
    return x


def own(x, group, dim=2, balanced=False):
    """This process's part, detached."""
    return distributed.shard(x.detach(), group, dim, balanced)


def same(actual, expected, name=""):
    assert_close(actual, expected, **EXACT, msg=lambda text: f"{name}: {text}")
