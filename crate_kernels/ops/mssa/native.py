"""Subspace self-attention by csrc/mssa: C++ for tensors on the CPU, CUDA C++ for those on a GPU.

The kernels take tokens in any strides and write into what is allocated here. C++ chooses among them: tensor cores take
16-bit tokens on GPUs of sm_80 and later. Nothing here waits for a GPU; lengths of a cache are read there, so that a
captured graph stays right as they grow.
"""

from __future__ import annotations

import torch
from torch import Tensor

from crate_kernels._core import operator, packing
from crate_kernels._native.extension import library
from crate_kernels._triton import launch
from crate_kernels.ops.mssa.call import Call, DecodeCall, empty_lse, no_lse
from crate_kernels.ops.mssa.splits import cdiv, choose_splits

_GROUP = 4  # new tokens that share a reading of the cache: kGroup of decode_cuda.cu
_MOST_TOKENS = 16  # new tokens per step whose cost is reading the cache; with more it is the products
_LEAST_STRETCH = 64  # cached tokens that are worth a block
_RESIDENT = 4  # blocks per multiprocessor that keep enough reads under way


def forward(w: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Return ``out`` and ``lse``; shapes as in the public function."""
    lib = library(w.device)
    out, lse = operator.empty_out(w), empty_lse(w)
    if call.packed and not lib.cuda:  # CUDA kernels clear what no sequence covers
        packing.clear_uncovered(out, call.cu_seqlens, 0)
        packing.clear_uncovered(lse, call.cu_seqlens, 1)
    lib.mssa_fwd(w, *call, out, lse)
    return out, lse


def backward(dout: Tensor | None, dlse: Tensor | None, w: Tensor, out: Tensor, lse: Tensor, call: Call) -> Tensor:
    """Return the gradient of ``w``; ``dout`` or ``dlse`` is None where that output got no gradient."""
    lib = library(w.device)
    dw, lse = operator.empty_out(w), lse.contiguous()
    dlse = None if dlse is None else dlse.contiguous()
    if lib.cuda:
        scratch = lse.new_empty((2 if call.threshold is None else 3, *lse.shape))
        lib.mssa_bwd(dout, dlse, w, out, lse, *call, dw, scratch)
        return dw
    packing.clear_uncovered(dw, call.cu_seqlens, 0)
    lib.mssa_bwd(dout, dlse, w, out, lse, *call, dw)
    return dw


def decode(w: Tensor, data: Tensor, lengths: Tensor, call: DecodeCall) -> tuple[Tensor, Tensor]:
    """Append ``w`` to the cache and attend over it; ``bound`` only says how long sequences can be, for splitting."""
    lib = library(w.device)
    out, lse = operator.empty_out(w), empty_lse(w) if call.need_lse else no_lse(w.device, w.dtype)
    if not lib.cuda:
        lib.mssa_decode(w, data, lengths, *call, out, lse)
    elif out.numel():
        stretches = _empty_stretches(w, data, call)
        if stretches is not None:
            w = w.contiguous()
            w = w if _is_aligned(w) else w.clone()
        lib.mssa_decode(w, data, lengths, *call, out, lse, *(stretches or (None, None)))
    return out, lse


def _is_aligned(x: Tensor) -> bool:
    """Return whether packs of 16 bytes can be read from the first element on. A view may start anywhere."""
    return x.data_ptr() % 16 == 0


def _empty_stretches(w: Tensor, data: Tensor, call: DecodeCall) -> tuple[Tensor, Tensor] | None:
    """Allocate the results of a step per stretch of the cache: weighted rows, and (maximum, sum) of the weights.

    None for a long block of tokens, or for a cache that cannot be read in packs of 16 bytes: a forward serves those.
    """
    batch, nheads, new, head_dim = w.shape
    in_packs = head_dim * w.element_size() % 16 == 0 and data.is_contiguous() and _is_aligned(data)
    if new > _MOST_TOKENS or not in_packs:
        return None
    blocks = batch * nheads * (1 if new == 1 else cdiv(new, _GROUP))
    processors = _RESIDENT * launch.multiprocessors(w.device)
    splits = choose_splits(blocks, processors, cdiv(call.bound, _LEAST_STRETCH))
    rows = (batch * nheads, splits, new)
    return w.new_empty(*rows, head_dim, dtype=torch.float32), w.new_empty(*rows, 2, dtype=torch.float32)
