"""Attention modules of the language models, with their caches: CausalMSSA and CausalTSSA."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor, nn

from crate_kernels._core import checks
from crate_kernels.nn import _heads, _linear, _symbols
from crate_kernels.ops.mssa import SubspaceCache, mssa
from crate_kernels.ops.tssa import TokenStatsCache, tssa


class CausalMSSA(nn.Module):
    """Subspace self-attention over earlier tokens, with the names of the language models.

    ``w = x U``, ``o = softmax(scale * w w^T) w`` over each token and those before it, ``o W_out + b``
    (causal CRATE, Bai and Ma 2024, arXiv 2410.16443; its code).

    Parameters: ``c_attn.weight`` (n_embd, n_embd), no bias; ``c_proj.weight`` (n_embd, n_embd) and
    ``c_proj.bias`` (n_embd,) unless ``bias=False``.

    Args:
        n_embd: width of a token, a multiple of ``n_head``.
        n_head: number of subspaces.
        bias: give the output projection a bias; default True, as in every published model.
        dropout: rate on the attention probabilities and on the output; default 0.
        scale: factor of the scores; default ``(n_embd / n_head) ** -0.5``.
        backend: as in ``crate_kernels.mssa``; default None, the best available.
        device, dtype: of the parameters, as in ``torch.nn.Linear``; default PyTorch's defaults.
    """

    _operator = staticmethod(mssa)  # sequence parallelism puts another in its place

    @checks.suggesting
    def __init__(
        self,
        n_embd: int,
        n_head: int,
        bias: bool = True,
        dropout: float = 0.0,
        *,
        scale: float | None = None,
        backend: str | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        checks.multiple("CausalMSSA", "n_embd", n_embd, "n_head", n_head)
        self.n_embd, self.n_head = n_embd, n_head
        self.scale = None if scale is None else checks.number("CausalMSSA", "scale", scale)
        self.backend = checks.backend("CausalMSSA", backend)
        self.c_attn = nn.Linear(n_embd, n_embd, bias=False, **factory)
        self.c_proj = nn.Linear(n_embd, n_embd, checks.flag("CausalMSSA", "bias", bias), **factory)
        self.attn_dropout = nn.Dropout(checks.number("CausalMSSA", "dropout", dropout, minimum=0.0, below=1.0))
        self.resid_dropout = nn.Dropout(dropout)

    def new_cache(self, batch: int, max_seqlen: int) -> SubspaceCache:
        """Return an empty cache for ``batch`` sequences of up to ``max_seqlen`` tokens."""
        return _heads.subspace_cache(self.c_attn, self.n_head, self.n_embd // self.n_head, batch, max_seqlen)

    @checks.closed
    def forward(
        self,
        x: Tensor,
        key_padding_mask: Tensor | None = None,
        cache: SubspaceCache | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        **unknown: NoReturn,
    ) -> Tensor:
        """Attend over ``x``.

        Args:
            x: (batch, seqlen, n_embd) tokens.
            key_padding_mask: (batch, seqlen) bool, True = keep; default all.
            cache: a ``SubspaceCache`` to append to and attend over; default none.
            cu_seqlens: (sequences + 1,) int32, offsets of sequences that follow each other in the one row of x: each
                attends to itself alone; default none.
            max_seqlen: length of the longest of them; required with ``cu_seqlens``.

        Returns:
            (batch, seqlen, n_embd).
        """
        if isinstance(x, _symbols.Proxy):
            return _symbols.leaf(self, x, key_padding_mask, cache, cu_seqlens, max_seqlen)
        if isinstance(unknown, dict) and unknown:
            checks.no_keyword(CausalMSSA.forward, unknown)
        _heads.tokens("CausalMSSA", x, self.n_embd)
        w = _heads.split_local("CausalMSSA", _linear.linear(self.c_attn, x, self.backend), self.n_embd // self.n_head)
        out = _heads.attend(
            "CausalMSSA",
            self._operator,
            w,
            cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen,
            causal=True,
            scale=self.scale,
            dropout_p=_heads.dropout_p("CausalMSSA", self.attn_dropout, w, self.n_head),
            key_padding_mask=key_padding_mask,
            cache=cache,
            backend=self.backend,
        )
        return self.resid_dropout(_linear.linear(self.c_proj, _heads.merge(out), self.backend))


class CausalTSSA(nn.Module):
    """Token-statistics attention whose sums run over earlier tokens: the language form.

    More than the vision form with a mask: the normalisation is a running one, and includes a learned ``denom_bias``
    per position (ToST, Wu et al. 2025, arXiv 2412.17810; its language code).

    Parameters: ``c_attn.weight`` (n_embd, n_embd), ``c_proj.weight`` (n_embd, n_embd), a ``.bias`` of each if
    asked for, ``temp`` (n_head, 1), ``denom_bias`` (n_head, block_size, 1).

    Args:
        n_embd: width of a token, a multiple of ``n_head``.
        n_head: number of subspaces.
        block_size: longest sequence.
        bias: give both projections a bias; default True, False in the published models.
        dropout: rate on ``1 / (1 + M)`` and on the output; default 0.
        backend: as in ``crate_kernels.tssa``; default None, the best available.
        device, dtype: of the parameters, as in ``torch.nn.Linear``; default PyTorch's defaults.
    """

    _operator = staticmethod(tssa)  # sequence parallelism puts another in its place

    @checks.suggesting
    def __init__(
        self,
        n_embd: int,
        n_head: int,
        block_size: int,
        bias: bool = True,
        dropout: float = 0.0,
        *,
        backend: str | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        checks.multiple("CausalTSSA", "n_embd", n_embd, "n_head", n_head)
        self.n_embd, self.n_head = n_embd, n_head
        self.block_size = checks.integer("CausalTSSA", "block_size", block_size, minimum=1)
        self.backend = checks.backend("CausalTSSA", backend)
        self.c_attn = nn.Linear(n_embd, n_embd, checks.flag("CausalTSSA", "bias", bias), **factory)
        self.c_proj = nn.Linear(n_embd, n_embd, bias, **factory)
        self.attn_dropout = nn.Dropout(checks.number("CausalTSSA", "dropout", dropout, minimum=0.0, below=1.0))
        self.resid_dropout = nn.Dropout(dropout)
        self.temp = nn.Parameter(torch.ones(n_head, 1, **factory))
        self.denom_bias = nn.Parameter(torch.zeros(n_head, block_size, 1, **factory))

    def new_cache(self, batch: int, max_seqlen: int | None = None) -> TokenStatsCache:
        """Return an empty cache for ``batch`` sequences; ``max_seqlen`` is ignored: the cache has a constant size."""
        _, device = _heads.kind(self.c_attn)
        return TokenStatsCache(batch, self.n_head, self.n_embd // self.n_head, device=device)

    @checks.closed
    def forward(
        self,
        x: Tensor,
        key_padding_mask: Tensor | None = None,
        cache: TokenStatsCache | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        **unknown: NoReturn,
    ) -> Tensor:
        """Attend over ``x``.

        Args:
            x: (batch, seqlen, n_embd) tokens, at most ``block_size`` a sequence including the cached ones.
            key_padding_mask: (batch, seqlen) bool, True = keep; default all.
            cache: a ``TokenStatsCache`` to continue from and update; default none.
            cu_seqlens: (sequences + 1,) int32, offsets of sequences that follow each other in the one row of x: each
                attends to itself alone; default none.
            max_seqlen: length of the longest of them; required with ``cu_seqlens``.

        Returns:
            (batch, seqlen, n_embd).
        """
        if isinstance(x, _symbols.Proxy):
            return _symbols.leaf(self, x, key_padding_mask, cache, cu_seqlens, max_seqlen)
        if isinstance(unknown, dict) and unknown:
            checks.no_keyword(CausalTSSA.forward, unknown)
        _heads.refuse_replayed("CausalTSSA", self, key_padding_mask=key_padding_mask, cu_seqlens=cu_seqlens)
        _heads.tokens("CausalTSSA", x, self.n_embd)
        projected = _heads.whole(
            "CausalTSSA", _linear.linear(self.c_attn, x, self.backend), self.n_embd, _heads.SOFTMAX_OVER_HEADS
        )
        out = _heads.attend(
            "CausalTSSA",
            self._operator,
            _heads.split(projected, self.n_head),
            self.temp,
            cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen,
            causal=True,
            denom_bias=self.denom_bias,
            dropout_p=self.attn_dropout.p if self.attn_dropout.training else 0.0,
            key_padding_mask=key_padding_mask,
            cache=cache,
            backend=self.backend,
        )
        return self.resid_dropout(_linear.linear(self.c_proj, _heads.merge(out), self.backend))
