"""CRATE: white-box transformers via sparse rate reduction (Yu et al. 2023, arXiv 2306.01129).

A layer compresses the tokens against its subspaces, then sparsifies them in its dictionary::

    x_half = x + MSSA(LN(x))          -grad Rc, approximately (Eq. 11-12)
    x      = ISTA(LN(x_half))         a proximal step, no residual around it

State-dict keys are the published ones, so that published checkpoints and analyses fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from crate_kernels._core import checks
from crate_kernels.models._shared import fields, official, vision
from crate_kernels.models._shared.backbone import Classifier, check_head
from crate_kernels.models._shared.base import PreNorm, Stack, path_rates
from crate_kernels.nn import ISTA, MSSA, _heads, _linear, _symbols


@dataclass(frozen=True)
class CRATEConfig:
    """Config of a CRATE: the published constructor's arguments, then the papers' variants.

    Attributes:
        dim, depth, heads, dim_head: width, layers, subspaces and their dimension.
        image_size, patch_size: an int or (height, width), in pixels.
        num_classes: outputs of the head; 0 for none: the model returns the last layer's input.
        pool: ``"cls"``, ``"mean"`` over all tokens, the class token included, or ``"none"``: logits of every token.
        channels: channels of the image.
        dropout: in attention and after it; ``emb_dropout``: on the embedded tokens.
        ista: step size of ISTA; ``lambd``: weight of its l1 norm. Neither is in checkpoints.
        attention: ``"mssa"`` as published; ``"tied"`` the derived form (Eq. 11-12); ``"gradient"`` the exact
            gradient of Rc (Eq. 9), which MSSA approximates to first order.
        gamma: p / (N eps^2) of the derived forms; 1 is eps^2 = p / N.
        kappa: step along the subspaces. None is the published residual ``x + MSSA``; a number is
            ``(1 - kappa gamma) x + kappa gamma MSSA`` (Eq. 10), or ``x - kappa grad Rc`` with ``"gradient"``.
        prox: ISTA's step: ``"nonnegative"``, ``"soft"`` or ``"mm"``, as in ``crate_kernels.nn.ISTA``.
        alpha: dim / (N eps^2) for ``prox="mm"``.
        drop_path_rate: part of the images that skip an attention in training (stochastic depth): from 0 in the first
            layer to this in the last. ISTA has no residual, so it is never skipped.
        dynamic_img_size: resize the positions to images of another size at each call, bicubically; False refuses these.
        antialias: resize them with antialiasing, as timm does; False is the way of DINO and of CRATE-MAE.
        grad_checkpointing: recompute each layer in the backward instead of keeping its activations.
        backend: backend of the operators; None is the best available.

    Raises:
        ValueError, TypeError: an invalid value.
    """

    dim: int
    depth: int
    heads: int
    dim_head: int = 64
    image_size: vision.Size = 224
    patch_size: vision.Size = 16
    num_classes: fields.Count = 1000
    pool: str = "cls"
    channels: int = 3
    dropout: float = 0.0
    emb_dropout: fields.Rate = 0.0
    ista: float = 0.1
    lambd: float = 0.1
    attention: str = "mssa"
    gamma: float = 1.0
    kappa: float | None = None
    prox: str = "nonnegative"
    alpha: float = 1.0
    drop_path_rate: fields.Rate = 0.0
    dynamic_img_size: bool = False
    antialias: bool = False
    grad_checkpointing: bool = False
    backend: str | None = None

    def __post_init__(self) -> None:
        fields.check_types("CRATE", self)
        vision.grid("CRATE", self.image_size, self.patch_size)
        check_head("CRATE", self)
        if self.attention not in ("mssa", "tied", "gradient"):
            raise ValueError(f"CRATE: attention must be 'mssa', 'tied' or 'gradient', got {self.attention!r}")


SIZES = {
    "crate_tiny": CRATEConfig(dim=384, depth=12, heads=6, dim_head=64),
    "crate_small": CRATEConfig(dim=576, depth=12, heads=12, dim_head=48),
    "crate_base": CRATEConfig(dim=768, depth=12, heads=12, dim_head=64),
    "crate_large": CRATEConfig(dim=1024, depth=24, heads=16, dim_head=64),
    "crate_base_demo": CRATEConfig(dim=768, depth=12, heads=6, dim_head=128, patch_size=8, num_classes=21842),
    "crate_small_21k": CRATEConfig(dim=384, depth=12, heads=6, dim_head=64, patch_size=8, num_classes=21842),
    "crate_base_21k": CRATEConfig(dim=768, depth=12, heads=12, dim_head=64, patch_size=8, num_classes=21842),
    "crate_base_768": CRATEConfig(dim=768, depth=12, heads=12, dim_head=64, patch_size=8, num_classes=768),
}


class RateGradientStep(nn.Module):
    """Return ``-grad Rc(x | U)`` (CRATE Eq. 9), with the subspaces U as the rows of ``qkv.weight``.

    ``grad Rc = gamma sum_k (I + gamma V_k V_k^T)^-1 V_k U_k^T``, ``V_k = x U_k``. The equal form
    ``V_k (I + gamma V_k^T V_k)^-1`` solves a system of dim_head unknowns instead of seqlen.

    Args:
        dim, heads, dim_head: as in ``crate_kernels.nn.MSSA``.
        gamma: p / (N eps^2); default 1.
    """

    def __init__(self, dim: int, heads: int, dim_head: int, *, gamma: float = 1.0) -> None:
        super().__init__()
        self.heads = checks.integer("RateGradientStep", "heads", heads, minimum=1)
        self.dim_head = checks.integer("RateGradientStep", "dim_head", dim_head, minimum=1)
        self.gamma = checks.number("RateGradientStep", "gamma", gamma, minimum=0.0)
        checks.integer("RateGradientStep", "dim", dim, minimum=1)
        self.qkv = nn.Linear(dim, heads * dim_head, bias=False)

    def forward(self, x: Tensor, return_attention: bool = False, return_key: bool = False) -> Tensor:
        """Return (batch, seqlen, dim); or the projection ``qkv(x)`` if ``return_key``."""
        if return_attention:
            raise ValueError("RateGradientStep: return_attention must be False, an exact gradient has none")
        if isinstance(x, _symbols.Proxy):
            return _symbols.leaf(self, x, return_attention, return_key)
        projected = self.qkv(x)
        if return_key:
            return projected
        # Half precision has no factorisation, and V^T V has the squared condition number of the tokens.
        with torch.autocast(x.device.type, enabled=False):
            v = projected.to(torch.promote_types(projected.dtype, torch.float32))
            v = _heads.split_local("RateGradientStep", v, self.dim_head)  # (batch, heads, seqlen, dim_head)
            identity = torch.eye(v.shape[-1], dtype=v.dtype, device=v.device)
            factor = torch.linalg.cholesky(identity + self.gamma * (v.mT @ v))
            shrunk = _heads.merge(torch.cholesky_solve(v.mT, factor).mT)
        _heads.refuse_unseen("RateGradientStep", self.qkv)
        return -self.gamma * _heads.unproject(shrunk.to(projected.dtype), _heads.weight_of(self.qkv, x))


class ISTALayer(nn.ModuleList):
    """One layer: a PreNorm of attention and a PreNorm of ISTA, a list in checkpoints and analyses.

    Args:
        halves: the two PreNorms.
        kept, step: factors of the stream and of the update.
    """

    def __init__(self, halves: Iterable[nn.Module] = (), kept: float = 1.0, step: float = 1.0) -> None:
        super().__init__(halves)
        self.kept, self.step = kept, step

    def __getitem__(self, idx: int | slice) -> Any:
        """Return a half, or a layer of a slice of them with the same factors."""
        found: Any = super().__getitem__(idx)
        if isinstance(idx, slice):
            found.kept, found.step = self.kept, self.step
        return found

    def forward(self, x: Tensor, return_attention: bool = False, return_key: bool = False) -> Tensor:
        """Return the next tokens, or this layer's attention weights or projection instead."""
        attention, sparsify = self
        if return_attention or return_key:
            return attention(x, return_attention=return_attention, return_key=return_key)
        update = attention(x)
        if (self.kept, self.step) == (1.0, 1.0):
            return sparsify(update + x)
        return sparsify(self.kept * x + self.step * update)


