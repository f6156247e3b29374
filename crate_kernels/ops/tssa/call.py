"""The options of a call of token statistics: the one list of them, from which the ops take their schemas."""

from __future__ import annotations

from typing import Any, NamedTuple

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
        sums_every: tokens between the running sums that a causal forward saves for its backward; 0: it saves none.
    """

    key_padding_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    max_seqlen: int = 0
    seed: Tensor | None = None
    dropout_p: float = 0.0
    sums_every: int = 0

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

    def sums_shape(self, w: Tensor) -> tuple[int, int, int]:
        """Return the sizes of what ``sums_every`` says: (sequences, places, a row), of no place where it is 0.

        A place is behind every ``sums_every``-th token but a sequence's last. Its row has the sums of Pi w^2 by
        channel and of Pi by head, zeros up to a multiple of 4, and the sums of w^2 by channel, all times 2^-40.
        """
        nheads, head_dim = w.shape[1], w.shape[-1]
        places: Any = 0
        if self.sums_every:
            seqlen = self.max_seqlen if self.packed else w.shape[2]
            places = torch.sym_max(-(-seqlen // self.sums_every) - 1, 0)
        width = nheads * head_dim
        return self.nsequences(w), places, (width + nheads + 3) // 4 * 4 + width

    def empty_sums(self, w: Tensor) -> Tensor:
        """Allocate what ``sums_shape`` says."""
        return w.new_empty(self.sums_shape(w), dtype=operator.stat_dtype(w.dtype))


class Saved(NamedTuple):
    """Tensors that a backward reads beside the gradients of the outputs; energy and moment are of the full form."""

    w: Tensor
    temp: Tensor
    denom_bias: Tensor | None
    membership: Tensor
    energy: Tensor | None = None
    moment: Tensor | None = None
    sums: Tensor | None = None


class State(NamedTuple):
    """The running sums of a cache, as TokenStatsCache has them; decoding changes them in place."""

    energy: Tensor
    weighted: Tensor
    mass: Tensor
    lengths: Tensor

    def advance(self, w: Tensor, key_padding_mask: Tensor | None) -> None:
        """Add the tokens of a step, those that are kept, to the lengths."""
        self.lengths.add_(w.shape[2] if key_padding_mask is None else key_padding_mask.sum(1))
