"""The running sums between the passes of the causal form, by PyTorch's operators."""

from __future__ import annotations

from torch import Tensor

from crate_kernels._core import packing
from crate_kernels.ops.tssa.call import TSSACall

_SCALE = 2.0**-40  # in which a reciprocal of large sums is a normal number


def saved_sums(w: Tensor, membership: Tensor, call: TSSACall) -> Tensor:
    """Return what ``call.empty_sums`` describes, from w and the membership.

    For forwards whose kernel does not save them. Nobody asks those for sums but a graph that was compiled for other
    launch tables or another GPU.
    """
    sums = call.empty_sums(w)
    if not sums.numel():
        return sums
    if call.cu_seqlens is not None:
        where = packing.layout(call.cu_seqlens, call.max_seqlen, w.shape[0])
        w, membership, call = where.pad(w), where.pad_rows(membership), call.batched(where.mask)
    nheads, head_dim, places, every = w.shape[1], w.shape[-1], sums.shape[1], call.sums_every
    width, covered = nheads * head_dim, places * every
    squares, weights = w[:, :, :covered].double().square() * _SCALE, membership[:, :, :covered].double()
    mask, energies = call.key_padding_mask, squares
    if mask is not None:
        weights, energies = weights * mask[:, None, :covered], squares * mask[:, None, :covered, None]

    def through(values: Tensor) -> Tensor:
        """Return the sums through each place, which comes before the heads, as (sequences, places, numbers)."""
        return values.unflatten(2, (places, every)).sum(3).cumsum(2).transpose(1, 2).flatten(2)

    sums.zero_()
    sums[:, :, :width] = through(weights.unsqueeze(-1) * squares)
    sums[:, :, width : width + nheads] = through(weights) * _SCALE
    sums[:, :, sums.shape[2] - width :] = through(energies)
    return sums
