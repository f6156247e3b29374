"""The processes of a run, and their places in its meshes."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


class Processes(NamedTuple):
    """The processes of a run.

    Attributes:
        device: of this process.
        mesh: (data, sequence, tensor). Processes of one ``sequence`` group share each text, those of one ``tensor``
            group each layer; ``data`` groups have other texts or images.
        weights: (replica, shard, tensor), the same processes: weights, gradients and optimiser are cut over a shard
            group, and replicas of it have copies.
    """

    device: torch.device
    mesh: DeviceMesh
    weights: DeviceMesh

    @property
    def groups(self) -> int:
        """Number of groups that have other data."""
        return self.mesh["data"].size()

    @property
    def group(self) -> int:
        """Number of this process's group among those."""
        return self.mesh["data"].get_local_rank()

    def mean(self, x: Tensor) -> float:
        """Return the mean of a number over the groups that have other data."""
        total = x.detach().double() if x.device.type == "cpu" else x.detach().float()
        total = total.clone()
        dist.all_reduce(total, group=self.mesh["data"].get_group())
        return total.item() / self.groups


def is_first() -> bool:
    """Return whether this process is the one that writes and prints."""
    return dist.get_rank() == 0


def maximum(number: int) -> int:
    """Return the largest of all processes' numbers."""
    total = torch.tensor(number)
    dist.all_reduce(total, dist.ReduceOp.MAX)
    return int(total.item())


@contextmanager
def asked_to_end() -> Iterator[Callable[[], bool]]:
    """Yield a function that tells whether there was a SIGTERM, which ends nothing by itself in the meantime."""
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        yield lambda: bool(received)
    finally:
        signal.signal(signal.SIGTERM, before)


def end_with_parent() -> None:
    """End this process when the one that started it ends, however that ends: a killed torchrun leaves its workers."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def started() -> Iterator[torch.device]:
    """Join the processes that torchrun started, or be the only one; yield this process's device."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()
    if torch.cuda.is_available():
        device, backend = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    else:
        device, backend = torch.device("cpu"), "gloo"
    store: dist.Store = dist.HashStore()
    rank, size = 0, 1
    if "RANK" in os.environ:
        store, rank, size = next(dist.rendezvous("env://"))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # torchrun keeps its store when it starts processes again, with the addresses of those that are gone.
        store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    try:
        yield device
    finally:
        dist.destroy_process_group()
        # Meshes keep gloo's threads. One that lets go of a tensor while Python is taken down would abort the process.
        time.sleep(0.1)


def placed(device: torch.device, batch: int, *, sequence: int = 1, tensor: int = 1, replicas: int = 1) -> Processes:
    """Place all processes in the meshes.

    Args:
        device: of this process.
        batch: texts or images of a step; each group must get as many.
        sequence, tensor: processes that share a text, and a layer.
        replicas: copies of the weights.
    """
    size = dist.get_world_size()
    if size % (sequence * tensor):
        raise SystemExit(f"--sequence {sequence} times --tensor {tensor} must divide {size} processes")
    groups, sharing = size // (sequence * tensor), size // tensor
    if batch % groups:
        raise SystemExit(f"{groups} groups of processes must divide --batch {batch}")
    if sharing % replicas:
        raise SystemExit(f"--replicas {replicas} must divide the {sharing} processes that share weights")
    mesh = init_device_mesh(device.type, (groups, sequence, tensor), mesh_dim_names=("data", "sequence", "tensor"))
    shape = replicas, sharing // replicas, tensor
    return Processes(device, mesh, init_device_mesh(device.type, shape, mesh_dim_names=("replica", "shard", "tensor")))
