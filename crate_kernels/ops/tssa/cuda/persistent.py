"""Plans the persistent kernels of the full form on Hopper GPUs: csrc/tssa/cuda/persistent.cuh.

Clusters stay on their multiprocessors and take one sequence after another. They serve 16-bit tokens whose heads are of
16 channels or a multiple, and which fit a cluster's shared memory, or that of several clusters: these exchange
their sums through the L2 cache, and wait for each other. So all of them must be on the GPU at once: the planner asks
how many it holds, and the launch is cooperative, which the driver refuses where it cannot be.

No GPU has timed them, so no call takes them by default. ``python -m crate_kernels tune`` times them beside the kernels
of forms.py; from then on calls take the faster ones.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from crate_kernels._cuda import launch
from crate_kernels._cuda.launch import Kernel, LaunchDevice, Shape
from crate_kernels._cuda.records import CPP_TYPES
from crate_kernels._triton.launch import INTERPRETER
from crate_kernels._triton.table import Config, LaunchRow, Table
from crate_kernels.ops.tssa.call import TSSACall
from crate_kernels.ops.tssa.cuda.parameters import TssaBackward, TssaForward, TssaProblem, in_vectors

CAPABILITY = 90  # bulk copies and clusters: what other GPUs have of them, nothing has tried
MAX_THREADS = 512
VECTOR = 8  # channels
_MAX_HEADS_PER_LANE = 8  # heads of a lane in the softmax, which are in registers
_SLICE = 32  # tokens whose sums by vector are put down at a time
_NONE = {"CLUSTER": 0, "BUFFERS": 0, "THREADS": 0, "TOGETHER": 0}
# CLUSTER: blocks; 0: none of these kernels. BUFFERS: sequences in a cluster's shared memory at a time. THREADS: of a
# block, at least. TOGETHER: clusters that share a sequence.
_CANDIDATES = tuple(
    dict(zip(_NONE, one, strict=True))
    for one in (
        (8, 2, 192, 1),
        (8, 1, 384, 1),
        (4, 2, 192, 1),
        (4, 1, 384, 1),
        (2, 2, 192, 1),
        (8, 2, 384, 1),
        (8, 1, 192, 1),
        (4, 1, 192, 1),
        (16, 1, 384, 1),
        (16, 2, 192, 1),
        (8, 1, 384, 4),
        (8, 1, 384, 2),
        (8, 1, 384, 12),
        (8, 1, 384, 8),
        (16, 1, 384, 4),
    )
)


def _table(direction: str) -> Table:
    """Return the launch table of a direction, whose rows are by nheads * head_dim."""
    row = LaunchRow(_NONE)
    return Table(f"tssa_persistent_{direction}", {INTERPRETER: (row,), "sm_80": (row,)}, candidates=_CANDIDATES)


FORWARD, BACKWARD = _table("forward"), _table("backward")


class Persistent(NamedTuple):
    """The launch of a persistent or walking kernel.

    Attributes:
        kernel, shape: the launch.
        exchanged: numbers that clusters which share sequences exchange.
        counters: how many counters the clusters that share sequences need.
    """

    kernel: Kernel
    shape: Shape
    exchanged: int = 0
    counters: int = 0


def threads_of(width: int, min_threads: int) -> int:
    """Return the threads of a block: whole warps, and groups of a thread for each vector of a token."""
    unit = math.lcm(width // VECTOR, 32)
    return -(-min_threads // unit) * unit


def block_of(width: int, bytes_: int, config: Config, gpu: LaunchDevice) -> Shape | None:
    """Return a block and its cluster, of no grid yet; None where the GPU lacks the threads or the shared memory."""
    threads = threads_of(width, config["THREADS"])
    fits = threads <= MAX_THREADS and bytes_ <= gpu.shared_limit
    return Shape(0, threads, bytes_, config["CLUSTER"]) if fits else None


def round_up_4(count: int) -> int:
    """Round up to a multiple of 4."""
    return -(-count // 4) * 4


def shared_bytes(nheads: int, head_dim: int, seqlen: int, backward: bool, config: Config) -> int:
    """Return what a block takes of shared memory, as TssaPersistentShared does."""
    width, share, copies = (
        nheads * head_dim,
        -(-seqlen // (config["CLUSTER"] * config["TOGETHER"])),
        2 if backward else 1,
    )
    vectors, sums = width // VECTOR, round_up_4(width + nheads)
    groups = threads_of(width, config["THREADS"]) // vectors
    buffers = config["BUFFERS"]
    fixed = 4 + 2 * sums + copies * width + round_up_4(nheads) + (2 * buffers * width if backward else 0)
    tokens = buffers * copies * share * width // 2
    by_token = (1 + buffers if backward else 1) * round_up_4(share * nheads) + round_up_4(share)
    return 4 * (fixed + tokens + by_token + max(min(share, _SLICE) * (vectors + 4), groups * sums))


def sizes(nheads: int, head_dim: int, masked: bool, config: Config) -> str:
    """Return the arguments of TssaSizes behind the dtype."""
    threads = threads_of(nheads * head_dim, config["THREADS"])
    return f"{nheads}, {head_dim}, {config['CLUSTER']}, {threads}, {config['BUFFERS']}, {str(masked).lower()}"


def kernel(dtype: torch.dtype, nheads: int, head_dim: int, masked: bool, backward: bool, config: Config) -> Kernel:
    """Return the kernel of a configuration."""
    header, name = ("backward", "bwd") if backward else ("forward", "fwd")
    arguments = f"{CPP_TYPES[dtype]}, {sizes(nheads, head_dim, masked, config)}, {config['TOGETHER']}"
    return Kernel(f"tssa/cuda/persistent_{header}.cuh", f"tssa_full_{name}_persistent_kernel<{arguments}>")


def _side_by_side(t: Tensor) -> bool:
    """Return whether heads lie side by side in a token, or tokens in a head: bulk copies are of one or the other."""
    head, token = (t.stride(1), t.stride(0)) if t.dim() == 3 else t.stride()[1:3]
    return t.shape[-1] in (head, token)


def _heads_per_lane(nheads: int) -> int:
    """Return how many heads a lane has in the softmax, as TssaSizes does."""
    return nheads // math.gcd(nheads, 4)


def serves(p: TssaProblem, gpu: LaunchDevice, *tensors: Tensor) -> bool:
    """Return whether there are kernels for a call's tokens, if they fit."""
    return (
        gpu.capability == CAPABILITY
        and all(t.dtype in (torch.bfloat16, torch.float16) for t in tensors)
        and p.head_dim % 16 == 0
        and _heads_per_lane(p.nheads) <= _MAX_HEADS_PER_LANE
        and p.seqlen > 0
        and in_vectors(VECTOR, *tensors)
        and all(map(_side_by_side, tensors))
    )


