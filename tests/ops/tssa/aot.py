"""Calls of tssa's launchers on meta tensors, for the compiler: no number is computed."""

import torch

from crate_kernels.ops.tssa import triton as kernels
from crate_kernels.ops.tssa.call import State, TSSACall

HALF, SINGLE = torch.bfloat16, torch.float32


def _tokens(batch, nheads, seqlen, head_dim, dtype, packed):
    if packed:
        return torch.empty(seqlen * batch // 2, nheads, head_dim, dtype=dtype, device="meta")
    return torch.empty(batch, seqlen, nheads, head_dim, dtype=dtype, device="meta").transpose(1, 2)


def _options(batch, seqlen, padded=False, packed=False, dropout_p=0.0):
    """Return the options of a call, as the op passes them."""
    mask = torch.empty(batch, seqlen, dtype=torch.bool, device="meta") if padded else None
    offsets = torch.empty(batch + 1, dtype=torch.int32, device="meta") if packed else None
    seed = torch.empty((), dtype=torch.int64, device="meta") if dropout_p else None
    return TSSACall(mask, offsets, seqlen if packed else 0, seed, dropout_p)


def full(seqlen, nheads, head_dim, dtype=HALF, batch=256, backward=True, **options):
    """Return a call of the full form, forward and backward."""
    w = _tokens(batch, nheads, seqlen, head_dim, dtype, options.get("packed"))
    temp, rest = torch.empty(nheads, device="meta"), _options(batch, seqlen, **options)

    def call():
        out, *saved = kernels.forward(w, temp, rest)
        if backward:
            kernels.backward(out, saved[0], w, temp, *saved, rest)

    return call


def causal(seqlen, nheads, head_dim, dtype=HALF, batch=16, backward=True, bias=True, **options):
    """Return a call of the causal form, forward and backward."""
    w = _tokens(batch, nheads, seqlen, head_dim, dtype, options.get("packed"))
    temp, rest = torch.empty(nheads, device="meta"), _options(batch, seqlen, **options)
    denom_bias = torch.empty(nheads, seqlen, device="meta") if bias else None

    def call():
        out, *saved = kernels.forward_causal(w, temp, denom_bias, rest)
        if backward:
            kernels.backward_causal(out, saved[0], w, temp, denom_bias, *saved, rest)

    return call


def decode(new, nheads, head_dim, dtype=HALF, batch=16, padded=False):
    w = _tokens(batch, nheads, new, head_dim, dtype, False)
    sums = [torch.empty(batch, nheads, head_dim, device="meta") for _ in range(2)]
    mass, lengths = (torch.empty(batch, nheads, device="meta"), torch.empty(batch, dtype=torch.int32, device="meta"))
    temp, bias = torch.empty(nheads, device="meta"), torch.empty(nheads, 1024, device="meta")
    mask = _options(batch, new, padded=padded).key_padding_mask
    return lambda: kernels.decode(w, temp, bias, State(*sums, mass, lengths), mask)


def chosen(launches, steps):
    """Leave the launches that do any of ``steps``, by the names of a kernel's constants; without any, all."""
    return [launch for launch in launches if not steps or any(launch.arguments.get(step) for step in steps)]
