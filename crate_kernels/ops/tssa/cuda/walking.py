"""Plans the walking kernels of the causal form on Hopper GPUs: csrc/tssa/cuda/walking.cuh.

A cluster walks through one sequence after another and carries its running sums; in the backward it keeps those before
each step, and then walks backwards. They serve what the persistent kernels
of the full form serve, and sequences of any length, if they keep half of the multiprocessors busy: fewer are cut into
chunks. A cache is left to other kernels.

No GPU has timed them, so no call takes them by default. ``python -m crate_kernels tune`` times them beside the kernels
of forms.py; from then on calls take the faster ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from crate_kernels._cuda.launch import Kernel, LaunchDevice, Shape
from crate_kernels._cuda.records import CPP_TYPES
from crate_kernels._triton.launch import INTERPRETER
from crate_kernels._triton.table import Config, LaunchRow, Table
from crate_kernels.ops.tssa.call import TSSACall
from crate_kernels.ops.tssa.cuda import persistent
from crate_kernels.ops.tssa.cuda.parameters import TssaBackward, TssaForward, TssaProblem
from crate_kernels.ops.tssa.cuda.persistent import MAX_THREADS, VECTOR, Persistent, round_up_4, threads_of

_NONE = {"CLUSTER": 0, "BUFFERS": 0, "THREADS": 0, "TOKENS": 0}
# CLUSTER, BUFFERS, THREADS as of the persistent kernels; BUFFERS is of a step's tokens. TOKENS: of a thread, in a step.
_FORWARD = (
    (8, 1, 384, 12),
    (8, 2, 384, 12),
    (8, 1, 192, 16),
    (8, 2, 192, 16),
    (8, 2, 384, 8),
    (4, 1, 384, 12),
    (4, 2, 192, 16),
)
_BACKWARD = (
    (8, 1, 384, 8),
    (8, 1, 192, 8),
    (8, 2, 384, 4),
    (8, 2, 192, 4),
    (8, 1, 192, 12),
    (4, 1, 384, 8),
    (4, 1, 192, 8),
)


def _table(direction: str, candidates: tuple[tuple[int, ...], ...]) -> Table:
    """Return the launch table of a direction, whose rows are by nheads * head_dim."""
    row = LaunchRow(_NONE)
    configs = tuple(dict(zip(_NONE, one, strict=True)) for one in candidates)
    return Table(f"tssa_walking_{direction}", {INTERPRETER: (row,), "sm_80": (row,)}, candidates=configs)


FORWARD, BACKWARD = _table("forward", _FORWARD), _table("backward", _BACKWARD)


def chunk_of(width: int, config: Config) -> int:
    """Return the tokens of a block in a step."""
    return config["TOKENS"] * threads_of(width, config["THREADS"]) // (width // VECTOR)


def shared_bytes(nheads: int, head_dim: int, backward: bool, config: Config) -> int:
    """Return what a block takes of shared memory, as TssaWalkingShared and TssaWalkingBackShared do."""
    width, chunk, buffers = nheads * head_dim, chunk_of(nheads * head_dim, config), config["BUFFERS"]
    row, sums, by_head = width // VECTOR + 4, round_up_4(width + nheads), round_up_4(chunk * nheads)
    groups = chunk // config["TOKENS"] * sums
    fixed = 4 + 2 * sums + 2 * width + 2 * sums
    if backward:
        fixed += sums + width + round_up_4(nheads) + 3 * groups
        return 4 * (fixed + buffers * (chunk * width + by_head) + 2 * by_head + round_up_4(chunk) + chunk * row)
    return 4 * (fixed + 4 + buffers * chunk * width // 2 + by_head + round_up_4(chunk) + max(chunk * row, groups))


def kernel(dtype: torch.dtype, nheads: int, head_dim: int, masked: bool, backward: bool, config: Config) -> Kernel:
    """Return the kernel of a configuration."""
    header, name = ("backward", "bwd") if backward else ("forward", "fwd")
    sizes = persistent.sizes(nheads, head_dim, masked, config)
    return Kernel(f"tssa/cuda/walking_{header}.cuh", f"tssa_causal_{name}_walking_kernel<{CPP_TYPES[dtype]}, {sizes}>")


def plan(p: TssaProblem, w: Tensor, dout: Tensor | None, call: TSSACall, gpu: LaunchDevice) -> Persistent | None:
    """Return how a call is launched, whose tokens are cut, if these kernels serve it and were chosen, else None."""
    backward = dout is not None
    if not persistent.serves(p, gpu, w, *((dout,) if backward else ())):
        return None
    config = (BACKWARD if backward else FORWARD).config(w.device, p.width, p.seqlen, True, w.dtype)
    cluster = config["CLUSTER"]
    if not cluster or 2 * p.nsequences * cluster < gpu.multiprocessors:
        return None
    threads, bytes_ = threads_of(p.width, config["THREADS"]), shared_bytes(p.nheads, p.head_dim, backward, config)
    if threads > MAX_THREADS or bytes_ > gpu.shared_limit:
        return None
    chosen = kernel(w.dtype, p.nheads, p.head_dim, call.key_padding_mask is not None, backward, config)
    record = TssaBackward if backward else TssaForward
    found = persistent.resident(p, chosen, record, Shape(0, threads, bytes_, cluster), w.device, gpu)
    if found is None:
        return None
    p.chunk_size = chunk_of(p.width, config)
    p.nchunks = -(-p.seqlen // p.chunk_size)
    kept = -(-p.nchunks // cluster) - 1 if backward else 0
    clusters, record = found.shape.blocks // cluster, round_up_4(p.width + p.nheads) + p.width
    return found._replace(exchanged=clusters * kept * record)
