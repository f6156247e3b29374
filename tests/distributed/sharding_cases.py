"""``shard`` and ``unshard``."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from crate_kernels.distributed import shard, unshard
from tests.distributed.common import drawn, own, same, summed


def chunks(x, group, dim, balanced):
    """What this process should have, by torch.tensor_split."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if not balanced:
        return x.tensor_split(size, dim)[rank]
    parts = x.tensor_split(2 * size, dim)
    return torch.cat((parts[rank], parts[2 * size - 1 - rank]), dim)


def both_ways(seqlen, dim, balanced):
    """Cut and put together: values, and gradients of something that every process computes alike."""

    def run(group):
        shape = [2, 3, 4]
        shape[dim] = seqlen
        x = drawn(*shape).requires_grad_()
        part = shard(x, group, dim, balanced)
        assert torch.equal(part, chunks(x, group, dim, balanced))
        whole = unshard(part, group, dim, balanced)
        assert torch.equal(whole, x)
        factor = drawn(*shape, seed=1)
        (whole * factor).sum().backward()
        same(x.grad, factor)

    return run


def gradients(group):
    """Of a part: its part of the whole gradient. Of the whole: everybody's parts."""
    x = drawn(2, 7, 3)
    part = own(x, group, 1).requires_grad_()
    unshard(part, group, 1).pow(3).sum().backward()
    same(part.grad, own(3 * x**2, group, 1))
    x.requires_grad_()
    loss = shard(x, group, 1).pow(3).sum()
    loss.backward()
    same(x.grad, 3 * x.detach() ** 2)
    same(summed(loss.detach(), group), x.detach().pow(3).sum())


def twice(group):
    x = drawn(5, 2).requires_grad_()
    (grad,) = torch.autograd.grad(shard(x, group, 0).pow(3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), x)
    same(second, 6 * x.detach())


def any_lengths(group):
    """Parts that no rule cut."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    lengths = [3 * r % 4 for r in range(size)]
    x = torch.arange(sum(lengths) * 2).view(2, -1)
    assert torch.equal(unshard(x.split(lengths, 1)[rank], group, 1), x)


def tokens(group):
    """Integers and flags have no gradient, and are cut all the same."""
    for x in (torch.arange(14).view(2, 7), torch.arange(14).view(2, 7) % 3 == 0):
        assert torch.equal(unshard(shard(x, group, -1, balanced=True), group, -1, balanced=True), x)


def a_mesh(group):
    size = dist.get_world_size(group)
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("data", "sequence"))
    x = drawn(9)
    assert torch.equal(shard(x, mesh["sequence"], 0), own(x, group, 0))
    with pytest.raises(ValueError, match=r"shard: group must be one dimension of a DeviceMesh, got 2 \('data',"):
        shard(x, mesh, 0)


def refused(group):
    x = drawn(2, 3)
    with pytest.raises(TypeError, match=r"shard: group must be a ProcessGroup or a DeviceMesh, got NoneType"):
        shard(x, None, 0)
    with pytest.raises(TypeError, match=r"unshard: x must be a Tensor, got list"):
        unshard([1], group, 0)
    for call, name in ((shard, "shard"), (unshard, "unshard")):
        for dim in (2, -3):
            with pytest.raises(ValueError, match=rf"{name}: dim must be one of the 2 dimensions of x, got {dim}"):
                call(x, group, dim)
        with pytest.raises(ValueError, match=rf"{name}: dim must be one of the 0 dimensions of x, got 0"):
            call(x.sum(), group, 0)
    with pytest.raises(TypeError, match=r"shard: balanced must be a bool, got int"):
        shard(x, group, 0, 1)
    own_length = 4 * dist.get_world_size(group) if dist.get_rank(group) == 0 else 0
    with pytest.raises(ValueError, match=r"unshard: with balanced=True ranks must have the tokens that shard gives"):
        unshard(x.new_zeros(own_length), group, 0, balanced=True)


CASES = {
    **{
        f"shard-{seqlen}-dim{dim}-{'balanced' if balanced else 'in-order'}": both_ways(seqlen, dim, balanced)
        for seqlen, dim in ((12, 1), (7, 1), (5, -1), (7, -3), (1, 0), (0, 1))
        for balanced in (False, True)
    },
    "shard-gradients": gradients,
    "shard-twice": twice,
    "unshard-any-lengths": any_lengths,
    "shard-tokens": tokens,
    "shard-mesh": a_mesh,
    "shard-refused": refused,
}