def _layer(c: CRATEConfig, drop_path: float) -> ISTALayer:
    if c.attention == "gradient":
        attention = RateGradientStep(c.dim, c.heads, c.dim_head, gamma=c.gamma)
    else:
        derived = {"tied": c.attention == "tied", "gamma": c.gamma}
        attention = MSSA(c.dim, c.heads, c.dim_head, c.dropout, **derived, backend=c.backend)
    step = {"step_size": c.ista, "lambd": c.lambd, "prox": c.prox, "alpha": c.alpha}
    halves = PreNorm(c.dim, attention, drop_path=drop_path), PreNorm(c.dim, ISTA(c.dim, **step, backend=c.backend))
    return ISTALayer(halves, *_residual(c))


def _residual(config: CRATEConfig) -> tuple[float, float]:
    """Return the factors of the stream and of the update."""
    if config.kappa is None:
        return 1.0, 1.0
    if config.attention == "gradient":
        return 1.0, config.kappa
    return 1.0 - config.kappa * config.gamma, config.kappa * config.gamma


class Patchify(nn.Module):
    """Cut (batch, channels, height, width) into (batch, patches, ph * pw * channels), channel last."""

    def __init__(self, owner: str, channels: int, patch_size: tuple[int, int]) -> None:
        super().__init__()
        self.owner, self.channels, self.patch_size = owner, channels, patch_size

    def forward(self, img: Tensor) -> Tensor:
        """Return the patches."""
        vision.check_images(self.owner, img, self.channels, self.patch_size)
        return vision.patchify(img, self.patch_size)


