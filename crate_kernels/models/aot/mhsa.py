"""Ordinary attention, with which AoT compares MSSA."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from crate_kernels._core import checks
from crate_kernels.nn import _heads, _symbols


class KeyValueCache:
    """Keys and values of earlier tokens: twice the memory of MSSA's cache. Inference only.

    Args:
        max_seqlen: capacity, in tokens per sequence.

    Attributes:
        keys, values: (batch, heads, max_seqlen, head_dim), in the dtype of the first keys (under autocast, its dtype);
            None before them.
        lengths: (batch,) int64, number of tokens of each sequence; None before the first.
    """

    def __init__(self, max_seqlen: int) -> None:
        self._capacity = checks.integer("KeyValueCache", "max_seqlen", max_seqlen, minimum=1)
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.lengths: Tensor | None = None
        self._bound = 0  # upper bound of the lengths

    @property
    def max_seqlen(self) -> int:
        """Capacity, in tokens per sequence."""
        return self._capacity if self.keys is None else self.keys.shape[2]

    def truncate(self, lengths: int | Tensor) -> None:
        """Keep at most the first ``lengths`` tokens of each sequence: one length for all, or (batch,)."""
        if self.lengths is None:
            return
        self.lengths.clamp_(max=lengths)
        if isinstance(lengths, int):
            self._bound = min(self._bound, lengths)
        else:
            self._refresh_bound()

    def append(self, key: Tensor, value: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Append (batch, heads, seqlen, head_dim) keys and values.

        Args:
            key, value: keys and values of the new tokens.
            keep: (batch, seqlen) bool, False for padding on the right; None keeps all.

        Returns:
            All keys, all values, both (batch, heads, cached, head_dim), and the mask of those that each new token may
            see, (batch, 1, seqlen, cached) bool.

        Raises:
            ValueError: more tokens than the capacity.
        """
        batch, heads, new, head_dim = key.shape
        if self.keys is None or self.values is None or self.lengths is None:
            self.keys = key.new_zeros(batch, heads, self.max_seqlen, head_dim)
            self.values = torch.zeros_like(self.keys)
            self.lengths = torch.zeros(batch, dtype=torch.int64, device=key.device)
        longest = self._bound + new
        if longest > self.max_seqlen:
            raise ValueError(f"KeyValueCache: capacity is {self.max_seqlen} tokens a sequence, got {longest}")
        positions = self.lengths[:, None] + torch.arange(new, device=key.device)
        index = positions[:, None, :, None].expand(-1, heads, -1, head_dim)
        self.keys.scatter_(2, index, key.to(self.keys.dtype))
        self.values.scatter_(2, index, value.to(self.values.dtype))
        self.lengths += new if keep is None else keep.sum(1)
        self._bound = longest
        if keep is not None:
            self._refresh_bound()
        seen = torch.arange(longest, device=key.device) <= positions[:, None, :, None]
        return self.keys[:, :, :longest].to(key.dtype), self.values[:, :, :longest].to(key.dtype), seen

    def _make_replayable(self, new: int) -> None:
        """Make the next step, of ``new`` tokens, right for any lengths, so that a CUDA graph may replay it."""
        self._bound = self.max_seqlen - new

    def _refresh_bound(self) -> None:
        """Tighten the host's bound where the lengths are free to read."""
        if self.lengths is not None and self.lengths.device.type == "cpu" and not torch.compiler.is_compiling():
            self._bound = max(self.lengths.tolist(), default=0)


class MHSA(nn.Module):
    """Multi-head self-attention with its own query, key and value, computed by PyTorch's operator.

    Parameters: ``qkv.weight`` (3 dim, dim), no bias; ``to_out.0.weight`` (dim, dim) and ``to_out.0.bias`` if asked for.

    Args:
        dim: width of a token, a multiple of ``heads``.
        heads: number of heads.
        dropout: rate on the probabilities and on the output; default 0.
        causal: a token attends only to itself and earlier ones, needed for a cache; default False.
        bias_out: give the output projection a bias; default False.
    """

    def __init__(
        self, dim: int, heads: int, dropout: float = 0.0, *, causal: bool = False, bias_out: bool = False
    ) -> None:
        super().__init__()
        checks.multiple("MHSA", "dim", dim, "heads", heads)
        self.heads = heads
        self.causal = checks.flag("MHSA", "causal", causal)
        self.dropout = nn.Dropout(checks.number("MHSA", "dropout", dropout, minimum=0.0, below=1.0))
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.to_out = nn.Sequential(nn.Linear(dim, dim, bias=bias_out), nn.Dropout(dropout))

    def new_cache(self, batch: int, max_seqlen: int) -> KeyValueCache:
        """Return an empty cache for ``batch`` sequences of up to ``max_seqlen`` tokens."""
        return KeyValueCache(max_seqlen)

    def forward(
        self,
        x: Tensor,
        key_padding_mask: Tensor | None = None,
        cache: KeyValueCache | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        """Return the attention's output (batch, seqlen, dim).

        Args:
            x: tokens, (batch, seqlen, dim).
            key_padding_mask: (batch, seqlen) bool, True = keep; default all.
            cache: a cache to append to and attend over; default none.
            cu_seqlens, max_seqlen: offsets and the greatest length of sequences in one row, as in ``MSSA``, without a
                mask and a cache; default none.
        """
        if isinstance(x, _symbols.Proxy):
            return _symbols.leaf(self, x, key_padding_mask, cache, cu_seqlens, max_seqlen)
        projected = _heads.whole("MHSA", self.qkv(x), 3 * x.shape[-1], _heads.THREE_PARTS)
        query, key, value = projected.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen: Tensor | None = None
        if cu_seqlens is not None:
            token = torch.arange(x.shape[1], dtype=cu_seqlens.dtype, device=x.device)
            sequence = torch.searchsorted(cu_seqlens, token, right=True)
            seen = sequence[:, None] == sequence
            if self.causal:
                seen = seen.tril()
        elif cache is not None:
            key, value, seen = cache.append(key, value, key_padding_mask)
        elif key_padding_mask is not None:
            seen = key_padding_mask[:, None, None, :]
            if self.causal:
                seen = seen & torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        rate = self.dropout.p if self.dropout.training else 0.0
        causal = self.causal and seen is None
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, dropout_p=rate, is_causal=causal)
        return self.to_out(out.transpose(1, 2).flatten(2))
