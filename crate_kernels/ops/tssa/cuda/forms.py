"""Chooses how a call of the CUDA C++ kernels of token statistics is launched.

A form depends on sizes, strides, alignment and the GPU alone, so that plans can repeat it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from crate_kernels._core import backends
from crate_kernels._cuda import launch
from crate_kernels._cuda.launch import LaunchDevice, Shape
from crate_kernels._cuda.records import DTYPES
from crate_kernels.ops.tssa.call import TSSACall
from crate_kernels.ops.tssa.cuda import persistent, walking
from crate_kernels.ops.tssa.cuda.names import CAUSAL, FULL, resident
from crate_kernels.ops.tssa.cuda.parameters import TssaBackward, TssaForward, TssaProblem, in_vectors, problem
from crate_kernels.ops.tssa.cuda.persistent import Persistent

_CHUNK_THREADS = 256
_CAUSAL_TILE, _BACK_TILE, _BACK_MARK = 8, 4, 8  # tokens, as in causal.cuh and causal_backward.cuh


class LaunchForm(NamedTuple):
    """One way to launch a call.

    Attributes:
        access: how kernels read and write tokens.
        threads: of a block.
        shared_bytes: of a block, at most.
        cluster: blocks that have a sequence on chip; 0: it is not.
        cuts: chunks of a sequence; 0: it is not cut.
        persistent: the launch, if a persistent kernel takes the call.
    """

    access: str
    threads: int
    shared_bytes: int
    cluster: int = 0
    cuts: int = 0
    persistent: Persistent | None = None

    @property
    def channels(self) -> int:
        """How many neighbouring channels a thread of the causal form has."""
        return 4 if self.access == "TssaFours" else 1


def _bytes(*counts: int) -> int:
    """Return the shared memory of pieces of so many 4-byte numbers, each aligned to 16 bytes."""
    return sum(-(-count // 4) * 16 for count in counts)


def _scratch(p: TssaProblem, threads: int) -> int:
    """Return the bytes of tssa_scratch of shared.cuh."""
    return max(32 * threads, -(-(threads // 32 * p.nheads * 8) // 16) * 16)


def _reciprocals(p: TssaProblem, backward: bool) -> int:
    """Return the numbers per channel of tssa_reciprocals, which the forward divides by."""
    return 2 if not backward and p.dtype == DTYPES[torch.float32] else 1


def _resident_bytes(p: TssaProblem, itemsize: int, rows: int, threads: int, backward: bool) -> int:
    """Return the bytes of TssaResident."""
    copies, sums = 2 if backward else 1, p.width + p.nheads
    tokens = -(-itemsize * rows * p.width // 16) * 16
    by_channel = 2 if backward else _reciprocals(p, backward)
    numbers = _bytes(sums, sums, by_channel * p.width, p.nheads)
    return copies * (tokens + _bytes(rows * p.nheads)) + numbers + _scratch(p, threads)


def _causal_bytes(p: TssaProblem, count: int) -> int:
    """Return the bytes of TssaCausalShared."""
    vectors, pairs = p.width // count, _CAUSAL_TILE * p.nheads
    return _bytes(p.width, p.width, vectors, _CAUSAL_TILE * vectors, 2 * pairs, pairs)


def causal_backward_bytes(p: TssaProblem, count: int, logits: bool) -> int:
    """Return the bytes of TssaCausalBackwardShared."""
    vectors, marks, tile = p.width // count, (p.chunk_size - 1) // _BACK_MARK, _BACK_TILE * logits
    kept = marks * p.width, marks * p.width, marks * vectors, p.width * logits, p.width * logits
    return _bytes(*kept, tile * p.width, 3 * tile * vectors, 4 * tile * p.nheads, p.nheads, p.nheads)


def _cut(p: TssaProblem, chunk_size: int) -> None:
    p.chunk_size = max(chunk_size, 1)
    p.nchunks = max(1, -(-p.seqlen // p.chunk_size))


def _on_chip(p: TssaProblem, access: str, itemsize: int, backward: bool, gpu: LaunchDevice) -> LaunchForm | None:
    """Return the form of tokens on chip; None if they do not fit.

    Starts from the smallest cluster that holds them. Doubles it while a block takes more than half of a
    multiprocessor's shared memory (so that one block can load while another computes), or while multiprocessors are
    idle.
    """
    form, limit = None, gpu.shared_limit
    for cluster in (1, 2, 4, 8) if gpu.capability >= 90 else (1,):
        rows = -(-p.seqlen // cluster)
        wanted = rows * p.width * itemsize // 128  # a thread for eight accesses to the block's tokens
        threads = next((n for n in (512, 256, 128) if wanted >= n), 64)
        shared_bytes = _resident_bytes(p, itemsize, rows, threads, backward)
        if shared_bytes > limit:
            continue
        form = LaunchForm(access, threads, shared_bytes, cluster)
        spread = 2 * shared_bytes > limit or 2 * p.nsequences * cluster <= gpu.multiprocessors
        if not spread or rows < 32:
            break
    return form


def _in_chunks(p: TssaProblem, access: str, itemsize: int, backward: bool, gpu: LaunchDevice) -> LaunchForm:
    """Cut the tokens into chunks of 32 to 256, so that every multiprocessor gets four blocks, and of at most 48 kB.

    Some steps read a chunk twice, and the chunks of a few hundred blocks should then still be in the caches.
    """
    share = p.nsequences * p.seqlen // (4 * gpu.multiprocessors)
    cached = 48 * 1024 // (p.width * itemsize * (2 if backward else 1)) // 16 * 16
    _cut(p, min(min(max(-(-share // 16) * 16, 32), 256), max(cached, 16)))
    shared_bytes = _scratch(p, _CHUNK_THREADS) + (_reciprocals(p, backward) * p.width + p.nheads) * 4
    return LaunchForm(access, _CHUNK_THREADS, shared_bytes, cuts=p.nchunks)


def _full_form(p: TssaProblem, w: Tensor, dout: Tensor | None, gpu: LaunchDevice) -> LaunchForm:
    """Choose the form of a call of the full form.

    Tokens are on chip if they fit, and if either this ends before further launches would have begun (256 kB) or at most
    half of the multiprocessors are idle.
    """
    count, backward = 16 // w.itemsize, dout is not None
    vectors = in_vectors(count, w, dout)
    access = FULL[2] if not vectors else FULL[0] if w.dtype == torch.float32 else FULL[1]
    p.lanes = 1  # of a warp that share a head's channels
    while p.lanes < 32 and p.lanes * (count if vectors else 1) < p.head_dim:
        p.lanes *= 2
    form = _on_chip(p, access, w.itemsize, backward, gpu) if vectors else None
    if form is not None and form.cluster > 1:
        kernel = launch.function(resident(access, backward), w.device, (TssaBackward if backward else TssaForward,))
        blocks = max(p.nsequences, 1) * form.cluster
        if not gpu.active_clusters(kernel, Shape(blocks, form.threads, form.shared_bytes, form.cluster)):
            form = None
    if form is not None:
        few = p.seqlen * p.width * w.itemsize <= 256 * 1024
        if few or 2 * p.nsequences * form.cluster >= gpu.multiprocessors:
            return form
    return _in_chunks(p, access, w.itemsize, backward, gpu)


def _causal_form(p: TssaProblem, w: Tensor, dout: Tensor | None, gpu: LaunchDevice) -> LaunchForm:
    """Choose the form of a call of the causal form.

    A sequence stays one chunk if it is short, or, in the forward, if there are enough sequences to fill the device.
    """
    vectors = in_vectors(4, w, dout)
    access, count = (CAUSAL[0], 4) if vectors else (CAUSAL[1], 1)
    threads = min(max(-(-(p.width // count) // 32) * 32, 64), 512 if dout is None else 256)
    shared_bytes = 0
    if dout is None:
        many = p.nsequences * threads // 32 >= 16 * gpu.multiprocessors
        # A block adds up its tokens one after the other, and each addition rounds.
        _cut(p, min(p.seqlen, 1024 if many else 64))
        shared_bytes = _causal_bytes(p, count)
    else:
        # Short chunks keep no running sums: they serve tokens that are too wide for long chunks.
        for chunk_size in (32, _BACK_MARK):
            _cut(p, min(p.seqlen, chunk_size))
            shared_bytes = causal_backward_bytes(p, count, logits=True)
            if shared_bytes <= gpu.shared_limit:
                break
    return LaunchForm(access, threads, shared_bytes, cuts=p.nchunks if p.nchunks > 1 else 0)


def _persistent_form(found: Persistent | None) -> LaunchForm | None:
    """Return the form of a call that a persistent kernel takes."""
    if found is None:
        return None
    shape = found.shape
    return LaunchForm(CAUSAL[0], shape.threads, shape.shared_bytes, shape.cluster, persistent=found)


def choose(
    w: Tensor,
    dout: Tensor | None,
    call: TSSACall,
    causal: bool,
    statistics: tuple[Tensor, ...] = (),
    decoding: bool = False,
) -> tuple[TssaProblem, LaunchForm]:
    """Return the sizes of a call, cut into chunks, and its form; ``dout`` is None in a forward.

    ``statistics``: the energies and moments that a backward of the full form reads, or the sums that a causal forward
    saved. ``decoding``: a cache is advanced.

    Raises:
        backends.Refused: tokens have no channels, or too many for the GPU's shared memory.
    """
    got = f"got nheads * head_dim = {w.shape[1]} * {w.shape[-1]}"
    if not w.shape[1] * w.shape[-1]:
        raise backends.Refused(f"takes tokens with channels, {got}")
    p, gpu = problem(w, call), launch.gpu(w.device)
    found = None
    if not causal:
        found = persistent.plan(p, w, dout, statistics, call, gpu)
    elif not decoding:
        found = walking.plan(p, w, dout, call, gpu, *statistics)
    form = _persistent_form(found)
    form = form or (_causal_form if causal else _full_form)(p, w, dout, gpu)
    if form.shared_bytes > gpu.shared_limit:
        direction = "forward" if dout is None else "backward"
        raise backends.Refused(f"takes tokens that fit this GPU's shared memory in its {direction} pass, {got}")
    return p, form
