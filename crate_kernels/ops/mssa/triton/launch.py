"""Subspace self-attention by Triton kernels: the launchers of the forward and the backward; decoding has its own file.

The kernels take any strides and write into what is allocated here; nothing here waits for the device.
"""

# pyright: reportArgumentType=false
# A kernel's constexpr arguments are Python's numbers here.

from __future__ import annotations

import torch
from torch import Tensor

from crate_kernels._core import operator
from crate_kernels._triton import launch
from crate_kernels.ops.mssa.call import Call
from crate_kernels.ops.mssa.splits import cdiv
from crate_kernels.ops.mssa.triton import tables
from crate_kernels.ops.mssa.triton.backward import _mssa_bwd_kernel
from crate_kernels.ops.mssa.triton.decode import decode as decode
from crate_kernels.ops.mssa.triton.delta import _mssa_bwd_delta_kernel
from crate_kernels.ops.mssa.triton.forward import _mssa_fwd_kernel, _mssa_norms_kernel
from crate_kernels.ops.mssa.triton.pairs import MOST_TILES, _mssa_fwd_pairs_kernel
from crate_kernels.ops.mssa.triton.shape import row_strides, shape, strides, tail
from crate_kernels.ops.mssa.triton.tile import parts


def forward(w: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Return ``out`` and ``lse``; shapes as in the public function."""
    key_padding_mask, cu_seqlens, max_seqlen, seed, causal, scale, dropout_p, threshold = call
    sequences, nheads, seqlen, total = shape(w, cu_seqlens, max_seqlen)
    out = operator.empty_out(w)
    lse = w.new_empty((nheads, total) if cu_seqlens is not None else w.shape[:3], dtype=torch.float32)
    if out.numel() == 0:
        return out, lse
    config = dict(tables.FORWARD.config(w.device, w.shape[-1], seqlen, causal, w.dtype))
    # fp16 holds weights down to 2^-24 only: they are small in the bounded form, and never in the online one.
    # A padded query is no key of its own, so that its row has no lower bound.
    bounded = config.pop("BOUNDED") and w.dtype != torch.float16 and scale > 0 and key_padding_mask is None
    softmax = "threshold" if threshold is not None else "bounded" if bounded else "online"
    many = sequences * nheads >= 2 * launch.multiprocessors(w.device)
    packed, padded = cu_seqlens is not None, key_padding_mask is not None
    block_m, block_n = config["BLOCK_M"], config["BLOCK_N"]
    num_m = max(cdiv(seqlen, block_m), 1)
    dims = (w.shape[-1], *parts(w.shape[-1]))
    plain = scale > 0 and threshold is None and not (causal or packed or padded or dropout_p)
    if config.pop("PAIRS") and plain and many and num_m <= MOST_TILES:
        with launch.guard(w.device):
            _mssa_fwd_pairs_kernel[(sequences * nheads,)](
                w,
                out,
                lse,
                *strides(w),
                *strides(out),
                *row_strides(nheads, seqlen, total, packed),
                *(nheads, seqlen, scale),
                *(w.shape[-1], max(1 << (w.shape[-1] - 1).bit_length(), 16), 0, 0),
                BLOCK_M=block_m,
                TAIL_M=tail(seqlen, block_m),
                TILES=num_m,
                PRECISION=launch.dot_precision(w.dtype),
                # The only loop is that of the rare online softmax, whose pipeline would take registers from the pairs.
                **{"num_warps": config["num_warps"], "num_stages": 1},
            )
        return out, lse
    whole = bool(config.pop("WHOLE")) and many and not packed and not (causal and softmax == "bounded")
    sizes = (nheads, seqlen, total, num_m, abs(scale))
    top = None
    with launch.guard(w.device):
        if softmax == "bounded" and not whole:
            top = w.new_empty(sequences * nheads, num_m, dtype=torch.float32)
            _mssa_norms_kernel[(sequences * nheads * num_m,)](
                w, cu_seqlens, top, *strides(w), *sizes, *dims, block_m, packed
            )
        _mssa_fwd_kernel[(sequences * nheads * (1 if whole else num_m),)](
            w,
            out,
            lse,
            None if key_padding_mask is None else key_padding_mask.contiguous(),
            cu_seqlens,
            seed,
            top,
            *strides(w),
            *strides(out),
            *row_strides(nheads, seqlen, total, packed),
            *sizes,
            launch.drop_last(dropout_p) if dropout_p else 0,
            1.0 / (1.0 - dropout_p),
            threshold or 0.0,
            *dims,
            TAIL_M=block_m if packed else tail(seqlen, block_m),
            TAIL_N=block_n if packed or causal else tail(seqlen, block_n),
            SOFTMAX=softmax,
            WHOLE=whole,
            CAUSAL=causal,
            PADDED=padded,
            PACKED=packed,
            DROPOUT=seed is not None,
            NEGATIVE=scale < 0,
            PRECISION=launch.dot_precision(w.dtype),
            **config,
        )
    return out, lse


_DELTA_ROWS = 32  # of the kernel that reads each row once, whose products grow with its blocks


def backward(dout: Tensor | None, dlse: Tensor | None, w: Tensor, out: Tensor, lse: Tensor, call: Call) -> Tensor:
    """Return the gradient of ``w``; ``dout`` or ``dlse`` is None where that output got no gradient."""
    key_padding_mask, cu_seqlens, max_seqlen, seed, causal, scale, dropout_p, threshold = call
    sequences, nheads, seqlen, total = shape(w, cu_seqlens, max_seqlen)
    dw = operator.empty_out(w)
    if dw.numel() == 0:
        return dw
    packed, padded, select = cu_seqlens is not None, key_padding_mask is not None, threshold is not None
    # The selection of phi="threshold" is piecewise constant: its scores get a gradient from lse alone.
    products = dout is not None and not select
    scores = products or dlse is not None
    config = dict(tables.BACKWARD.config(w.device, w.shape[-1], seqlen, causal, w.dtype))
    derived = bool(config.pop("DERIVED")) and scores and not (causal or padded or select)
    block_j, block_i = config["BLOCK_J"], config["BLOCK_I"]
    num_j, num_m = (max(cdiv(seqlen, block), 1) for block in (block_j, _DELTA_ROWS))
    numbers = row_strides(nheads, seqlen, total, packed)
    dims = (w.shape[-1], *parts(w.shape[-1]))
    lse = lse.contiguous()
    dlse = None if dlse is None else dlse.contiguous()
    mask = None if key_padding_mask is None else key_padding_mask.contiguous()
    delta = torch.empty_like(lse)
    extent = w.new_empty(sequences * nheads, num_m, 2, dtype=torch.float32)
    g = w if dout is None else dout
    dropout = (launch.drop_last(dropout_p) if dropout_p else 0, 1.0 / (1.0 - dropout_p))
    precision = launch.dot_precision(w.dtype)
    # Only what it walks over keys for makes kernels of delta differ.
    walks = products and seed is not None
    with launch.guard(w.device):
        if products or derived:
            _mssa_bwd_delta_kernel[(sequences * nheads * num_m,)](
                g,
                out,
                w,
                lse,
                mask if walks else None,
                cu_seqlens,
                seed if walks else None,
                delta,
                extent,
                *strides(g),
                *strides(out),
                *strides(w),
                *numbers,
                *(nheads, seqlen, total, num_m, abs(scale)),
                *dropout,
                *dims,
                BLOCK_M=_DELTA_ROWS,
                PRODUCTS=products,
                CAUSAL=causal and walks,
                PADDED=padded and walks,
                PACKED=packed,
                DROPOUT=walks,
                NEGATIVE=scale < 0 and walks,
                PRECISION=precision,
            )
        _mssa_bwd_kernel[(sequences * nheads * num_j,)](
            g,
            w,
            dw,
            lse,
            delta,
            dlse,
            extent,
            mask,
            cu_seqlens,
            seed,
            *strides(g),
            *strides(w),
            *strides(dw),
            *numbers,
            *(nheads, seqlen, total, num_j, num_m, abs(scale)),
            *dropout,
            scale,
            threshold or 0.0,
            *dims,
            TAIL_J=block_j if packed else tail(seqlen, block_j),
            TAIL_I=block_i if packed or causal else tail(seqlen, block_i),
            DERIVED=derived,
            VALUES=dout is not None,
            SCORES=scores,
            PRODUCTS=products,
            SELECT=select and dout is not None,
            HAS_DLSE=dlse is not None,
            CAUSAL=causal,
            PADDED=padded,
            PACKED=packed,
            DROPOUT=seed is not None,
            NEGATIVE=scale < 0,
            PRECISION=precision,
            **config,
        )
    return dw
