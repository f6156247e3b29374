"""Launches of the kernels of token statistics: tiles, chunks, and the arguments that all kernels share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from crate_kernels._triton import launch
from crate_kernels._triton.jit import Strided
from crate_kernels._triton.table import Config, Table
from crate_kernels.ops.tssa.call import TSSACall
from crate_kernels.ops.tssa.triton.scan import scan_chunks
from crate_kernels.ops.tssa.triton.tables import CAUSAL_FORWARD
from crate_kernels.ops.tssa.triton.tile import ChunkSums, Masking, TokenDims

# Sizes vary per call: do not specialise on them. Triton would compile variants for 1 and for multiples of 16.
RUNTIME = (
    "nsequences",
    "ngroups",
    "nchunks",
    "chunk_size",
    "seqlen",
    "total",
    "drop_last",
    "bias_tokens",
    "stride_pb",
    "stride_mb",
)


class TokenSizes:
    """The sizes of one call, padded or packed, and the optional tensors that every kernel takes.

    Attributes:
        call: the options.
        nsequences, nheads, head_dim: sizes; packed sequences count as the batch.
        seqlen: length of every sequence, or of the longest packed one.
        total: packed rows; 0 for a padded batch.
    """

    def __init__(self, w: Tensor, call: TSSACall) -> None:
        self.call, self.device, self.dtype = call, w.device, w.dtype
        self.nsequences, self.nheads, self.head_dim = call.nsequences(w), w.shape[1], w.shape[-1]
        self.seqlen = call.max_seqlen if call.packed else w.shape[2]
        self.total = w.shape[0] if call.packed else 0

    @property
    def width(self) -> int:
        """Channels of a token, all heads together."""
        return self.nheads * self.head_dim

    def empty_rows(self, *leading: int) -> Tensor:
        """Allocate fp32 numbers per head and token: (..., batch, nheads, seqlen) or (..., nheads, total)."""
        sizes = (self.nheads, self.total) if self.call.packed else (self.nsequences, self.nheads, self.seqlen)
        return torch.empty(*leading, *sizes, dtype=torch.float32, device=self.device)

    def empty_sums(self, nchunks: int, *leading: int) -> Tensor:
        """Allocate the sums of each chunk: one per channel, and behind them one per head."""
        size = self.nheads * (self.head_dim + 1)
        return torch.empty(*leading, self.nsequences, nchunks, size, dtype=torch.float32, device=self.device)

    def strided(self, t: Tensor) -> Strided:
        """Return a tensor of tokens with its strides."""
        return Strided(t, *((0, t.stride(1), t.stride(0), t.stride(2)) if self.call.packed else t.stride()))

    def dims(self, heads: int, block_heads: int, block_channels: int) -> TokenDims:
        """Return the constants of kernels whose programs have ``heads`` heads of a token."""
        ptx = launch.arch(self.device).startswith("sm_")
        return TokenDims(heads, self.head_dim, block_heads, block_channels, ptx, self.dtype == torch.float32)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments that every kernel takes, by name."""
        call = self.call
        mask_b, mask_s = (0, 0) if call.key_padding_mask is None else call.key_padding_mask.stride()
        rows_b, rows_h = (0, self.total) if call.packed else (self.nheads * self.seqlen, self.seqlen)
        keep_factor = 1.0 / (1.0 - call.dropout_p)
        return {
            "masking": Masking(call.cu_seqlens, call.key_padding_mask, mask_s, call.seed, keep_factor),
            "stride_mb": mask_b,
            "stride_pb": rows_b,
            "stride_ph": rows_h,
            "nsequences": self.nsequences,
            "seqlen": self.seqlen,
            "total": self.total,
            "drop_last": 0 if call.seed is None else launch.drop_last(call.dropout_p),
        }


def power_of_two(size: int) -> int:
    """Return the smallest power of two that holds ``size``."""
    return 1 << max(size - 1, 0).bit_length()


