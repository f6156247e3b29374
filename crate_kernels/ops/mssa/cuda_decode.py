"""Decoding with a SubspaceCache by CUDA kernels: csrc/mssa/cuda/decode.cuh, and a forward for long blocks of tokens.

Nothing here waits for the device; lengths are read there, so that a captured graph goes on being right as they grow.
"""

from __future__ import annotations

import torch
from torch import Tensor

from crate_kernels._core import operator
from crate_kernels._native import extension
from crate_kernels._triton import launch
from crate_kernels.ops.mssa.call import DecodeCall
from crate_kernels.ops.mssa.splits import cdiv, choose_splits

extension.load_cuda()
_decode = torch.ops.crate_kernels_C.cuda_mssa_decode.default
_append = torch.ops.crate_kernels_C.cuda_mssa_append.default
_takes = torch.ops.crate_kernels_C.cuda_mssa_takes.default
_attend = torch.ops.crate_kernels_C.cuda_mssa_prefill.default
_attend_plainly = torch.ops.crate_kernels_C.cuda_mssa_plain_prefill.default
_advance = torch.ops.crate_kernels_C.cuda_mssa_advance.default

_GROUP = 4  # new tokens that share a reading of the cache: kGroup of decode_cuda.cu
_MOST_TOKENS = 16  # up to which the cache's reading is what a step costs; beyond, its products are
_LEAST_STRETCH = 64  # cached tokens: below, a stretch is no work for a block
_RESIDENT = 4  # blocks that a multiprocessor should have, to have enough reads under way


def decode(w: Tensor, data: Tensor, lengths: Tensor, call: DecodeCall) -> tuple[Tensor, Tensor]:
    """Append ``w`` to the cache and attend over it; ``bound`` only says how long sequences can be, for splitting."""
    key_padding_mask, bound, _, scale, need_lse = call
    batch, nheads, new, head_dim = w.shape
    out = operator.empty_out(w)
    lse = w.new_empty((batch, nheads, new) if need_lse else (0,), dtype=torch.float32)
    if out.numel() == 0:
        return out, lse
    mask = None if key_padding_mask is None else key_padding_mask.contiguous()
    in_packs = head_dim * w.element_size() % 16 == 0 and data.is_contiguous()
    if new > _MOST_TOKENS or not in_packs:
        _append(w, data, lengths, mask)
        (_attend if _takes(w) else _attend_plainly)(w, data, lengths, mask, scale, out, lse)
        _advance(w, data, lengths, mask)
        return out, lse
    blocks = batch * nheads * (1 if new == 1 else cdiv(new, _GROUP))
    processors = _RESIDENT * launch.multiprocessors(w.device)
    splits = choose_splits(blocks, processors, cdiv(bound, _LEAST_STRETCH))
    part = w.new_empty(batch * nheads, splits, new, head_dim, dtype=torch.float32)
    statistics = w.new_empty(batch * nheads, splits, new, 2, dtype=torch.float32)
    _decode(w.contiguous(), data, lengths, mask, scale, part, statistics, out, lse)
    return out, lse
