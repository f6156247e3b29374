"""How the kernels of token statistics are launched: in tiles and chunks, and with the arguments that they share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from crate_kernels._triton import launch
from crate_kernels._triton.launch import Config, Table
from crate_kernels.ops.tssa.triton.scan import scan_chunks
from crate_kernels.ops.tssa.triton.tables import CAUSAL_FORWARD

# Arguments that no kernel gains from knowing: Triton would compile a variant for 1 and for multiples of 16.
RUNTIME = (
    "nsequences",
    "nchunks",
    "chunk_size",
    "seqlen",
    "total",
    "drop_last",
    "bias_tokens",
    "stride_pb",
    "stride_mb",
)


class Call:
    """The sizes of one call, padded or packed, and the optional tensors that every kernel takes.

    Attributes:
        nsequences, nheads, head_dim: sizes; packed sequences count as the batch.
        seqlen: length of every sequence, or of the longest packed one.
        total: packed rows; 0 for a padded batch.
    """

    def __init__(
        self,
        w: Tensor,
        key_padding_mask: Tensor | None,
        cu_seqlens: Tensor | None,
        max_seqlen: int,
        seed: Tensor | None,
        dropout_p: float,
    ) -> None:
        self.packed = cu_seqlens is not None
        self.device, self.dtype, self.head_dim = w.device, w.dtype, w.shape[-1]
        self.nheads = w.shape[1]
        self.total = w.shape[0] if cu_seqlens is not None else 0
        self.nsequences = cu_seqlens.shape[0] - 1 if cu_seqlens is not None else w.shape[0]
        self.seqlen = max_seqlen if cu_seqlens is not None else w.shape[2]
        # Kernels take the mask's strides, and read offsets one after the other.
        self.mask, self.cu_seqlens = key_padding_mask, None if cu_seqlens is None else cu_seqlens.contiguous()
        self.seed, self.dropout_p = seed, dropout_p

    @property
    def width(self) -> int:
        """Channels of a token, all heads together."""
        return self.nheads * self.head_dim

    def empty_rows(self, *leading: int) -> Tensor:
        """Allocate fp32 for a value a token and head: (..., batch, nheads, seqlen) or (..., nheads, total)."""
        sizes = (self.nheads, self.total) if self.packed else (self.nsequences, self.nheads, self.seqlen)
        return torch.empty(*leading, *sizes, dtype=torch.float32, device=self.device)

    def empty_sums(self, nchunks: int, *leading: int) -> Tensor:
        """Allocate the sums of each chunk: one a channel, and behind all of them one a head."""
        size = self.nheads * (self.head_dim + 1)
        return torch.empty(*leading, self.nsequences, nchunks, size, dtype=torch.float32, device=self.device)

    def strides(self, letter: str, t: Tensor, contiguous: bool = False) -> dict[str, int]:
        """Return the stride arguments of a tensor of tokens; those whose channels are contiguous have no ``d``."""
        strides = (0, t.stride(1), t.stride(0), t.stride(2)) if self.packed else t.stride()
        return {f"stride_{letter}{axis}": s for axis, s in zip("bhs" if contiguous else "bhsd", strides, strict=False)}

    def arguments(self) -> dict[str, Any]:
        """Return the arguments that every kernel takes, by name."""
        mask_b, mask_s = (0, 0) if self.mask is None else self.mask.stride()
        rows_b, rows_h = (0, self.total) if self.packed else (self.nheads * self.seqlen, self.seqlen)
        return {
            "mask_ptr": self.mask,
            "cu_seqlens_ptr": self.cu_seqlens,
            "seed_ptr": self.seed,
            "stride_mb": mask_b,
            "stride_ms": mask_s,
            "stride_pb": rows_b,
            "stride_ph": rows_h,
            "nsequences": self.nsequences,
            "seqlen": self.seqlen,
            "total": self.total,
            "drop_last": 0 if self.seed is None else launch.drop_last(self.dropout_p),
            "inverse_keep": 1.0 / (1.0 - self.dropout_p),
            "NHEADS": self.nheads,
            "HEAD_DIM": self.head_dim,
        }


def power_of_two(size: int) -> int:
    """Return the smallest power of two that holds ``size``."""
    return 1 << max(size - 1, 0).bit_length()


def _chunk_of_full(call: Call, config: Config, tokens: int) -> int:
    """Return how many tokens a program takes: all of a sequence, or as many as give every multiprocessor some."""
    size, device = call.seqlen * call.width * call.dtype.itemsize, launch.multiprocessors(call.device)
    if size <= 1024 * config["WHOLE"] or (size <= 1024 * config["CROWD"] and 2 * call.nsequences >= device):
        return max(call.seqlen, 1)
    share = -(-call.nsequences * call.seqlen // (4 * device))
    return min(max(-(-share // tokens), 4) * tokens, config["CHUNK"])


def run_full(kernel: Any, table: Table, steps: tuple[str, ...], call: Call, arguments: dict[str, Any]) -> None:
    """Launch all ``steps`` at once where a program has a whole sequence, else one after the other.

    In the latter case the sums of each step over its chunks are added up for the next.
    """
    config = table.config(call.device, call.width, call.seqlen, False, call.dtype)
    heads, channels = power_of_two(call.nheads), power_of_two(call.head_dim)
    tokens = min(max(1, config["TILE"] // (heads * channels)), power_of_two(call.seqlen))
    chunk = _chunk_of_full(call, config, tokens)
    nchunks = max(1, -(-call.seqlen // chunk))
    arguments |= {"nchunks": nchunks, "chunk_size": chunk, "STAGES": config["STAGES"]}
    arguments |= {"BLOCK_N": tokens, "BLOCK_H": heads, "BLOCK_D": channels, "num_warps": config["num_warps"]}
    arguments |= {"sums_1_ptr": None, "sums_2_ptr": None, "parts_ptr": None}
    grid = (call.nsequences * nchunks,)
    with launch.guard(call.device):
        if nchunks == 1:
            kernel[grid](**arguments, **dict.fromkeys(steps, True))
            return
        for number, step in enumerate(steps, 1):
            parts = None if step == steps[-1] else call.empty_sums(nchunks)
            kernel[grid](**arguments | {"parts_ptr": parts}, **{name: name == step for name in steps})
            if parts is not None:
                arguments[f"sums_{number}_ptr"] = parts.sum(1)


def causal_tile(table: Table, call: Call, alone: bool = False) -> tuple[dict[str, int], int]:
    """Return the arguments of a tile and a chunk, and how many chunks a sequence has.

    ``alone``: one program takes a whole sequence where there are enough of these to fill the device.
    """
    config = table.config(call.device, call.width, call.seqlen, True, call.dtype)
    heads, channels = power_of_two(call.nheads), power_of_two(call.head_dim)
    # A thread has all tokens of its channels, 16 bytes of them, so that running sums stay within it.
    lanes = 64 if launch.arch(call.device).startswith("gfx") else 32
    warps = min(max(heads * channels * call.dtype.itemsize // (lanes * 16), 1), 512 // lanes)
    chunk = config["CHUNK"]
    if alone and call.nsequences * warps >= 16 * launch.multiprocessors(call.device):
        chunk = call.seqlen
    nchunks = max(1, -(-call.seqlen // max(chunk, 1)))
    tile = {"BLOCK_N": min(config["TOKENS"], power_of_two(call.seqlen)), "BLOCK_H": heads, "BLOCK_D": channels}
    shared = {"nchunks": nchunks, "chunk_size": chunk, "STAGES": config["STAGES"], "num_warps": warps}
    return {**tile, **shared}, nchunks


def run_causal(kernel: Any, call: Call, arguments: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
    """Launch the forward in one go, or by chunks; return the sums over all of these."""
    tile, nchunks = causal_tile(CAUSAL_FORWARD, call, alone=True)
    arguments |= {**tile, "sums_1_ptr": None, "sums_2_ptr": None, "parts_ptr": None}
    grid, steps = (call.nsequences * nchunks,), ("ENERGY", "MEMBERS", "OUTPUT")
    with launch.guard(call.device):
        if nchunks == 1:
            kernel[grid](**arguments, ENERGY=False, MEMBERS=True, OUTPUT=True)
            return None
        for number, step in enumerate(steps, 1):
            parts = None if step == steps[-1] else call.empty_sums(nchunks)
            kernel[grid](**arguments | {"parts_ptr": parts}, **{name: name == step for name in steps})
            if parts is not None:
                scan_chunks(parts)
                arguments[f"sums_{number}_ptr"] = parts
        return arguments["sums_1_ptr"][:, -1], arguments["sums_2_ptr"][:, -1]
