"""Attention modules: subspace (MSSA) and token-statistics (TSSA, CausalTSSA)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from crate_kernels import _checks
from crate_kernels.nn import _heads
from crate_kernels.ops.mssa import SubspaceCache, mssa
from crate_kernels.ops.tssa import TokenStatsCache, tssa

__all__ = ["MSSA", "TSSA", "CausalTSSA"]


class MSSA(nn.Module):
    """Attend over tokens whose query, key and value are one projection.

    ``w = x U``, ``o = softmax(scale * w w^T) w`` in each head and ``o W_out + b`` as published
    (CRATE, Yu et al. 2023, arXiv 2306.01129; its code). ``tied=True`` is the form the paper derives
    (Eq. 11-12): ``gamma * o U^T`` with the softmax unscaled and no output parameters.

    Parameters: ``qkv.weight`` (heads * dim_head, dim), no bias; ``to_out.0.weight`` (dim, heads * dim_head)
    and ``to_out.0.bias`` (dim,), absent when tied and when heads == 1 and dim_head == dim.

    Args:
        dim: width of a token.
        heads: number of subspaces.
        dim_head: dimension of a subspace.
        dropout: rate on the attention probabilities and on the output; default 0.
        scale: factor of the scores; default ``dim_head ** -0.5``, 1 when tied.
        bias_out: whether the output projection has a bias; True in CRATE, False in CRATE-alpha.
        tied: whether the output projection is the transpose of the input projection.
        gamma: the factor p / (N eps^2) of the tied form; default 1, which is eps^2 = p / N.
        phi: what turns scores into weights, as in ``crate_kernels.mssa``; default ``"softmax"``.
        threshold: of ``phi="threshold"``.
        causal: whether a token attends only to itself and earlier ones; needed for a cache.
        backend: as in ``crate_kernels.mssa``; default None, the best available.
    """

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
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.dim = _checks.integer("MSSA", "dim", dim, minimum=1)
        self.heads = _checks.integer("MSSA", "heads", heads, minimum=1)
        self.dim_head = _checks.integer("MSSA", "dim_head", dim_head, minimum=1)
        default = 1.0 if tied else dim_head**-0.5
        self.scale = default if scale is None else _checks.number("MSSA", "scale", scale)
        self.tied = _checks.flag("MSSA", "tied", tied)
        self.gamma = _checks.number("MSSA", "gamma", gamma)
        self.phi, self.threshold = phi, threshold
        self.causal = _checks.flag("MSSA", "causal", causal)
        self.backend = backend
        inner = heads * dim_head
        self.qkv = nn.Linear(dim, inner, bias=False)
        self.dropout = nn.Dropout(_checks.number("MSSA", "dropout", dropout, minimum=0.0, below=1.0))
        self.to_out: nn.Module
        if tied:
            self.to_out = nn.Dropout(dropout)
        elif heads == 1 and dim_head == dim:
            self.to_out = nn.Identity()
        else:
            self.to_out = nn.Sequential(nn.Linear(inner, dim, bias=bias_out), nn.Dropout(dropout))

    def forward(
        self,
        x: Tensor,
        return_attention: bool = False,
        return_key: bool = False,
        key_padding_mask: Tensor | None = None,
        cache: SubspaceCache | None = None,
    ) -> Tensor:
        """Attend over ``x``.

        Args:
            x: (batch, seqlen, dim) tokens.
            return_attention: return the weights (batch, heads, seqlen, seqlen) instead, computed naively.
            return_key: return the projection ``qkv(x)`` (batch, seqlen, heads * dim_head) instead.
            key_padding_mask: (batch, seqlen) bool, True = keep; default all.
            cache: a ``SubspaceCache`` to append to and attend over; default none.

        Returns:
            (batch, seqlen, dim), or what was asked for instead.
        """
        _heads.tokens("MSSA", x, self.dim)
        projected = self.qkv(x)
        if return_key:
            return projected
        w = _heads.split(projected, self.heads)
        if return_attention:
            if cache is not None:
                raise ValueError("MSSA: return_attention must be False with a cache")
            return self._attention(w, key_padding_mask)
        out = mssa(
            w,
            causal=self.causal,
            scale=self.scale,
            dropout_p=self.dropout.p if self.dropout.training else 0.0,
            phi=self.phi,
            threshold=self.threshold,
            key_padding_mask=key_padding_mask,
            cache=cache,
            backend=self.backend,
        )
        out = _heads.merge(out)
        if self.tied:
            out = self.gamma * (out @ self.qkv.weight)
        return self.to_out(out)

    def _attention(self, w: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        """Return the weights themselves, which the fused operator never forms."""
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
    moments of the tokens under Pi (ToST, Wu et al. 2024, arXiv 2412.17810, and its code; the
    sums run over all tokens), then a linear projection.

    Parameters: ``qkv.weight`` (dim, dim) and ``qkv.bias`` (dim,) if asked for, ``temp`` (num_heads, 1),
    ``to_out.0.weight`` (dim, dim), ``to_out.0.bias`` (dim,).

    Args:
        dim: width of a token, a multiple of ``num_heads``.
        num_heads: number of subspaces.
        qkv_bias: whether the projection has a bias; default False, True in every published model.
        qk_scale: unused, as in the published class: there are no scores to scale.
        attn_drop: dropout rate on ``1 / (1 + M)``, one draw a channel.
        proj_drop: dropout rate on the output.
        backend: as in ``crate_kernels.tssa``; default None, the best available.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        qkv_bias: bool = False,
        qk_scale: float | None = None,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        *,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.dim = _checks.integer("TSSA", "dim", dim, minimum=1)
        self.heads = _checks.integer("TSSA", "num_heads", num_heads, minimum=1)
        if dim % num_heads:
            raise ValueError(f"TSSA: dim must be a multiple of num_heads = {num_heads}, got {dim}")
        self.backend = backend
        self.attn_drop = nn.Dropout(_checks.number("TSSA", "attn_drop", attn_drop, minimum=0.0, below=1.0))
        self.qkv = nn.Linear(dim, dim, bias=qkv_bias)
        self.temp = nn.Parameter(torch.ones(num_heads, 1))
        self.to_out = nn.Sequential(nn.Linear(dim, dim), nn.Dropout(proj_drop))

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """Attend over ``x``.

        Args:
            x: (batch, seqlen, dim) tokens.
            key_padding_mask: (batch, seqlen) bool, True = keep: others leave the token sums; default all.

        Returns:
            (batch, seqlen, dim).
        """
        _heads.tokens("TSSA", x, self.dim)
        out = tssa(
            _heads.split(self.qkv(x), self.heads),
            self.temp,
            dropout_p=self.attn_drop.p if self.attn_drop.training else 0.0,
            key_padding_mask=key_padding_mask,
            backend=self.backend,
        )
        return self.to_out(_heads.merge(out))


class CausalTSSA(nn.Module):
    """Token-statistics attention whose sums run over earlier tokens: the language form.

    Not a mask on the vision form: the normalisation is a running one and a learned ``denom_bias`` of the
    position enters it (ToST, Wu et al. 2024, arXiv 2412.17810; its language code).

    Parameters: ``c_attn.weight`` (n_embd, n_embd), ``c_proj.weight`` (n_embd, n_embd), a ``.bias`` of each if
    asked for, ``temp`` (n_head, 1), ``denom_bias`` (n_head, block_size, 1).

    Args:
        n_embd: width of a token, a multiple of ``n_head``.
        n_head: number of subspaces.
        block_size: longest sequence.
        bias: whether both projections have a bias; default True, False in the published models.
        dropout: rate on ``1 / (1 + M)`` and on the output; default 0.
        backend: as in ``crate_kernels.tssa``; default None, the best available.
    """

    def __init__(
        self,
        n_embd: int,
        n_head: int,
        block_size: int,
        bias: bool = True,
        dropout: float = 0.0,
        *,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.n_embd = _checks.integer("CausalTSSA", "n_embd", n_embd, minimum=1)
        self.n_head = _checks.integer("CausalTSSA", "n_head", n_head, minimum=1)
        self.block_size = _checks.integer("CausalTSSA", "block_size", block_size, minimum=1)
        if n_embd % n_head:
            raise ValueError(f"CausalTSSA: n_embd must be a multiple of n_head = {n_head}, got {n_embd}")
        self.backend = backend
        self.c_attn = nn.Linear(n_embd, n_embd, bias=bias)
        self.c_proj = nn.Linear(n_embd, n_embd, bias=bias)
        self.attn_dropout = nn.Dropout(_checks.number("CausalTSSA", "dropout", dropout, minimum=0.0, below=1.0))
        self.resid_dropout = nn.Dropout(dropout)
        self.temp = nn.Parameter(torch.ones(n_head, 1))
        self.denom_bias = nn.Parameter(torch.zeros(n_head, block_size, 1))

    def forward(
        self, x: Tensor, key_padding_mask: Tensor | None = None, cache: TokenStatsCache | None = None
    ) -> Tensor:
        """Attend over ``x``.

        Args:
            x: (batch, seqlen, n_embd) tokens, at most ``block_size`` of them counting cached ones.
            key_padding_mask: (batch, seqlen) bool, True = keep; default all.
            cache: a ``TokenStatsCache`` to continue from and update; default none.

        Returns:
            (batch, seqlen, n_embd).
        """
        _heads.tokens("CausalTSSA", x, self.n_embd)
        out = tssa(
            _heads.split(self.c_attn(x), self.n_head),
            self.temp,
            causal=True,
            denom_bias=self.denom_bias,
            dropout_p=self.attn_dropout.p if self.attn_dropout.training else 0.0,
            key_padding_mask=key_padding_mask,
            cache=cache,
            backend=self.backend,
        )
        return self.resid_dropout(self.c_proj(_heads.merge(out)))
