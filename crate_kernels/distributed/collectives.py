"""A group of processes, and the few collectives that everything here is made of.

Only all_reduce, all_gather into a list, all_to_all_single and batches of isend and irecv: others differ between PyTorch
2.11 and 2.13, or warn. All ranks of a group must make the same calls in the same order, backward passes included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from crate_kernels._core import operator
from crate_kernels.distributed import layout
from crate_kernels.distributed.layout import SequenceLayout

Group = dist.ProcessGroup | DeviceMesh


class Ranks(NamedTuple):
    """A group of processes, this process's rank in it, and the number of them."""

    group: dist.ProcessGroup
    rank: int
    size: int

    def sum_(self, x: Tensor) -> Tensor:
        """Add up a contiguous tensor over all ranks, in place."""
        if x.numel():
            dist.all_reduce(x, group=self.group)
        return x

    def sum(self, *tensors: Tensor) -> list[Tensor]:
        """Return the sums of tensors of one dtype over all ranks, in one message."""
        return _apart(self.sum_(_message(tensors)), tensors)

    def before(self, *tensors: Tensor) -> list[Tensor]:
        """Return the sums of tensors of one dtype over the lower ranks, in one message."""
        return self._sum_of(tensors, range(self.rank))

    def after(self, *tensors: Tensor) -> list[Tensor]:
        """Return the sums of tensors of one dtype over the higher ranks, in one message."""
        return self._sum_of(tensors, range(self.rank + 1, self.size))

    def _sum_of(self, tensors: Sequence[Tensor], which: range) -> list[Tensor]:
        parts = self.gather(_message(tensors))
        total = torch.zeros_like(parts[0])
        for rank in which:
            total += parts[rank]
        return _apart(total, tensors)

    def gather(self, x: Tensor, lengths: Sequence[int] | None = None, dim: int = 0) -> list[Tensor]:
        """Return every rank's tensor; they may differ along ``dim``, whose ``lengths`` are all passed then.

        Shorter ones are padded for the transfer.
        """
        longest = x.shape[dim] if lengths is None else max(lengths)
        shape = (*x.shape[:dim], longest, *x.shape[dim + 1 :])
        if longest == x.shape[dim]:
            sent = x.contiguous()
        else:
            sent = x.new_zeros(shape)
            sent.narrow(dim, 0, x.shape[dim]).copy_(x)
        got = [x.new_empty(shape) for _ in range(self.size)]
        if sent.numel():
            dist.all_gather(got, sent, group=self.group)
        return got if lengths is None else [part.narrow(dim, 0, n) for part, n in zip(got, lengths, strict=True)]

    def exchange(self, x: Tensor, sent: Sequence[int], got: Sequence[int]) -> Tensor:
        """Send ``sent[r]`` rows of x (rows, ...) to rank r; return the ``got[r]`` rows that each rank sent."""
        rows = x.shape[1:].numel()
        out = x.new_empty(sum(got) * rows)
        sizes = [n * rows for n in got], [n * rows for n in sent]
        dist.all_to_all_single(out, x.contiguous().flatten(), *sizes, group=self.group)
        return out.view(-1, *x.shape[1:])

    def start_pass(self, tensors: Sequence[Tensor], into: Sequence[Tensor]) -> list[Any]:
        """Start to send to the next rank, and to receive the last one's into ``into``; return what to wait for.

        Empty tensors are not sent; their lengths are known on both sides.
        """
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        calls = [dist.P2POp(dist.isend, t, group=self.group, group_peer=after) for t in tensors if t.numel()]
        calls += [dist.P2POp(dist.irecv, t, group=self.group, group_peer=before) for t in into if t.numel()]
        return dist.batch_isend_irecv(calls) if calls else []

    def draw_seed(self, device: torch.device) -> Tensor:
        """Draw a dropout seed from the first rank's generator; the others' advance too."""
        seed = operator.draw_seed(device)
        return self.sum_(seed if self.rank == 0 else torch.zeros_like(seed))

    def layout(self, op: str, own: int, balanced: bool, seqlen: int | None, device: torch.device) -> SequenceLayout:
        """Return where the tokens of all ranks are, of which this one has ``own``.

        Args:
            op: the public function, for messages.
            own: number of this rank's tokens.
            balanced: ranks have head-tail chunks.
            seqlen: length of the whole sequence; None asks the ranks, which waits for the device.
            device: device of the tokens.
        """
        if seqlen is None:
            each = self.gather(torch.tensor([own], device=device))
            lengths = tuple(int(n) for n in torch.cat(each).tolist())
            even = layout.split(sum(lengths), self.size, balanced)
            if balanced and lengths != even.lengths:
                wanted = f"{op}: with balanced=True ranks must have the tokens that shard gives them, {even.lengths}"
                raise ValueError(f"{wanted}, got {lengths}")
            return SequenceLayout(lengths, balanced)
        even = layout.split(seqlen, self.size, balanced)
        if own != even.lengths[self.rank]:
            wanted = f"{op}: w must have the tokens that shard gives rank {self.rank} of {self.size}, of {seqlen}"
            raise ValueError(f"{wanted}: {even.lengths[self.rank]}, got {own}")
        return even


def ranks(op: str, group: Group) -> Ranks:
    """Require a process group, or a mesh of one dimension, that this process belongs to."""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            names = f" {group.mesh_dim_names}" if group.mesh_dim_names else ""
            raise ValueError(f"{op}: group must be one dimension of a DeviceMesh, got {group.ndim}{names}")
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"{op}: group must be a ProcessGroup or a DeviceMesh, got {type(group).__name__}")
    return Ranks(group, dist.get_rank(group), dist.get_world_size(group))


def _message(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors one after the other in one dimension, a copy."""
    return torch.cat([t.flatten() for t in tensors])


def _apart(message: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the parts of a message in the shapes of the tensors that it was made of."""
    parts = message.split([t.numel() for t in tensors])
    return [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]


def without_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    """Switch autocast off in a method of an autograd.Function that takes its context and a tensor first."""

    @wraps(function)
    def run(ctx: Any, x: Tensor, *args: Any) -> Any:
        with torch.autocast(x.device.type, enabled=False):
            return function(ctx, x, *args)

    return run
