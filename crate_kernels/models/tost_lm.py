"""ToST for language: causal token statistics (Wu et al. 2025, arXiv 2412.17810).

GPT-2 whose attention is causal TSSA, with layer scales::

    x = x + gamma1 CausalTSSA(LN(x))        x = x + gamma2 MLP(LN(x))

Generation keeps running sums: a state of constant size instead of a growing cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crate_kernels.models._shared import official
from crate_kernels.models._shared.language import LanguageConfig, LanguageModel
from crate_kernels.nn import CausalTSSA, _heads, _linear
from crate_kernels.ops.tssa import TokenStatsCache


@dataclass(frozen=True)
class ToSTLMConfig(LanguageConfig):
    """Config of a ToST language model: the published config, then a constant of its blocks.

    Attributes:
        bias: give norms and all projections a bias; False in every published size.
        eta: initial value of the layer scales.
    """

    eta: float = 1e-5


_size = partial(ToSTLMConfig, bias=False)
SIZES = {
    "tost_lm_base": _size(n_layer=12, n_head=12, n_embd=768),
    "tost_lm_medium": _size(n_layer=24, n_head=16, n_embd=1024),
    "tost_lm_large": _size(n_layer=36, n_head=20, n_embd=1280),
}


class ToSTLMMLP(nn.Module):
    """Linear, GELU, Linear, dropout; ``c_fc`` and ``c_proj``."""

    def __init__(self, config: ToSTLMConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, config.bias)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, config.bias)
        self.dropout = nn.Dropout(config.dropout)
        self.backend = config.backend

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, seqlen, n_embd)."""
        hidden = F.gelu(_linear.linear(self.c_fc, x, self.backend))
        return self.dropout(_linear.linear(self.c_proj, hidden, self.backend))


class CausalTSSABlock(nn.Module):
    """Causal token-statistics attention and an MLP, each on normalised tokens and with a scaled residual."""

    def __init__(self, config: ToSTLMConfig) -> None:
        super().__init__()
        sizes = (config.n_embd, config.n_head, config.block_size, config.bias, config.dropout)
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalTSSA(*sizes, backend=config.backend)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = ToSTLMMLP(config)
        self.gamma1 = nn.Parameter(torch.full((config.n_embd,), float(config.eta)))
        self.gamma2 = nn.Parameter(torch.full((config.n_embd,), float(config.eta)))

    def forward(
        self,
        x: Tensor,
        key_padding_mask: Tensor | None = None,
        cache: TokenStatsCache | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        """Return the next tokens (batch, seqlen, n_embd)."""
        _heads.refuse_replayed("ToSTLM", self, cu_seqlens=cu_seqlens)  # padding at the end changes no other token
        packing = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
        update = self.attn(self.ln_1(x), key_padding_mask=key_padding_mask, cache=cache, **packing)
        x = torch.addcmul(x, self.gamma1, update)
        return torch.addcmul(x, self.gamma2, self.mlp(self.ln_2(x)))


class ToSTLM(LanguageModel):
    """Predict the next token by causal token statistics.

    Without positions, base has 109.6M parameters, medium 303.7M and large 655.1M.

    Parameters of block i, under their published names: ``ln_1``, ``attn.{c_attn,c_proj,temp,denom_bias}``, ``ln_2``,
    ``mlp.{c_fc,c_proj}``, ``gamma1``, ``gamma2``; the rest as in every language model here.

    Args:
        config: sizes and options; ``crate_kernels.models.create`` has the published ones by name.
    """

    config_class = ToSTLMConfig

    def __init__(self, config: ToSTLMConfig) -> None:
        blocks = (CausalTSSABlock(config) for _ in range(config.n_layer))
        super().__init__(config, blocks, nn.LayerNorm(config.n_embd, bias=config.bias))

    def no_weight_decay(self) -> set[str]:
        """Name the temperatures and the biases of the denominators."""
        return {name for name, _ in self.named_parameters() if name.endswith((".temp", ".denom_bias"))}


Config, Model = ToSTLMConfig, ToSTLM
SYSTEMS = {"tost_lm": official.family(Config, Model, fixed={"tie_word_embeddings": True}, only={"TSSA": True})}
