"""Calls of ista's launchers on meta tensors, for the compiler: no number is computed."""

import torch

from crate_kernels._triton.table import forced
from crate_kernels.ops.ista.call import ISTACall, OvercompleteCall
from crate_kernels.ops.ista.triton import bits, tables
from crate_kernels.ops.ista.triton import launch as kernels

HALF, SINGLE = torch.bfloat16, torch.float32


def step(tokens, dim, dtype=HALF, compute=None, nonnegative=True):
    """Return a call of ista, forward and backward; float32 tokens with a half ``compute`` are autocast's."""
    x, weight = torch.empty(tokens, dim, dtype=dtype, device="meta"), torch.empty(dim, dim, dtype=dtype, device="meta")
    options = ISTACall(0.1, 0.1, nonnegative, compute or dtype)

    def call():
        y = kernels.forward(x, weight, options)
        kernels.backward(y, x, weight, y, True, True, options)

    return call


def streamed(tokens, dim, dtype=HALF, nonnegative=True):
    """Return the same, by the persistent product where it serves."""
    ordinary = step(tokens, dim, dtype, nonnegative=nonnegative)

    def call():
        with forced(tables.PRODUCT, tables.STREAM):
            ordinary()

    return call


def overcomplete(tokens, dim, hidden, dtype=HALF):
    """Return a call of ista_overcomplete, forward and backward."""
    x, weight = (
        torch.empty(tokens, dim, dtype=dtype, device="meta"),
        torch.empty(dim, hidden, dtype=dtype, device="meta"),
    )
    options = OvercompleteCall(0.1, 0.1, 2)

    def call():
        out, *saved = kernels.forward_overcomplete(x, weight, weight, True, options)
        kernels.backward_overcomplete(out, x, weight, weight, *saved, options)

    return call


def gated(tokens, words, dtype=HALF):
    """Return a call that writes the bits of codes, ``words`` of 32 numbers a token."""
    codes = torch.empty(tokens, 32 * words, dtype=dtype, device="meta")
    return lambda: bits.packed(codes)
