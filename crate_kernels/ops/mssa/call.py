"""The options of a call of subspace attention: the one list of them, from which the ops take their schemas."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from crate_kernels._core import operator


class MSSACall(NamedTuple):
    """Options of a forward and of its backward.

    Attributes:
        key_padding_mask: (batch, seqlen) bool, True = keep; None keeps every key.
        cu_seqlens: (sequences + 1,) int32, offsets of packed sequences; None for a batch.
        max_seqlen: length of the longest packed sequence, 0 for a batch.
        seed: int64 scalar that dropout draws from; None without dropout.
        causal: each token attends to itself and earlier ones only.
        scale: factor of the scores. None in what torch.compile records for any head_dim: a body fills it in.
        dropout_p: probability with which a weight is dropped.
        threshold: weights above it become it, the others 0; None keeps the softmax.
    """

    key_padding_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    max_seqlen: int = 0
    seed: Tensor | None = None
    causal: bool = False
    scale: float = 1.0
    dropout_p: float = 0.0
    threshold: float | None = None

    @property
    def packed(self) -> bool:
        """Whether sequences are packed."""
        return self.cu_seqlens is not None

    @property
    def padded(self) -> bool:
        """Whether keys may be masked."""
        return self.key_padding_mask is not None

    @property
    def masked(self) -> bool:
        """Whether some token may not see another of its sequence."""
        return self.causal or self.padded

    @property
    def may_be_empty(self) -> bool:
        """Whether a token may not see itself, so that it may see none."""
        return self.padded

    def allowed(self, seqlen: int, device: torch.device, rows: slice | None = None) -> Tensor | None:
        """Return the keys that rows of a batch may see, all rows or some: (batch or 1, 1, rows or 1, seqlen).

        None if every key may be seen.
        """
        mask = None if self.key_padding_mask is None else self.key_padding_mask[:, None, None, :]
        if self.causal:
            position = torch.arange(seqlen, device=device)
            queries = position if rows is None else position[rows]
            past = (position <= queries[:, None])[None, None]
            mask = past if mask is None else mask & past
        return mask

    def filled(self, w: Tensor) -> MSSACall:
        """Return the same call with the default scale of the tokens ``w``, where it has none."""
        return self if self.scale is not None else self._replace(scale=default_scale(w))

    def batched(self, key_padding_mask: Tensor | None) -> MSSACall:
        """Return the same call for sequences that were packed and are a batch now."""
        return self._replace(key_padding_mask=key_padding_mask, cu_seqlens=None, max_seqlen=0)


# A number in a graph is a constant: the default scale stays open there, so that one graph serves every head_dim.
OPTIONAL_SCALE = operator.schema_of(MSSACall).replace("float scale", "float? scale")


class DecodeCall(NamedTuple):
    """Options of a step with a cache.

    Attributes:
        key_padding_mask: (batch, new tokens) bool, right-padded, True = keep; None keeps every token.
        bound: upper bound of the cached lengths, known without waiting for a GPU.
        uniform: every cached length is ``bound``.
        scale: factor of the scores.
        need_lse: compute lse too; it has no element otherwise.
    """

    key_padding_mask: Tensor | None
    bound: int
    uniform: bool
    scale: float
    need_lse: bool

    def rounded(self) -> DecodeCall:
        """Return the call with its bound rounded up to four binary digits, which many steps on a GPU have in common.

        There the bound only decides into how many stretches a sequence is cut.
        """
        step = max(1 << max(self.bound.bit_length() - 4, 0), 64)
        return self._replace(bound=-(-self.bound // step) * step, uniform=False)


def default_scale(w: Tensor) -> float:
    """Return the default factor of the scores, head_dim ** -0.5."""
    return (w.shape[-1] or 1) ** -0.5


def empty_lse(w: Tensor) -> Tensor:
    """Allocate lse for the tokens ``w``: (batch, nheads, seqlen), or (nheads, total) if they are packed."""
    if w.dim() == 3:
        total, nheads, _ = w.shape
        return w.new_empty((nheads, total), dtype=operator.stat_dtype(w.dtype))
    batch, nheads, seqlen, _ = w.shape
    return w.new_empty((batch, nheads, seqlen), dtype=operator.stat_dtype(w.dtype))


def empty_decoded(w: Tensor, call: DecodeCall) -> tuple[Tensor, Tensor]:
    """Allocate out and lse of the new tokens ``w``."""
    return operator.empty_out(w), empty_lse(w) if call.need_lse else w.new_empty(0, dtype=operator.stat_dtype(w.dtype))


@cache
def no_lse(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the empty lse of steps that compute none, allocated once for each device and dtype of tokens."""
    return torch.empty(0, dtype=operator.stat_dtype(dtype), device=device)
