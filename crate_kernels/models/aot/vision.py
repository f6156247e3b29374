"""AoT for images: CRATE's stem, then attention without normalisation.

The paper's models have 22M parameters (MSSA) and 15M (MHSA). Their width and depth are not known, so those in
``SIZES`` are our choice to match the counts: aot_vision_mssa 22,371,496, aot_vision_mhsa 14,915,176.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from crate_kernels.models._shared import vision
from crate_kernels.models._shared.backbone import Classifier, Layout, check_head
from crate_kernels.models.aot.layers import Layer, check_shape
from crate_kernels.models.crate import Patchify


@dataclass(frozen=True)
class AoTVisionConfig:
    """Config of a vision AoT.

    Attributes:
        dim, depth, heads: width of a token, layers, subspaces.
        attention: ``"mssa"``, or ``"mhsa"`` for ordinary attention.
        image_size, patch_size: sides in pixels.
        num_classes: outputs of the head; 0 for none: the model returns the last layer's input.
        channels: channels of the image.
        norm: layer-normalise the input of each attention; False in the paper.
        eta: step size of the attention.
        dropout: rate in and after the attention.
        pool: ``"cls"``, ``"mean"`` over all tokens, the class token included, or ``"none"``: logits of every token.
        grad_checkpointing: recompute each layer in the backward instead of keeping its activations.
        backend: backend of MSSA; None is the best available.

    Raises:
        ValueError, TypeError: an invalid value.
    """

    dim: int
    depth: int
    heads: int
    attention: str = "mssa"
    image_size: int = 224
    patch_size: int = 16
    num_classes: int = 1000
    channels: int = 3
    norm: bool = False
    eta: float = 1.0
    dropout: float = 0.0
    pool: str = "cls"
    grad_checkpointing: bool = False
    backend: str | None = None

    def __post_init__(self) -> None:
        names = ("dim", "depth", "heads", "image_size", "patch_size", "channels")
        check_shape("AoTVision", self, names, "dim", "heads")
        check_head("AoTVision", self)
        if self.image_size % self.patch_size:
            got = f"{self.image_size} by {self.patch_size}"
            raise ValueError(f"AoTVision: image_size must be a multiple of patch_size, got {got}")


SIZES = {
    "aot_vision_mssa": AoTVisionConfig(576, 32, 12),
    "aot_vision_mhsa": AoTVisionConfig(384, 24, 6, attention="mhsa"),
}


class AoTVision(Classifier):
    """Classify images with attention alone.

    No code was published; the stem and the head are CRATE's, with the same parameter names. Parameters:
    ``to_patch_embedding.{1,2,3}.*``, ``pos_embedding`` (1, patches + 1, dim), ``cls_token`` (1, 1, dim),
    ``layers.{i}.*`` as in ``Layer``, ``mlp_head.{0,1}.*``.

    Args:
        config: sizes and options; ``crate_kernels.models.create`` has the published ones by name.
    """

    config_class = AoTVisionConfig
    layout = Layout(blocks="layers")

    def __init__(self, config: AoTVisionConfig) -> None:
        super().__init__(config)
        c = config
        patches, patch_dim = (c.image_size // c.patch_size) ** 2, c.channels * c.patch_size**2
        self.to_patch_embedding = nn.Sequential(
            Patchify("AoTVision", c.channels, c.patch_size),
            nn.LayerNorm(patch_dim),
            nn.Linear(patch_dim, c.dim),
            nn.LayerNorm(c.dim),
        )
        self.pos_embedding = nn.Parameter(torch.randn(1, patches + 1, c.dim))
        self.cls_token = nn.Parameter(torch.randn(1, 1, c.dim))
        options = {"eta": c.eta, "norm": c.norm, "dropout": c.dropout, "backend": c.backend}
        self.layers = nn.ModuleList(Layer(c.dim, c.heads, c.attention, **options) for _ in range(c.depth))
        self.mlp_head = nn.Sequential(nn.LayerNorm(c.dim), vision.head(c.dim, c.num_classes))

    def _embed(self, img: Tensor) -> Tensor:
        """Return the tokens (batch, patches + 1, dim) that enter the first layer."""
        x = self.to_patch_embedding(img)
        vision.check_size("AoTVision", img, self.config.image_size)
        return torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1) + self.pos_embedding


Config, Model = AoTVisionConfig, AoTVision
SYSTEMS: dict = {}  # no code, no checkpoints
