"""CRATE-alpha: scaling white-box transformers for vision (Yang et al. 2024, arXiv 2405.20299).

CRATE with an overcomplete dictionary, a separate decoder, and a residual around both blocks::

    x = x + MSSA(LN(x))
    x = x + D1 z(LN(x))               z: two proximal steps in D, from zero

The authors published a PyTorch class that loads the sizes B and L, the JAX code that trained all sizes, and CLIPA
checkpoints, whose vision tower is this model under other names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from crate_kernels._core import checks
from crate_kernels.models import crate_alpha_weights
from crate_kernels.models._shared import fields, official, vision
from crate_kernels.models._shared.backbone import BackboneLayout, Classifier, check_head
from crate_kernels.models._shared.base import PreNorm, Stack, path_rates
from crate_kernels.nn import MSSA, OvercompleteISTA


@dataclass(frozen=True)
class CRATEAlphaConfig:
    """Config of a CRATE-alpha: the published constructor's arguments, then constants of its layers.

    Attributes:
        dim, depth, heads, dim_head: width, layers, subspaces and their dimension.
        image_size, patch_size: an int or (height, width), in pixels.
        num_classes: outputs of the head; 0 for none: the model returns the last layer's input.
        channels: channels of the image.
        dropout: in attention and after it; ``emb_dropout``: on the embedded tokens, as in the training code
            (the published PyTorch class takes it and does not use it).
        eta: step size of the proximal steps; ``lmbda``: weight of the l1 norm. Neither is in checkpoints.
        overcomplete_ratio: atoms over ``dim``.
        steps: proximal steps.
        head_eps: eps of the head's LayerNorm; 1e-6 in CLIPA checkpoints.
        pool: ``"cls"``, ``"mean"`` over all tokens, the class token included, or ``"none"``: logits of every token.
        drop_path_rate: part of the images that skip a block in training (stochastic depth): from 0 in the first
            layer to this in the last, as in the training code.
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
    channels: int = 3
    dropout: float = 0.0
    emb_dropout: fields.Rate = 0.0
    eta: float = 0.1
    lmbda: float = 0.1
    overcomplete_ratio: int = 4
    steps: int = 2
    head_eps: float = 1e-5
    pool: str = "cls"
    drop_path_rate: fields.Rate = 0.0
    dynamic_img_size: bool = False
    antialias: bool = False
    grad_checkpointing: bool = False
    backend: str | None = None

    def __post_init__(self) -> None:
        fields.check_types("CRATEAlpha", self)
        vision.grid("CRATEAlpha", self.image_size, self.patch_size)
        check_head("CRATEAlpha", self)
        checks.number("CRATEAlpha", "head_eps", self.head_eps, minimum=0.0)


SIZES = {
    "crate_alpha_ti16": CRATEAlphaConfig(dim=192, depth=12, heads=3, dim_head=64),
    "crate_alpha_s16": CRATEAlphaConfig(dim=576, depth=12, heads=12, dim_head=48),
    "crate_alpha_b32": CRATEAlphaConfig(dim=768, depth=12, heads=12, dim_head=64, patch_size=32),
    "crate_alpha_b16": CRATEAlphaConfig(dim=768, depth=12, heads=12, dim_head=64),
    "crate_alpha_b8": CRATEAlphaConfig(dim=768, depth=12, heads=12, dim_head=64, patch_size=8),
    "crate_alpha_l32": CRATEAlphaConfig(dim=1024, depth=24, heads=16, dim_head=64, patch_size=32),
    "crate_alpha_l14": CRATEAlphaConfig(dim=1024, depth=24, heads=16, dim_head=64, patch_size=14),
    "crate_alpha_l8": CRATEAlphaConfig(dim=1024, depth=24, heads=16, dim_head=64, patch_size=8),
    "crate_alpha_h14": CRATEAlphaConfig(dim=1280, depth=32, heads=16, dim_head=80, patch_size=14),
    "crate_alpha_g14": CRATEAlphaConfig(dim=1408, depth=40, heads=16, dim_head=88, patch_size=14),
    "crate_alpha_G14": CRATEAlphaConfig(dim=1664, depth=48, heads=16, dim_head=104, patch_size=14),
    "crate_alpha_e14": CRATEAlphaConfig(dim=1792, depth=56, heads=16, dim_head=112, patch_size=14),
}


class OvercompleteLayer(nn.ModuleList):
    """One layer: a PreNorm of attention and a PreNorm of the overcomplete step, a list in checkpoints."""

    def forward(self, x: Tensor, return_attention: bool = False, return_key: bool = False) -> Tensor:
        """Return the next tokens (batch, seqlen, dim), or this layer's attention weights or projection instead."""
        attention, code = self
        if return_attention or return_key:
            return attention(x, return_attention=return_attention, return_key=return_key)
        x = attention(x) + x
        return code(x) + x


