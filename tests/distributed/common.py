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


def same(actual, expected, name="", **tolerance):
    assert_close(actual, expected, **(tolerance or EXACT), msg=lambda text: f"{name}: {text}")


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def same_gradients(model, expected, **tolerance):
    for (name, p), q in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if q.grad is not None:
            same(whole(p.grad), q.grad, name, **tolerance)


def mask_of(seqlen, padding):
    """(2, seqlen): None; a ragged end; a sequence without a token, and one that begins late."""
    kept = torch.ones(2, seqlen, dtype=torch.bool)
    if padding == "right":
        kept[0, seqlen // 2 :] = False
    elif padding == "none-left":
        kept[0] = False
        kept[1, : seqlen // 2] = False
    return kept if padding else None
