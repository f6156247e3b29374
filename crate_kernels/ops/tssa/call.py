"""The options of a call of token statistics: the one list of them, from which the ops take their schemas."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from crate_kernels._core import operator, philox


class TSSACall(NamedTuple):
    """Options of either form, forward and backward.

    Attributes:
        key_padding_mask: (batch, seqlen) bool, True = keep; None keeps every token.
        cu_seqlens: (sequences + 1,) int32, offsets of packed sequences; None for a batch.
        max_seqlen: length of the longest packed sequence, 0 for a batch.
        seed: int64 scalar that dropout draws from; None without dropout.
        dropout_p: probability with which 1 / (1 + M) is dropped.
    """

    key_padding_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    max_seqlen: int = 0
    seed: Tensor | None = None
    dropout_p: float = 0.0

    @property
    def packed(self) -> bool:
        """Whether sequences are packed."""
        return self.cu_seqlens is not None

    def batched(self, key_padding_mask: Tensor | None) -> TSSACall:
        """Return the same call for sequences that were packed and are a padded batch now."""
        return self._replace(key_padding_mask=key_padding_mask, cu_seqlens=None, max_seqlen=0)

    def nsequences(self, w: Tensor) -> int:
        """Return the number of sequences."""
        return w.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    def dropout_factor(self, w: Tensor, rows: int, dtype: torch.dtype, first: int = 0) -> Tensor | None:
        """Return the factor on 1 / (1 + M) of ``rows`` tokens, one of all where ``rows`` is 1; None without dropout.

        Shape (batch, nheads, rows, head_dim). ``first`` is the number of the first sequence.
        """
        if self.seed is None:
            return None
        batch, nheads, _, head_dim = w.shape
        heads = first * nheads + philox.head_counter(batch, nheads, w.device)
        tokens, channels = torch.arange(rows, device=w.device)[:, None], torch.arange(head_dim, device=w.device)
        return philox.keep_factor(self.seed, self.dropout_p, heads, tokens, channels, dtype)

    def empty_membership(self, w: Tensor) -> Tensor:
        """Allocate a number per head and token: (batch, nheads, seqlen) or, packed, (nheads, total)."""
        dtype = operator.stat_dtype(w.dtype)
        if self.packed:
            total, nheads, _ = w.shape
            return w.new_empty(nheads, total, dtype=dtype)
        batch, nheads, seqlen, _ = w.shape
        return w.new_empty(batch, nheads, seqlen, dtype=dtype)  # not from w.shape[:3], which takes twice the time

    def empty_channels(self, w: Tensor) -> Tensor:
        """Allocate a number per channel of each sequence, (sequences, nheads, head_dim)."""
        shape = w.shape
        return w.new_empty(self.nsequences(w), shape[1], shape[-1], dtype=operator.stat_dtype(w.dtype))


class Saved(NamedTuple):
    """Tensors that a backward reads beside the gradients of the outputs; the last two are of the full form."""

    w: Tensor
    temp: Tensor
    denom_bias: Tensor | None
    membership: Tensor
    energy: Tensor | None = None
    moment: Tensor | None = None


class State(NamedTuple):
    """The running sums of a cache, as TokenStatsCache has them; decoding changes them in place."""

    energy: Tensor
    weighted: Tensor
    mass: Tensor
    lengths: Tensor

    def advance(self, w: Tensor, key_padding_mask: Tensor | None) -> None:
        """Add the tokens of a step, those that are kept, to the lengths."""
        self.lengths.add_(w.shape[2] if key_padding_mask is None else key_padding_mask.sum(1))
