"""Attention modules of the image models: subspace (MSSA) and token-statistics (TSSA)."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor, nn

from crate_kernels._core import checks
from crate_kernels.nn import _heads, _linear, _maps, _symbols
from crate_kernels.ops.mssa import SubspaceCache, mssa
from crate_kernels.ops.tssa import tssa


class MSSA(nn.Module):
    """Attend over tokens whose query, key and value are one projection.

    ``w = x U``, ``o = softmax(scale * w w^T) w`` in each head and ``o W_out + b`` as published
    (CRATE, Yu et al. 2023, arXiv 2306.01129; its code). ``tied=True`` is the form the paper derives
    (Eq. 11-12): ``gamma * o U^T`` with the softmax unscaled and no output parameters. Where ``qkv`` is
    no longer a linear layer (adapted, quantised, offloaded), U is what it maps the identity to.

    Parameters: ``qkv.weight`` (heads * dim_head, dim), no bias; ``to_out.0.weight`` (dim, heads * dim_head)
    and ``to_out.0.bias`` (dim,), absent when tied and when heads == 1 and dim_head == dim.

    Args:
        dim: width of a token.
        heads: number of subspaces; default 8.
        dim_head: dimension of a subspace; default 64.
        dropout: rate on the attention probabilities and on the output; default 0.
        scale: factor of the scores; default ``dim_head ** -0.5``, 1 when tied.
        bias_out: give the output projection a bias; default True, as in CRATE; False in CRATE-alpha.
        tied: use the transpose of the input projection as the output projection; default False.
        gamma: the factor p / (N eps^2) of the tied form; default 1, which is eps^2 = p / N.
        phi: function from scores to weights, as in ``crate_kernels.mssa``; default ``"softmax"``.
        threshold: the threshold for ``phi="threshold"``; default none.
        causal: a token attends only to itself and earlier ones; needed for a cache; default False.
        data_format: ``"channels_last"``: tokens (batch, seqlen, dim); ``"channels_first"``: feature maps (batch, dim,
            height, width), whose pixels are the tokens. Default ``"channels_last"``.
        backend: as in ``crate_kernels.mssa``; default None, the best available.
        device, dtype: of the parameters, as in ``torch.nn.Linear``; default PyTorch's defaults.
    """

    _operator = staticmethod(mssa)  # sequence parallelism puts another in its place

    @checks.suggesting
    def __init__(
        self,
        dim: int,
        heads: int = 8,
        dim_head: int = 64,
        dropout: float = 0.0,
        *,
        scale: float | None = None,
        bias_out: bool = True,
        tied: bool = False,
        gamma: float = 1.0,
        phi: str = "softmax",
        threshold: float | None = None,
        causal: bool = False,
        data_format: str = "channels_last",
        backend: str | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        self.dim = checks.integer("MSSA", "dim", dim, minimum=1)
        self.heads = checks.integer("MSSA", "heads", heads, minimum=1)
        self.dim_head = checks.integer("MSSA", "dim_head", dim_head, minimum=1)
        default = 1.0 if tied else dim_head**-0.5
        self.scale = default if scale is None else checks.number("MSSA", "scale", scale)
        self.tied = checks.flag("MSSA", "tied", tied)
        self.gamma = checks.number("MSSA", "gamma", gamma)
        self.phi, self.threshold = phi, threshold
        self.causal = checks.flag("MSSA", "causal", causal)
        self.data_format = _maps.check_format("MSSA", data_format)
        self.backend = checks.backend("MSSA", backend)
        inner = heads * dim_head
        self.qkv = nn.Linear(dim, inner, bias=False, **factory)
        self.dropout = nn.Dropout(checks.number("MSSA", "dropout", dropout, minimum=0.0, below=1.0))
        self.to_out: nn.Module
        if tied:
            self.to_out = nn.Dropout(dropout)
        elif heads == 1 and dim_head == dim:
            self.to_out = nn.Identity()
        else:
            bias = checks.flag("MSSA", "bias_out", bias_out)
            self.to_out = nn.Sequential(nn.Linear(inner, dim, bias, **factory), nn.Dropout(dropout))

    def new_cache(self, batch: int, max_seqlen: int) -> SubspaceCache:
        """Return an empty cache for ``batch`` sequences of up to ``max_seqlen`` tokens."""
        return _heads.subspace_cache(self.qkv, self.heads, self.dim_head, batch, max_seqlen)

    @checks.closed
    def forward(
        self,
        x: Tensor,
        return_attention: bool = False,
        return_key: bool = False,
        key_padding_mask: Tensor | None = None,
        cache: SubspaceCache | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        **unknown: NoReturn,
    ) -> Tensor:
        """Attend over ``x``.

        Args:
            x: (batch, seqlen, dim) tokens; (batch, dim, height, width) with ``data_format="channels_first"``, a view in
                channels-last memory and else a copy.
            return_attention: return the weights (batch, heads, seqlen, seqlen) instead, without the fused operator;
                default False.
            return_key: return the projection ``qkv(x)`` (batch, seqlen, heads * dim_head) instead; default False.
            key_padding_mask: (batch, seqlen) bool, True = keep; default all. Of a map, (batch, height, width).
            cache: a ``SubspaceCache`` to append to and attend over; default none.
            cu_seqlens: (sequences + 1,) int32, offsets of sequences that follow each other in the one row of x: each
                attends to itself alone; default none.
            max_seqlen: length of the longest of them; required with ``cu_seqlens``.

        Returns:
            (batch, seqlen, dim), or the weights or the projection if asked for; for a map a map, with channels last in
            memory.
        """
        if isinstance(x, _symbols.Proxy):
            options = return_attention, return_key, key_padding_mask, cache, cu_seqlens, max_seqlen
            return _symbols.leaf(self, x, *options)
        if isinstance(unknown, dict) and unknown:
            checks.no_keyword(MSSA.forward, unknown)
        x, size = _maps.tokens("MSSA", x, self.dim, self.data_format)
        if size is not None:
            if cache is not None or cu_seqlens is not None:
                raise ValueError("MSSA: x must be tokens with a cache or cu_seqlens, got a feature map")
            key_padding_mask = _maps.mask_of("MSSA", key_padding_mask, x, size)
        projected = _linear.linear(self.qkv, x, self.backend)
        if return_key:
            return _maps.map_of(projected, size)
        w = _heads.split_local("MSSA", projected, self.dim_head)
        if return_attention:
            if cache is not None or cu_seqlens is not None:
                raise ValueError("MSSA: return_attention must be False with a cache or cu_seqlens")
            return self._attention(w, key_padding_mask)
        out = _heads.attend(
            "MSSA",
            self._operator,
            w,
            cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen,
            causal=self.causal,
            scale=self.scale,
            dropout_p=_heads.dropout_p("MSSA", self.dropout, w, self.heads),
            phi=self.phi,
            threshold=self.threshold,
            key_padding_mask=key_padding_mask,
            cache=cache,
            backend=self.backend,
        )
        out = _heads.merge(out)
        if self.tied:
            _heads.refuse_unseen("MSSA", self.qkv)
            out = self.gamma * _heads.unproject(out, _heads.weight_of(self.qkv, x))
        return _maps.map_of(_linear.sequence(self.to_out, out, self.backend), size)

    def _attention(self, w: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        """Return the attention weights, which the fused operator never stores."""
        scores = (w @ w.transpose(-1, -2)) * self.scale
        seqlen = w.shape[2]
        allowed = torch.ones(seqlen, seqlen, dtype=torch.bool, device=w.device)
        allowed = allowed.tril() if self.causal else allowed
        if key_padding_mask is not None:
            allowed = allowed & key_padding_mask[:, None, None, :]
        if self.phi in ("softmax", "threshold"):
            weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
            if self.phi == "threshold":
                height = self.threshold or 0.0
                weights = torch.where(weights > height, height, 0.0).to(w.dtype)
        else:
            weights = scores.relu() if self.phi == "relu" else scores
        return weights.masked_fill(~allowed, 0.0)


class TSSA(nn.Module):
    """Weigh each token's channels by the token statistics of its subspace: linear time (vision form).

    ``w = x U``, ``Pi = softmax over heads (temp * q)``, ``out = -w Pi / (1 + M)`` with M the second
    moments of the tokens under Pi (ToST, Wu et al. 2025, arXiv 2412.17810, and its code; the
    sums run over all tokens), then a linear projection.

    Parameters: ``qkv.weight`` (dim, dim) and ``qkv.bias`` (dim,) if asked for, ``temp`` (num_heads, 1),
    ``to_out.0.weight`` (dim, dim), ``to_out.0.bias`` (dim,).

    Args:
        dim: width of a token, a multiple of ``num_heads``.
        num_heads: number of subspaces; default 8.
        qkv_bias: give the projection a bias; default False, True in every published model.
        qk_scale: unused, as in the published class: there are no scores to scale.
        attn_drop: dropout rate on ``1 / (1 + M)``, one draw per channel; default 0.
        proj_drop: dropout rate on the output; default 0.
        data_format: ``"channels_last"``: tokens (batch, seqlen, dim); ``"channels_first"``: feature maps (batch, dim,
            height, width), whose pixels are the tokens. Default ``"channels_last"``.
        backend: as in ``crate_kernels.tssa``; default None, the best available.
        device, dtype: of the parameters, as in ``torch.nn.Linear``; default PyTorch's defaults.
    """

    _operator = staticmethod(tssa)  # sequence parallelism puts another in its place

    @checks.suggesting
    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        qkv_bias: bool = False,
        qk_scale: float | None = None,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        *,
        data_format: str = "channels_last",
        backend: str | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        checks.multiple("TSSA", "dim", dim, "num_heads", num_heads)
        self.dim, self.heads = dim, num_heads
        self.data_format = _maps.check_format("TSSA", data_format)
        self.backend = checks.backend("TSSA", backend)
        self.attn_drop = nn.Dropout(checks.number("TSSA", "attn_drop", attn_drop, minimum=0.0, below=1.0))
        self.qkv = nn.Linear(dim, dim, checks.flag("TSSA", "qkv_bias", qkv_bias), **factory)
        self.temp = nn.Parameter(torch.ones(num_heads, 1, **factory))
        rate = checks.number("TSSA", "proj_drop", proj_drop, minimum=0.0, below=1.0)
        self.to_out = nn.Sequential(nn.Linear(dim, dim, **factory), nn.Dropout(rate))

    @checks.closed
    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None, **unknown: NoReturn) -> Tensor:
        """Attend over ``x``.

        Args:
            x: (batch, seqlen, dim) tokens; (batch, dim, height, width) with ``data_format="channels_first"``, a view in
                channels-last memory and else a copy.
            key_padding_mask: (batch, seqlen) bool, True = keep; the token sums leave out the others; default all.
                Of a map, (batch, height, width).

        Returns:
            (batch, seqlen, dim); for a map a map, with channels last in memory.
        """
        if isinstance(x, _symbols.Proxy):
            return _symbols.leaf(self, x, key_padding_mask)
        if isinstance(unknown, dict) and unknown:
            checks.no_keyword(TSSA.forward, unknown)
        _heads.refuse_replayed("TSSA", self, key_padding_mask=key_padding_mask)
        x, size = _maps.tokens("TSSA", x, self.dim, self.data_format)
        if size is not None:
            key_padding_mask = _maps.mask_of("TSSA", key_padding_mask, x, size)
        projected = _heads.whole("TSSA", _linear.linear(self.qkv, x, self.backend), self.dim, _heads.SOFTMAX_OVER_HEADS)
        out = self._operator(
            _heads.split(projected, self.heads),
            self.temp,
            dropout_p=self.attn_drop.p if self.attn_drop.training else 0.0,
            key_padding_mask=key_padding_mask,
            backend=self.backend,
        )
        return _maps.map_of(_linear.sequence(self.to_out, _heads.merge(out), self.backend), size)