def resident(
    p: TssaProblem,
    chosen: Kernel,
    record: type[TssaForward | TssaBackward],
    shape: Shape,
    device: torch.device,
    gpu: LaunchDevice,
    together: int = 1,
) -> Persistent | None:
    """Return a launch of as many clusters as sequences need and the GPU holds at once; None: it holds too few."""
    asked = shape._replace(blocks=max(p.nsequences, 1) * shape.cluster * together)
    groups = gpu.active_clusters(launch.function(chosen, device, (record,)), asked) // together
    if not groups:
        return None
    groups = min(p.nsequences, groups)
    shape = shape._replace(blocks=groups * shape.cluster * together, cooperative=together > 1)
    if together == 1:
        return Persistent(chosen, shape)
    return Persistent(chosen, shape, 2 * groups * together * round_up_4(p.width + p.nheads), groups)


def plan(
    p: TssaProblem, w: Tensor, dout: Tensor | None, statistics: tuple[Tensor, ...], call: TSSACall, gpu: LaunchDevice
) -> Persistent | None:
    """Return how a call is launched if these kernels serve it and were chosen, else None."""
    backward = dout is not None
    if not serves(p, gpu, w, *((dout,) if backward else ())) or any(t.data_ptr() % 16 for t in statistics):
        return None
    config = (BACKWARD if backward else FORWARD).config(w.device, p.width, p.seqlen, False, w.dtype)
    if not config["CLUSTER"]:
        return None
    shape = block_of(p.width, shared_bytes(p.nheads, p.head_dim, p.seqlen, backward, config), config, gpu)
    if shape is None:
        return None
    chosen = kernel(w.dtype, p.nheads, p.head_dim, call.key_padding_mask is not None, backward, config)
    record = TssaBackward if backward else TssaForward
    return resident(p, chosen, record, shape, w.device, gpu, config["TOGETHER"])