def _chunk_of_full(sizes: TokenSizes, config: Config, tokens: int) -> int:
    """Return the tokens per program: all of a sequence, or as many as keep every multiprocessor busy."""
    size, device = sizes.seqlen * sizes.width * sizes.dtype.itemsize, launch.multiprocessors(sizes.device)
    if size <= 1024 * config["WHOLE"] or (size <= 1024 * config["CROWD"] and 2 * sizes.nsequences >= device):
        return max(sizes.seqlen, 1)
    share = -(-sizes.nsequences * sizes.seqlen // (8 * device))
    return min(max(-(-share // tokens), 4) * tokens, config["CHUNK"])


def _run_steps(
    kernel: Any,
    steps: tuple[str, ...],
    sizes: TokenSizes,
    arguments: dict[str, Any],
    add_up: Callable[[Tensor], Tensor],
) -> None:
    """Launch ``steps`` one after the other; each reads what ``add_up`` made of the chunks' sums of those before it."""
    nchunks, sums = arguments["nchunks"], ChunkSums()
    for step in steps:
        parts = None if step == steps[-1] else sizes.empty_sums(nchunks)
        arguments["sums"] = sums._replace(parts_ptr=parts)
        launch.run(kernel, sizes.nsequences * nchunks, **arguments, **{name: name == step for name in steps})
        if parts is not None:
            added = add_up(parts)
            sums = sums._replace(first_ptr=added) if step == steps[0] else sums._replace(second_ptr=added)


def run_full(kernel: Any, table: Table, steps: tuple[str, ...], sizes: TokenSizes, arguments: dict[str, Any]) -> None:
    """Launch all ``steps`` at once where a program has a whole sequence, else one after the other."""
    config = table.config(sizes.device, sizes.width, sizes.seqlen, False, sizes.dtype)
    heads, channels = power_of_two(sizes.nheads), power_of_two(sizes.head_dim)
    tokens = min(max(1, config["TILE"] // (heads * channels)), power_of_two(sizes.seqlen))
    chunk = _chunk_of_full(sizes, config, tokens)
    nchunks, warps = max(1, -(-sizes.seqlen // chunk)), config["num_warps"]
    if nchunks > 1 and config["LANE"]:
        # There are many programs: each can have few warps, and a token at a time.
        tokens, warps = 1, warps_of(sizes, config["LANE"])
    # Where threads have no element, Triton 3.6 fails to compile the backward with dropout (RemoveLayoutConversions).
    lanes = lanes_of(sizes)
    channels = max(channels, lanes // (tokens * heads))
    warps = min(warps, tokens * heads * channels // lanes)
    arguments |= {"nchunks": nchunks, "chunk_size": chunk, "STAGES": config["STAGES"]}
    arguments |= {"BLOCK_N": tokens, "DIMS": sizes.dims(sizes.nheads, heads, channels), "num_warps": warps}
    arguments["sums"] = ChunkSums()
    with launch.guard(sizes.device):
        if nchunks == 1:
            launch.run(kernel, sizes.nsequences, **arguments, **dict.fromkeys(steps, True))
            return
        _run_steps(kernel, steps, sizes, arguments, lambda parts: parts.sum(1))


def lanes_of(sizes: TokenSizes) -> int:
    """Return the threads of a warp: 64 on AMD, else 32."""
    return 64 if launch.arch(sizes.device).startswith("gfx") else 32


def warps_of(sizes: TokenSizes, lane: int) -> int:
    """Return the warps of a program that has all heads of a token, ``lane`` numbers of it in a thread.

    Few warps, of many numbers per thread: heads meet in the softmax, and within a warp that takes no barrier. Heads
    that are nothing but padding in every lane are left out by the compiler.
    """
    lanes = lanes_of(sizes)
    width = sizes.nheads * power_of_two(sizes.head_dim)
    return min(power_of_two(-(-width // (lanes * lane))), 512 // lanes)


def head_groups(table: Table, sizes: TokenSizes) -> dict[str, Any]:
    """Return the arguments that cut a token's heads into groups, a program each; no group has padding among its heads.

    A thread has 16 bytes of a token, and all tokens of a tile. Channels are padded until every lane of a warp has one:
    where lanes have none, Triton 3.6 fails to compile the step DMEMBERS (RemoveLayoutConversions).
    """
    config = table.config(sizes.device, sizes.width, sizes.seqlen, True, sizes.dtype)
    lanes = lanes_of(sizes)
    channels = power_of_two(sizes.head_dim)
    max_heads = max(config["LANE"] * lanes // channels, 1)
    heads = sizes.nheads
    if heads > max_heads:
        heads = next(h for h in (1 << k for k in range(30, -1, -1)) if h <= max_heads and sizes.nheads % h == 0)
    warps, padded = power_of_two(-(-heads * channels * sizes.dtype.itemsize // (lanes * 16))), power_of_two(heads)
    dims = sizes.dims(heads, padded, max(channels, lanes // padded))
    return {"ngroups": max(sizes.nheads, 1) // max(heads, 1), "DIMS": dims, "num_warps": min(warps, 512 // lanes)}


# Tokens that one program adds up one after the other: each addition rounds, and the error grows with their number.
_MAX_CHUNK = 1024


def causal_tile(table: Table, sizes: TokenSizes, alone: bool = False) -> tuple[dict[str, Any], int]:
    """Return the arguments that cut a sequence into tiles and chunks, and the number of its chunks.

    ``alone``: where there are enough sequences to fill the device, each is one chunk.
    """
    config = table.config(sizes.device, sizes.width, sizes.seqlen, True, sizes.dtype)
    heads, channels = power_of_two(sizes.nheads), power_of_two(sizes.head_dim)
    warps = warps_of(sizes, config["LANE"])
    chunk = config["CHUNK"]
    if alone and sizes.nsequences * warps >= 16 * launch.multiprocessors(sizes.device):
        chunk = min(max(sizes.seqlen, 1), _MAX_CHUNK)
    nchunks = max(1, -(-sizes.seqlen // max(chunk, 1)))
    dims = sizes.dims(sizes.nheads, heads, channels)
    tile = {"BLOCK_N": min(config["TOKENS"], power_of_two(sizes.seqlen)), "DIMS": dims}
    shared = {"nchunks": nchunks, "chunk_size": chunk, "STAGES": config["STAGES"], "num_warps": warps}
    return {**tile, **shared}, nchunks


# Elements per tile: Triton passes up to 10 bytes of each through shared memory, of which sm_89 has 99 KB.
_MAX_TILE = 8192


def run_causal(kernel: Any, sizes: TokenSizes, arguments: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
    """Launch the forward in one go, or by chunks; return the sums over all of these."""
    tile, nchunks = causal_tile(CAUSAL_FORWARD, sizes, alone=True)
    dims = tile["DIMS"]
    tile["BLOCK_N"] = min(tile["BLOCK_N"], max(_MAX_TILE // (dims.BLOCK_H * dims.BLOCK_D), 1))
    arguments |= {**tile, "sums": ChunkSums()}
    steps = ("ENERGY", "MEMBERS", "OUTPUT")
    with launch.guard(sizes.device):
        if nchunks == 1:
            launch.run(kernel, sizes.nsequences, **arguments, ENERGY=False, MEMBERS=True, OUTPUT=True)
            return None
        _run_steps(kernel, steps, sizes, arguments, scan_chunks)
        sums = arguments["sums"]
        return sums.first_ptr[:, -1], sums.second_ptr[:, -1]