class Embedding(Classifier):
    """An image model that reads linear projections of patches, behind a class token and with learned positions."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        rows, columns = vision.grid(self._name, config.image_size, config.patch_size)
        ph, pw = self._patch_size()
        patch_dim = config.channels * ph * pw
        self.to_patch_embedding = nn.Sequential(
            Patchify(self._name, config.channels, (ph, pw)),
            nn.LayerNorm(patch_dim),
            nn.Linear(patch_dim, config.dim),
            nn.LayerNorm(config.dim),
        )
        self.pos_embedding = nn.Parameter(torch.randn(1, rows * columns + 1, config.dim))
        self.cls_token = nn.Parameter(torch.randn(1, 1, config.dim))

    def _embed(self, img: Tensor, resize: bool = False) -> Tensor:
        x, c = _linear.sequence(self.to_patch_embedding, img, self.config.backend), self.config
        options = c.image_size, c.patch_size, c.dynamic_img_size, c.antialias
        positions = vision.positions_for(self._name, img, self.pos_embedding, resize, *options)
        return torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1) + positions


class CRATE(Embedding):
    """Classify images with a white-box transformer.

    Parameters, under their published names: ``to_patch_embedding.{1,2,3}`` (LN, Linear, LN of the
    flattened patches), ``pos_embedding`` (1, patches + 1, dim), ``cls_token`` (1, 1, dim),
    ``transformer.layers.{i}.0.{norm,fn.qkv,fn.to_out.0}``, ``transformer.layers.{i}.1.{norm,fn.weight}``,
    ``mlp_head.{0,1}`` (LN, Linear; no Linear if ``num_classes=0``).

    Args:
        config: sizes and options; ``crate_kernels.models.create`` has the published ones by name.
    """

    config_class = CRATEConfig
    _inspected: ClassVar[dict[str, int]] = {"layer": 5, "depth": 11}
    decays_vectors = True

    def __init__(self, config: CRATEConfig) -> None:
        super().__init__(config)
        dim, rates = config.dim, path_rates(config.drop_path_rate, config.depth)
        self.dropout = nn.Dropout(config.emb_dropout)
        self.transformer = Stack((_layer(config, rate) for rate in rates), config.grad_checkpointing)
        self.mlp_head = nn.Sequential(nn.LayerNorm(dim), vision.head(dim, config.num_classes))

    def _embed(self, img: Tensor, resize: bool = False) -> Tensor:
        return self.dropout(super()._embed(img, resize))

    def forward_features(self, img: Tensor, interpolate_pos_encoding: bool = False) -> Tensor:
        """Return the tokens after the last layer, (batch, patches + 1, dim), class token first."""
        return self.transformer(self._embed(img, interpolate_pos_encoding))

    def get_last_selfattention(self, img: Tensor, layer: int | None = 5) -> Tensor:
        """Return the attention weights (batch, heads, tokens, tokens) of a layer, counted from 0; None: the last."""
        return super().get_last_selfattention(img, layer)

    def get_last_key(self, img: Tensor, depth: int | None = 11) -> Tensor:
        """Return the projected tokens ``qkv(LN(x))`` (batch, tokens, heads * dim_head) of a layer; None: the last."""
        return super().get_last_key(img, depth)


Config, Model = CRATEConfig, CRATE


def _has_two_heads(bare: Mapping[str, Any]) -> bool:
    """Say if the last layer is a projection that another layer follows, as in the demo checkpoint."""
    return "head.weight" in bare and isinstance(bare.get("mlp_head.1.weight"), Tensor)


def _weights(bare: dict[str, Any]) -> dict[str, Any]:
    """Leave out a second head, which the published forward does not apply."""
    if not _has_two_heads(bare):
        return bare
    return official.without(bare, lambda name: name.startswith("head."), "a second head, which forward does not apply")


SYSTEMS = {
    "crate": official.family(
        Config,
        Model,
        weights=_weights,
        implied=lambda bare: {"num_classes": len(bare["mlp_head.1.weight"])} if _has_two_heads(bare) else {},
    )
}
