"""A model over several processes: its layers, its weights, and the norm of its gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from crate_kernels import distributed
from training.processes import Processes

DTYPES = {"bfloat16": torch.float32, "float32": torch.float32, "float64": torch.float64}  # of the weights


def cut(model: nn.Module, blocks: Iterable[nn.Module], processes: Processes, dtype: str) -> Any:
    """Cut a model, the same in all processes.

    Layers are cut over ``tensor`` groups first, then all weights over ``shard`` groups, block by block. A language
    model over a ``sequence`` group comes last: it changes how ``fully_shard`` adds up gradients.

    Args:
        model: on any device.
        blocks: its layers, each of which is gathered separately.
        processes: the meshes.
        dtype: of the products: "bfloat16" keeps weights, optimiser and sums of gradients in float32.
    """
    model = model.to(processes.device, DTYPES[dtype])
    if processes.weights["tensor"].size() > 1:
        distributed.tensor_parallel(model, processes.weights["tensor"])
    half = torch.bfloat16 if dtype == "bfloat16" else None
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32 if half else None)
    copies = processes.weights["replica"].size() > 1
    mesh = processes.weights["replica", "shard"] if copies else processes.weights["shard"]
    for part in (*blocks, model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    if processes.mesh["sequence"].size() > 1:
        distributed.sequence_parallel(model, processes.mesh["sequence"])
    return model


def clip(model: nn.Module, max_norm: float) -> float:
    """Scale the gradients so that their norm is at most ``max_norm``; return what it was.

    Weights that are cut twice are on another mesh than the others, and PyTorch's own function takes one mesh. Here each
    process adds up the squares of the parts that it has; a part that several have counts once among them all.
    """
    size, device = dist.get_world_size(), torch.device("cpu")
    parts: dict[int, list[Tensor]] = {}  # by the number of different parts of a gradient
    for grad in (p.grad for p in model.parameters() if p.grad is not None):
        own, count = grad, 1
        if isinstance(grad, DTensor):
            own = grad.to_local()
            cuts = zip(grad.device_mesh.shape, grad.placements, strict=True)
            count = math.prod(number for number, placement in cuts if not placement.is_replicate())
        parts.setdefault(count, []).append(own)
        device = own.device
    total = torch.zeros((), dtype=torch.float64, device=device)
    for count, own in parts.items():
        total += nn.utils.get_total_norm(own).double().square() * (count / size)
    dist.all_reduce(total)
    norm = total.sqrt().item()
    factor = max_norm / (norm + 1e-6)  # as PyTorch's own
    if factor < 1:
        for part in (part for own in parts.values() for part in own):
            part.mul_(factor)
    return norm
