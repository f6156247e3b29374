"""The encoder of CRATE-MAE alone, with a head: for features, a linear probe or fine-tuning (arXiv 2404.02446)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from crate_kernels._core import checks
from crate_kernels.models import crate_mae
from crate_kernels.models._shared import fields, official, vision
from crate_kernels.models._shared.backbone import BackboneLayout, Classifier, check_head
from crate_kernels.models._shared.base import path_rates


@dataclass(frozen=True)
class CRATEMAEEncoderConfig:
    """Config of a CRATE-MAE encoder: the fields of ``CRATEMAEConfig`` that concern it, and a head.

    Attributes:
        embed_dim, depth, num_heads: width, layers and subspaces.
        img_size, patch_size: an int or (height, width), in pixels; images may have any size of whole patches.
        in_chans: channels of the image.
        num_classes: outputs of the head; 0, the default, for none: published checkpoints have no head.
        pool: ``"cls"``, ``"mean"`` over all tokens, the class token included, or ``"none"``: logits of every token.
        lambd: weight of ISTA's l1 norm; ``ista``: its step size. Neither is in checkpoints.
        dropout: in attention and after it.
        norm_eps: eps of the last LayerNorm.
        drop_path_rate: part of the images that skip an attention in training (stochastic depth): from 0 in the first
            layer to this in the last. ISTA has no residual, so it is never skipped.
        antialias: resize the positions to other images with antialiasing, as timm does; False is the published way.
        grad_checkpointing: recompute each layer in the backward instead of keeping its activations.
        backend: backend of the operators; None is the best available.

    Raises:
        ValueError, TypeError: an invalid value.
    """

    embed_dim: int
    depth: int
    num_heads: int
    img_size: vision.Size = 224
    patch_size: vision.Size = 16
    in_chans: int = 3
    num_classes: fields.Count = 0
    pool: str = "cls"
    lambd: float = 0.5
    ista: float = 0.1
    dropout: float = 0.0
    norm_eps: float = 1e-6
    drop_path_rate: fields.Rate = 0.0
    antialias: bool = False
    grad_checkpointing: bool = False
    backend: str | None = None

    def __post_init__(self) -> None:
        fields.check_types("CRATEMAEEncoder", self)
        vision.grid("CRATEMAEEncoder", self.img_size, self.patch_size, "img_size")
        check_head("CRATEMAEEncoder", self)
        for divisor in (self.num_heads, 4):  # the positions are in quarters
            if self.embed_dim % divisor:
                raise ValueError(f"CRATEMAEEncoder: embed_dim must be a multiple of {divisor}, got {self.embed_dim}")
        checks.number("CRATEMAEEncoder", "norm_eps", self.norm_eps, minimum=0.0)


SIZES = {
    name.replace("crate_mae_", "crate_mae_encoder_"): CRATEMAEEncoderConfig(size.embed_dim, size.depth, size.num_heads)
    for name, size in crate_mae.SIZES.items()
}


class CRATEMAEEncoder(Classifier):
    """Classify images, or give their features, with the encoder of CRATE-MAE.

    Parameters: ``patch_embed.proj`` (convolution), ``cls_token``, ``blocks.{i}.layers.0.{0,1}`` and ``norm`` as in
    ``CRATEMAE``; ``head``. The fixed positions, ``decoder_pos_embed`` there, are the buffer ``pos_embed``.

    Args:
        config: sizes and options; ``crate_kernels.models.create`` has the published ones by name.
    """

    config_class = CRATEMAEEncoderConfig
    layout = BackboneLayout(
        blocks="blocks",
        embedding="cls_token|pos_embed|patch_embed",
        stem="patch_embed.proj",
        norm="norm",
        classifier="head",
        fixed_size=False,
        positions="pos_embed",
        dim="embed_dim",
        img_size="img_size",
        in_chans="in_chans",
    )

    pos_embed: Tensor

    def __init__(self, config: CRATEMAEEncoderConfig) -> None:
        super().__init__(config)
        dim, patch = config.embed_dim, vision.pair("CRATEMAEEncoder", "patch_size", config.patch_size)
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(config.in_chans, dim, patch, patch)})
        self.cls_token = nn.Parameter(torch.empty(1, 1, dim))
        positions = vision.sincos_positions(dim, self.grid).to(torch.get_default_device())
        self.register_buffer("pos_embed", positions)  # no parameter: tools ask each of these for a gradient
        rates = path_rates(config.drop_path_rate, config.depth)
        self.blocks = nn.ModuleList(crate_mae.EncoderBlock(config, rate) for rate in rates)
        self.norm = nn.LayerNorm(dim, config.norm_eps)
        self.head = vision.head(dim, config.num_classes)
        nn.init.normal_(self.cls_token, std=0.02)
        crate_mae.initialise(self)

    def _init_linear(self, linear: nn.Linear) -> None:
        crate_mae.init_linear(linear)

    def _embed(self, img: Tensor, resize: bool = False) -> Tensor:
        return crate_mae.embed(self, img, self.pos_embed)

    def _finish(self, tokens: Tensor) -> Tensor:
        return self.norm(tokens)


def _weights(bare: Mapping[str, Any]) -> dict[str, Any]:
    """Take the encoder's weights from a checkpoint of the whole model; those of an encoder are unchanged."""
    if "decoder_pos_embed" not in bare:
        return dict(bare)
    kept = official.without(bare, lambda name: name.startswith(("decoder_", "mask_token")), "the decoder's")
    return {**kept, "pos_embed": bare["decoder_pos_embed"]}


Config, Model = CRATEMAEEncoderConfig, CRATEMAEEncoder
SYSTEMS = {
    "crate_mae_encoder": official.family(
        Config,
        Model,
        weights=_weights,
        ignored=(
            *("decoder_embed_dim", "decoder_depth", "decoder_num_heads", "norm_pix_loss", "mask_ratio"),
            *("use_softmax", "mlp_ratio", "note"),
        ),
        translated={"norm_layer": crate_mae.norm_eps},
        instead="no published class is an encoder alone; give a whole CRATEMAE, which takes the encoder's weights by "
        "load_state_dict(..., strict=False), its pos_embed as decoder_pos_embed; or use save_pretrained",
    )
}
