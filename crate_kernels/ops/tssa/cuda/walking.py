"""Plans the walking kernels of the causal form on Hopper GPUs: csrc/tssa/cuda/walking.cuh.

A cluster walks through one sequence after another and carries its running sums. The backward walks backwards, over the
sums before each of its steps: the forward saves them for it, or it walks forwards first. They serve what the persistent
kernels of the full form serve, and sequences of any length, if they keep half of the multiprocessors busy: fewer are
cut into chunks. A cache is left to other kernels.

No GPU has timed them, so no call takes them by default. ``python -m crate_kernels tune`` times them beside the kernels
of forms.py; from then on calls take the faster ones.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from crate_kernels._core import operator
from crate_kernels._cuda.launch import Kernel, LaunchDevice
from crate_kernels._cuda.launch import gpu as launch_device
from crate_kernels._cuda.records import CPP_TYPES
from crate_kernels._triton.launch import INTERPRETER
from crate_kernels._triton.table import Config, LaunchRow, Table
from crate_kernels.ops.tssa.call import TSSACall
from crate_kernels.ops.tssa.cuda import persistent
from crate_kernels.ops.tssa.cuda.parameters import TssaBackward, TssaForward, TssaProblem
from crate_kernels.ops.tssa.cuda.persistent import MAX_THREADS, VECTOR, Persistent, round_up_4, threads_of

TEXTS = ((12, 64), (16, 64))  # heads and channels of ToST's language models
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


def _serve(p: TssaProblem, w: Tensor, masked: bool, backward: bool, gpu: LaunchDevice) -> tuple[Persistent, int] | None:
    """Return the launch of a direction and a block's tokens in a step, if it was chosen for such calls, else None."""
    config = (BACKWARD if backward else FORWARD).config(w.device, p.width, p.seqlen, True, w.dtype)
    cluster = config["CLUSTER"]
    if not cluster or 2 * p.nsequences * cluster < gpu.multiprocessors:
        return None
    shape = persistent.block_of(p.width, shared_bytes(p.nheads, p.head_dim, backward, config), config, gpu)
    if shape is None:
        return None
    chosen = kernel(w.dtype, p.nheads, p.head_dim, masked, backward, config)
    record = TssaBackward if backward else TssaForward
    found = persistent.resident(p, chosen, record, shape, w.device, gpu)
    return None if found is None else (found, chunk_of(p.width, config))


def plan(
    p: TssaProblem, w: Tensor, dout: Tensor | None, call: TSSACall, gpu: LaunchDevice, sums: Tensor | None = None
) -> Persistent | None:
    """Return how a call is launched, whose tokens are cut, if these kernels serve it and were chosen, else None.

    ``sums`` is what the forward of a backward saved: ``p.sums_every`` is 0 if those are not before its steps.
    """
    backward = dout is not None
    if not persistent.serves(p, gpu, w, *((dout,) if backward else ())):
        return None
    found = _serve(p, w, call.key_padding_mask is not None, backward, gpu)
    if found is None:
        return None
    launch, p.chunk_size = found
    p.nchunks = -(-p.seqlen // p.chunk_size)
    step, every = launch.shape.cluster * p.chunk_size, call.sums_every
    if backward:
        saved = sums is not None and sums.numel() > 0 and every == step and sums.data_ptr() % 16 == 0
    else:
        saved = every < p.seqlen
    p.sums_every = every if saved else 0
    return launch


def sums_read_every(w: Tensor, call: TSSACall, forward_too: bool = False) -> int:
    """Return the tokens of a step of the backward, before each of which it wants sums.

    0 where it has one step alone, or other kernels are taken: with ``forward_too``, for the forward or for it.

    Raises:
        backends.Refused: a kernel cannot be compiled or loaded here.
    """
    shape = (*w.shape, call.max_seqlen)
    # Sizes that torch.compile keeps open; and a DTensor's, whose parts are what kernels are launched on.
    if any(type(n) is not int for n in shape) or operator.is_wrapper(w):
        return 0
    nheads, head_dim = w.shape[1], w.shape[-1]
    p = TssaProblem(
        nsequences=call.nsequences(w),
        nheads=nheads,
        head_dim=head_dim,
        width=nheads * head_dim,
        seqlen=call.max_seqlen if call.packed else w.shape[2],
    )
    directions = (False, True) if forward_too else (True,)
    tables = (BACKWARD if backward else FORWARD for backward in directions)
    if not all(table.config(w.device, p.width, p.seqlen, True, w.dtype)["CLUSTER"] for table in tables):
        return 0
    gpu = launch_device(w.device)
    if not persistent.serves(p, gpu, w):
        return 0
    step = 0
    for backward in directions:
        found = _serve(p, w, call.key_padding_mask is not None, backward, gpu)
        if found is None:
            return 0
        launch, chunk_size = found
        step = launch.shape.cluster * chunk_size
    return step if step < p.seqlen else 0


def kernels() -> list[Kernel]:
    """List the kernels of every candidate for the sizes that tuning times; in fp16 and padded, of one."""
    found = []
    for (nheads, head_dim), backward in itertools.product(TEXTS, (False, True)):
        candidates = [
            config
            for config in (BACKWARD if backward else FORWARD).candidates
            if threads_of(nheads * head_dim, config["THREADS"]) <= MAX_THREADS
        ]
        others = ((torch.float16, False), (torch.bfloat16, True))
        found += (kernel(torch.bfloat16, nheads, head_dim, False, backward, config) for config in candidates)
        found += (kernel(dtype, nheads, head_dim, masked, backward, candidates[0]) for dtype, masked in others)
    return list(dict.fromkeys(found))
