"""AoT for images: CRATE's stem, then attention without normalisation.

The paper's models have 22M parameters (MSSA) and 15M (MHSA). Their width and depth are not known, so those in
``SIZES`` are our choice to match the counts: aot_vision_mssa 22,371,496, aot_vision_mhsa 14,915,176.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from crate_kernels._core import checks
from crate_kernels.models._shared import fields, vision
from crate_kernels.models._shared.backbone import BackboneLayout, check_head
from crate_kernels.models._shared.base import path_rates
from crate_kernels.models.aot.layers import Layer, check_step
from crate_kernels.models.crate import Embedding


@dataclass(frozen=True)
class AoTVisionConfig:
    """Config of a vision AoT.

    Attributes:
        dim, depth, heads: width of a token, layers, subspaces.
        attention: ``"mssa"``, or ``"mhsa"`` for ordinary attention.
        image_size, patch_size: an int or (height, width), in pixels.
        num_classes: outputs of the head; 0 for none: the model returns the last layer's input.
        channels: channels of the image.
        norm: layer-normalise the input of each attention; False in the paper.
        eta: step size of the attention.
        dropout: rate in and after the attention.
        pool: ``"cls"``, ``"mean"`` over all tokens, the class token included, or ``"none"``: logits of every token.
        drop_path_rate: part of the images that skip an attention in training (stochastic depth): from 0 in the first
            layer to this in the last.
        dynamic_img_size: resize the positions to images of another size at each call, bicubically; False refuses these.
        antialias: resize them with antialiasing, as timm does; False is the way of DINO and of CRATE-MAE.
        grad_checkpointing: recompute each layer in the backward instead of keeping its activations.
        backend: backend of MSSA; None is the best available.

    Raises:
        ValueError, TypeError: an invalid value.
    """

    dim: int
    depth: int
    heads: int
    attention: str = "mssa"
    image_size: vision.Size = 224
    patch_size: vision.Size = 16
    num_classes: fields.Count = 1000
    channels: int = 3
    norm: bool = False
    eta: float = 1.0
    dropout: fields.Rate = 0.0
    pool: str = "cls"
    drop_path_rate: fields.Rate = 0.0
    dynamic_img_size: bool = False
    antialias: bool = False
    grad_checkpointing: bool = False
    backend: str | None = None

    def __post_init__(self) -> None:
        fields.check_types("AoTVision", self)
        checks.multiple("AoTVision", "dim", self.dim, "heads", self.heads)
        vision.grid("AoTVision", self.image_size, self.patch_size)
        check_step("AoTVision", self)
        check_head("AoTVision", self)


SIZES = {
    "aot_vision_mssa": AoTVisionConfig(576, 32, 12),
    "aot_vision_mhsa": AoTVisionConfig(384, 24, 6, attention="mhsa"),
}


class AoTVision(Embedding):
    """Classify images with attention alone.

    No code was published; the stem and the head are CRATE's, with the same parameter names. Parameters:
    ``to_patch_embedding.{1,2,3}.*``, ``pos_embedding`` (1, patches + 1, dim), ``cls_token`` (1, 1, dim),
    ``layers.{i}.*`` as in ``Layer``, ``mlp_head.{0,1}.*``.

    Args:
        config: sizes and options; ``crate_kernels.models.create`` has the published ones by name.
    """

    config_class = AoTVisionConfig
    layout = BackboneLayout(blocks="layers")

    def __init__(self, config: AoTVisionConfig) -> None:
        super().__init__(config)
        c, rates = config, path_rates(config.drop_path_rate, config.depth)
        options = {"eta": c.eta, "norm": c.norm, "dropout": c.dropout, "backend": c.backend}
        self.layers = nn.ModuleList(Layer(c.dim, c.heads, c.attention, **options, drop_path=rate) for rate in rates)
        self.mlp_head = nn.Sequential(nn.LayerNorm(c.dim), vision.head(c.dim, c.num_classes))


Config, Model = AoTVisionConfig, AoTVision
SYSTEMS: dict = {}  # no code, no checkpoints
