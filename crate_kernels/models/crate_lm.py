"""Causal CRATE: white-box language models (Bai and Ma 2024, arXiv 2410.16443).

GPT-2 without MLPs; no norm follows the last layer::

    x_half = x + CausalMSSA(LN(x))        x = ISTA(LN(x_half))

The paper's later form codes in an overcomplete dictionary of 4 n_embd atoms with two steps, decodes with the
same dictionary, and has a final norm. Generation keeps one tensor per layer, half a key-value cache.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from crate_kernels._core import checks
from crate_kernels.models._shared import official
from crate_kernels.models._shared.language import LanguageConfig, LanguageModel
from crate_kernels.nn import ISTA, CausalMSSA
from crate_kernels.ops.ista import ista_overcomplete
from crate_kernels.ops.mssa import SubspaceCache


@dataclass(frozen=True)
class CRATELMConfig(LanguageConfig):
    """Config of a causal CRATE: the published config, then constants of its blocks.

    Attributes:
        bias: part of the published config, but unused: norms and ``c_proj`` have a bias, ``c_attn`` has none.
        overcomplete: use the later form, with an overcomplete dictionary and a final norm.
        overcomplete_ratio: atoms over ``n_embd`` in that form; ``steps``: its proximal steps.
        ista: step size of ISTA; ``lambd``: weight of its l1 norm. Neither is in checkpoints.
    """

    overcomplete: bool = False
    overcomplete_ratio: int = 4
    steps: int = 2
    ista: float = 0.1
    lambd: float = 0.1


_overcomplete = partial(CRATELMConfig, overcomplete=True)
SIZES = {
    "crate_lm_base": CRATELMConfig(n_layer=12, n_head=12, n_embd=768),
    "crate_lm_medium": CRATELMConfig(n_layer=24, n_head=16, n_embd=1024),
    "crate_lm_large": CRATELMConfig(n_layer=36, n_head=20, n_embd=1280),
    "crate_lm_xl": CRATELMConfig(n_layer=48, n_head=25, n_embd=1600),
    "crate_lm_overcomplete_1l": _overcomplete(n_layer=1),
    "crate_lm_overcomplete_2l": _overcomplete(n_layer=2),
    "crate_lm_overcomplete_3l": _overcomplete(n_layer=3),
    "crate_lm_overcomplete_6l": _overcomplete(n_layer=6),
    "crate_lm_overcomplete_12l": _overcomplete(n_layer=12),
}


class TiedISTA(nn.Module):
    """Code a token in an overcomplete dictionary and decode it with the same one.

    From ``z = 0``, ``steps`` times ``z <- relu(z + step_size D^T(x - D z) - step_size lambd)``; returns ``D z``.

    Parameters: ``weight`` (hidden, dim), which is D^T. A forward hook on ``code``, an identity, sees the code
    (..., hidden), and its result is decoded instead: analyses switch single atoms there. The fused
    operator never exposes the code, so it is not used while a hook is registered.

    Args:
        dim: width of a token.
        hidden: number of atoms.
        steps: number of proximal steps; default 2.
        step_size: size of the gradient steps; default 0.1.
        lambd: weight of the l1 norm; default 0.1.
        backend: as in ``crate_kernels.ista_overcomplete``; default None, the best available.
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        steps: int = 2,
        *,
        step_size: float = 0.1,
        lambd: float = 0.1,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        checks.integer("TiedISTA", "dim", dim, minimum=1)
        checks.integer("TiedISTA", "hidden", hidden, minimum=1)
        self.steps = checks.integer("TiedISTA", "steps", steps, minimum=1)
        self.step_size = checks.number("TiedISTA", "step_size", step_size, minimum=0.0)
        self.lambd = checks.number("TiedISTA", "lambd", lambd, minimum=0.0)
        self.backend = checks.backend("TiedISTA", backend)
        self.weight = nn.Parameter(nn.init.kaiming_uniform_(torch.empty(hidden, dim)))
        self.code = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Return the decoded code of ``x`` (..., dim), same shape."""
        code = self.code
        if code._forward_hooks or code._forward_pre_hooks or code._backward_hooks or code._backward_pre_hooks:
            return code(self.encode(x)) @ self.weight
        options = {"step_size": self.step_size, "lambd": self.lambd, "steps": self.steps, "backend": self.backend}
        return ista_overcomplete(x, self.weight.T, **options)

    def extra_repr(self) -> str:
        """Return the arguments, for ``print``."""
        hidden, dim = self.weight.shape
        return f"{dim}, {hidden}, steps={self.steps}, step_size={self.step_size}, lambd={self.lambd}"

    def encode(self, x: Tensor) -> Tensor:
        """Return the code (..., hidden) of ``x`` (..., dim)."""
        checks.same_device("TiedISTA", "weight", self.weight, x, "x")  # accelerate fetches it for ``forward`` alone
        bias = self.step_size * self.lambd
        z = torch.relu(self.step_size * (x @ self.weight.T) - bias)
        for _ in range(self.steps - 1):
            z = torch.relu(z + self.step_size * ((x - z @ self.weight) @ self.weight.T) - bias)
        return z


class CausalMSSABlock(nn.Module):
    """Subspace attention with a residual, then sparse coding without a residual."""

    def __init__(self, config: CRATELMConfig) -> None:
        super().__init__()
        dim = config.n_embd
        options = {"step_size": config.ista, "lambd": config.lambd, "backend": config.backend}
        self.prenorm_1 = nn.LayerNorm(dim)
        self.attn = CausalMSSA(dim, config.n_head, True, config.dropout, backend=config.backend)
        self.prenorm_2 = nn.LayerNorm(dim)
        if config.overcomplete:
            self.ista = TiedISTA(dim, config.overcomplete_ratio * dim, config.steps, **options)
        else:
            self.ista = ISTA(dim, **options)

    def forward(
        self,
        x: Tensor,
        key_padding_mask: Tensor | None = None,
        cache: SubspaceCache | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        """Return the next tokens (batch, seqlen, n_embd)."""
        packing = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
        x = x + self.attn(self.prenorm_1(x), key_padding_mask=key_padding_mask, cache=cache, **packing)
        return self.ista(self.prenorm_2(x))


class CRATELM(LanguageModel):
    """Predict the next token with a white-box transformer.

    Without positions, 12 layers of width 768 have 59.9M parameters ("60M"), the overcomplete form 81.1M.

    Parameters of block i, under their published names: ``prenorm_1``, ``attn.{c_attn.weight,c_proj}``, ``prenorm_2``,
    ``ista.weight``; the rest as in every language model here. Analyses override channels by forward hooks: on
    ``attn.c_attn``, on ``ista``, and on ``ista.code`` of the overcomplete form.

    Args:
        config: sizes and options; ``crate_kernels.models.create`` has the published ones by name.
    """

    config_class = CRATELMConfig

    def __init__(self, config: CRATELMConfig) -> None:
        blocks = (CausalMSSABlock(config) for _ in range(config.n_layer))
        super().__init__(config, blocks, nn.LayerNorm(config.n_embd) if config.overcomplete else None)


def _without_masks(bare: dict[str, Any]) -> dict[str, Any]:
    """Drop the causal masks that published checkpoints hold as ``attn.bias``."""
    mask = re.compile(r"transformer\.h\.\d+\.attn\.bias")
    return official.without(bare, lambda name: mask.fullmatch(name) is not None, "causal masks")


def _masks(model: CRATELM) -> dict[str, Tensor]:
    """Return the causal masks that the published class of the first form registers as buffers."""
    size = model.config.block_size
    mask = torch.ones(size, size, device=model.lm_head.weight.device).tril()[None, None]
    return {f"transformer.h.{i}.attn.bias": mask.clone() for i in range(model.config.n_layer)}


Config, Model = CRATELMConfig, CRATELM
_read = partial(official.family, Config, Model, required=("n_head",), weights=_without_masks)
SYSTEMS = {
    "crate_lm": _read(fixed={"overcomplete": False, "tie_word_embeddings": True}, buffers=_masks),
    "crate_lm_overcomplete": _read(fixed={"overcomplete": True, "tie_word_embeddings": True}),
}
