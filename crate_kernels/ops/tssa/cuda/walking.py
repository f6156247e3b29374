"""Plans the walking kernels of the causal form on Hopper GPUs: csrc/tssa/cuda/walking.cuh.

A cluster walks through one sequence after another and carries its running sums. It serves what the persistent kernels
of the full form serve, and sequences of any length, if they keep half of the multiprocessors busy: fewer are cut into
chunks. A cache is left to other kernels.

No GPU has timed them, so nothing takes them by default. ``python -m crate_kernels tune`` times them beside the kernels
of forms.py, and has the faster ones taken from then on.
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
from crate_kernels.ops.tssa.cuda.parameters import TssaForward, TssaProblem
from crate_kernels.ops.tssa.cuda.persistent import MOST_THREADS, VECTOR, Persistent, four, threads_of

_NONE = {"CLUSTER": 0, "BUFFERS": 0, "THREADS": 0, "TOKENS": 0}
# CLUSTER, BUFFERS, THREADS as of the persistent kernels; BUFFERS is of a step's tokens. TOKENS: of a thread, in a step.
_CANDIDATES = tuple(
    {"CLUSTER": cluster, "BUFFERS": buffers, "THREADS": threads, "TOKENS": tokens}
    for cluster, buffers, threads, tokens in (
        (8, 1, 384, 12),
        (8, 2, 384, 12),
        (8, 1, 192, 16),
        (8, 2, 192, 16),
        (8, 2, 384, 8),
        (4, 1, 384, 12),
        (4, 2, 192, 16),
    )
)


def _table(direction: str) -> Table:
    """Return the launch table of a direction, whose rows are by nheads * head_dim."""
    row = LaunchRow(_NONE)
    return Table(f"tssa_walking_{direction}", {INTERPRETER: (row,), "sm_80": (row,)}, candidates=_CANDIDATES)


FORWARD = _table("forward")


def chunk_of(width: int, config: Config) -> int:
    """Return the tokens of a block in a step."""
    return config["TOKENS"] * threads_of(width, config["THREADS"]) // (width // VECTOR)


def shared_bytes(nheads: int, head_dim: int, config: Config) -> int:
    """Return what a block takes of shared memory, as TssaWalkingShared does."""
    width, chunk = nheads * head_dim, chunk_of(nheads * head_dim, config)
    vectors, sums = width // VECTOR, four(width + nheads)
    fixed = 4 + 2 * sums + 2 * width + 2 * sums + 4
    by_token = config["BUFFERS"] * chunk * width // 2 + four(chunk * nheads) + four(chunk)
    return 4 * (fixed + by_token + max(chunk * (vectors + 4), chunk // config["TOKENS"] * sums))


def kernel(dtype: torch.dtype, nheads: int, head_dim: int, masked: bool, config: Config) -> Kernel:
    """Return the kernel of a configuration."""
    sizes = persistent.sizes(nheads, head_dim, masked, config)
    return Kernel("tssa/cuda/walking_forward.cuh", f"tssa_causal_fwd_walking_kernel<{CPP_TYPES[dtype]}, {sizes}>")


def taken(p: TssaProblem, w: Tensor, call: TSSACall, gpu: LaunchDevice) -> Persistent | None:
    """Return how a call is launched, whose tokens are cut, if these kernels serve it and were chosen, else None."""
    if not persistent.serves(p, gpu, w):
        return None
    config = FORWARD.config(w.device, p.width, p.seqlen, True, w.dtype)
    cluster = config["CLUSTER"]
    if not cluster or 2 * p.nsequences * cluster < gpu.multiprocessors:
        return None
    threads, bytes_ = threads_of(p.width, config["THREADS"]), shared_bytes(p.nheads, p.head_dim, config)
    if threads > MOST_THREADS or bytes_ > gpu.shared_limit:
        return None
    chosen = kernel(w.dtype, p.nheads, p.head_dim, call.key_padding_mask is not None, config)
    found = persistent.resident(p, chosen, TssaForward, Shape(0, threads, bytes_, cluster), w.device, gpu)
    if found is not None:
        p.chunk_size = chunk_of(p.width, config)
    return found
