"""Subspace attention as a kernel would be: both ways from the saved tensors, by the formulas of docs/derivations.md."""

import torch

from crate_kernels._core import operator, packing, philox
from crate_kernels.ops.mssa import composite


def _probabilities(w, mask, causal, scale):
    scores = scale * (w @ w.mT)
    allowed = torch.ones_like(scores, dtype=torch.bool)
    if mask is not None:
        allowed &= mask[:, None, None, :]
    if causal:
        allowed &= allowed.new_ones(w.shape[2], w.shape[2]).tril()
    scores = scores.masked_fill(~allowed, -torch.inf)
    return scores.softmax(-1).masked_fill(~allowed.any(-1, keepdim=True), 0.0), scores.logsumexp(-1)


def _factor(w, seed, dropout_p):
    if seed is None:
        return 1.0
    position = torch.arange(w.shape[2], device=w.device)
    heads = philox.head_counter(w.shape[0], w.shape[1], w.device)
    return philox.keep_factor(seed, dropout_p, heads, position[:, None], position, w.dtype)


def _lay_out(x, dtype):
    return x.to(dtype).transpose(1, 2).contiguous().transpose(1, 2)


def forward(w, call):
    mask, cu_seqlens, max_seqlen, seed, causal, scale, dropout_p, threshold = call
    x, where = w.to(operator.stat_dtype(w.dtype)), None
    if cu_seqlens is not None:
        x, where = packing.pad(x, cu_seqlens, max_seqlen)
        mask = where.mask
    probs, lse = _probabilities(x, mask, causal, scale)
    if threshold is not None:
        probs = torch.where(probs > threshold, threshold, 0.0).to(x.dtype)
    out = (probs * _factor(x, seed, dropout_p)) @ x
    if where is not None:
        return where.pack(out).to(w.dtype), where.pack_rows(lse)
    return _lay_out(out, w.dtype), lse


def backward(dout, dlse, w, out, lse, call):
    mask, cu_seqlens, max_seqlen, seed, causal, scale, dropout_p, threshold = call
    x, where = w.to(operator.stat_dtype(w.dtype)), None
    grad = torch.zeros_like(x) if dout is None else dout.to(x.dtype)
    if cu_seqlens is not None:
        where = packing.layout(cu_seqlens, max_seqlen, w.shape[0])
        mask, x, grad = where.mask, where.pad(x), where.pad(grad)
        dlse = None if dlse is None else where.pad_rows(dlse)
    probs, _ = _probabilities(x, mask, causal, scale)
    factor = _factor(x, seed, dropout_p)
    if threshold is not None:
        dprobs, weights = torch.zeros_like(probs), torch.where(probs > threshold, threshold, 0.0).to(x.dtype) * factor
    else:
        dprobs, weights = factor * (grad @ x.mT), probs * factor
    ds = probs * (dprobs - (probs * dprobs).sum(-1, keepdim=True))
    if dlse is not None:
        ds = ds + probs * dlse.unsqueeze(-1)
    dw = weights.mT @ grad + scale * (ds + ds.mT) @ x
    return where.pack(dw).to(w.dtype) if where is not None else _lay_out(dw, w.dtype)


# Decoding differentiates nothing, so there is nothing about it to prove twice.
decode = composite.decode
