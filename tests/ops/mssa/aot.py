"""Calls of mssa's launchers on meta tensors, for the compiler: no number is computed."""

import torch

from crate_kernels.ops.mssa import rectangular
from crate_kernels.ops.mssa import triton as kernels
from crate_kernels.ops.mssa.call import DecodeCall, MSSACall
from crate_kernels.ops.mssa.rectangular import triton as blocks

HALF, SINGLE = torch.bfloat16, torch.float32


def _empty(batch, nheads, seqlen, head_dim, dtype):
    return torch.empty(batch, seqlen, nheads, head_dim, dtype=dtype, device="meta").transpose(1, 2)


def _call(batch, seqlen, options):
    """Return the options of a call, as the op passes them."""
    causal, head_dim = options.get("causal", False), options["head_dim"]
    dropout_p, threshold = options.get("dropout_p", 0.0), options.get("threshold")
    mask = torch.empty(batch, seqlen, dtype=torch.bool, device="meta") if options.get("padded") else None
    offsets = torch.empty(9, dtype=torch.int32, device="meta") if options.get("packed") else None
    seed = torch.empty((), dtype=torch.int64, device="meta") if dropout_p else None
    return MSSACall(mask, offsets, seqlen, seed, causal, options.get("scale", head_dim**-0.5), dropout_p, threshold)


def forward(seqlen, head_dim, dtype=HALF, batch=64, nheads=12, **options):
    shape = (batch, nheads, seqlen, head_dim)
    w = torch.empty(seqlen * 4, nheads, head_dim, dtype=dtype, device="meta")
    w = w if options.get("packed") else _empty(*shape, dtype)
    return lambda: kernels.forward(w, _call(batch, seqlen, {**options, "head_dim": head_dim}))


def backward(seqlen, head_dim, dtype=HALF, batch=64, nheads=12, dout=True, dlse=False, **options):
    if options.get("packed"):
        w, lse = torch.empty(seqlen * 4, nheads, head_dim, dtype=dtype, device="meta"), (nheads, seqlen * 4)
    else:
        w, lse = _empty(batch, nheads, seqlen, head_dim, dtype), (batch, nheads, seqlen)
    lse = torch.empty(lse, device="meta")
    grads = (w if dout else None, lse if dlse else None)
    return lambda: kernels.backward(*grads, w, w, lse, _call(batch, seqlen, {**options, "head_dim": head_dim}))


def decode(new, head_dim, dtype=HALF, batch=8, nheads=12, padded=False):
    w, cache = _empty(batch, nheads, new, head_dim, dtype), _empty(batch, nheads, 8192, head_dim, dtype)
    lengths = torch.empty(batch, dtype=torch.int32, device="meta")
    mask = torch.empty(batch, new, dtype=torch.bool, device="meta") if padded else None
    return lambda: kernels.decode(w, cache, lengths, DecodeCall(mask, 4096, True, head_dim**-0.5, True))


def _range(start, count, head_dim, dtype, padded):
    """Return a range of the tokens of 4 sequences, with the tensors of a backward."""
    w, numbers = _empty(4, 12, count, head_dim, dtype), torch.empty(4, 12, count, device="meta")
    mask = torch.empty(4, count, dtype=torch.bool, device="meta") if padded else None
    return rectangular.RangeTokens(start, w, mask, w, numbers, numbers, numbers)


def between(backward, seqlen, head_dim, dtype=HALF, causal=False, padded=False, dropout_p=0.0):
    """Return a call of the attention of one range to another that begins in its middle, or of its backward."""
    rows, columns = (_range(start, seqlen, head_dim, dtype, padded) for start in (seqlen // 2, 0))
    seed = torch.empty((), dtype=torch.int64, device="meta") if dropout_p else None
    call = rectangular.RectangularCall(causal=causal, scale=head_dim**-0.5, seed=seed, dropout_p=dropout_p)
    return lambda: (blocks.backward if backward else blocks.forward)(rows, columns, call)


def delta(seqlen, head_dim, dtype=HALF):
    """Return a call of the delta of a range."""
    dout = _empty(4, 12, seqlen, head_dim, dtype)
    return lambda: blocks.delta(dout, dout)