def _layer(c: CRATEAlphaConfig, drop_path: float) -> OvercompleteLayer:
    attention = MSSA(c.dim, c.heads, c.dim_head, c.dropout, bias_out=False, backend=c.backend)
    step = {"step_size": c.eta, "lambd": c.lmbda, "backend": c.backend}
    code = OvercompleteISTA(c.dim, c.overcomplete_ratio * c.dim, c.steps, **step)
    return OvercompleteLayer(PreNorm(c.dim, block, eps=1e-6, drop_path=drop_path) for block in (attention, code))


class CRATEAlpha(Classifier):
    """Classify images with a white-box transformer of overcomplete dictionaries.

    B/16 has 72,328,936 parameters and L/14 253,650,920, with 1000 classes.

    Parameters, under their published names: ``conv1`` (dim, channels, ph, pw) and bias, ``pos_embedding`` (1,
    patches + 1, dim), ``cls_token`` (1, 1, dim), ``transformer.layers.{i}.0.{norm,fn.qkv,fn.to_out.0}``,
    ``transformer.layers.{i}.1.{norm,fn.D,fn.D1}``, ``mlp_head.{0,1}`` (LN, Linear; no Linear if
    ``num_classes=0``). They are initialised as in the JAX training code.

    Args:
        config: sizes and options; ``crate_kernels.models.create`` has the published ones by name.
    """

    config_class = CRATEAlphaConfig
    layout = BackboneLayout(embedding="cls_token|pos_embedding|conv1", stem="conv1")

    def __init__(self, config: CRATEAlphaConfig) -> None:
        super().__init__(config)
        dim, rates = config.dim, path_rates(config.drop_path_rate, config.depth)
        self.patch_size = vision.pair("CRATEAlpha", "patch_size", config.patch_size)
        self.conv1 = nn.Conv2d(config.channels, dim, self.patch_size, self.patch_size)
        self.pos_embedding = nn.Parameter(torch.empty(1, self.grid[0] * self.grid[1] + 1, dim))
        self.cls_token = nn.Parameter(torch.empty(1, 1, dim))
        self.dropout = nn.Dropout(config.emb_dropout)
        self.transformer = Stack((_layer(config, rate) for rate in rates), config.grad_checkpointing)
        self.mlp_head = nn.Sequential(nn.LayerNorm(dim, config.head_eps), vision.head(dim, config.num_classes))
        self._initialise()

    def _initialise(self) -> None:
        nn.init.normal_(self.pos_embedding, std=0.02)
        nn.init.normal_(self.cls_token, std=1e-6)
        nn.init.kaiming_uniform_(self.conv1.weight)
        nn.init.zeros_(cast(Tensor, self.conv1.bias))
        for module in self.modules():
            if isinstance(module, nn.Linear):
                self._init_linear(module)
            elif isinstance(module, OvercompleteISTA):
                for weight in module.parameters():
                    # For (dim, hidden), JAX takes the fan from the rows, PyTorch from the columns.
                    nn.init.kaiming_uniform_(weight.T)

    def _init_linear(self, linear: nn.Linear) -> None:
        nn.init.normal_(linear.weight, std=0.02)
        if linear.bias is not None:
            nn.init.zeros_(linear.bias)

    def no_weight_decay(self) -> set[str]:
        """Name all but the kernels of the stem, the attention and the head: the training code decays only these."""
        undecayed = (".fn.D", ".fn.D1", "cls_token", "pos_embedding")
        return {name for name, _ in self.named_parameters() if name.endswith(undecayed)}

    def _embed(self, img: Tensor, resize: bool = False) -> Tensor:
        """Return the tokens (batch, patches + 1, dim) that enter the first layer."""
        c = self.config
        vision.check_images("CRATEAlpha", img, c.channels, self.patch_size)
        options = c.image_size, c.patch_size, c.dynamic_img_size, c.antialias
        positions = vision.positions_for("CRATEAlpha", img, self.pos_embedding, resize, *options)
        x = self.conv1(img).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1).to(x.dtype), x), dim=1)
        return self.dropout(x + positions)

    def forward_features(self, img: Tensor, interpolate_pos_encoding: bool = False) -> Tensor:
        """Return the tokens after the last layer, (batch, patches + 1, dim), class token first."""
        return self.transformer(self._embed(img, interpolate_pos_encoding))


Config, Model = CRATEAlphaConfig, CRATEAlpha
SYSTEMS = {
    "crate_alpha": official.family(Config, Model, weights=crate_alpha_weights.read, implied=crate_alpha_weights.implied)
}
