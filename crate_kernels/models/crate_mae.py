"""CRATE-MAE: masked completion via structured diffusion (Pai et al. 2024, arXiv 2404.02446).

The encoder's layers are CRATE's. A decoder layer inverts an encoder layer, in reverse order::

    encoder    x_half = x + MSSA(LN(x))        x = ISTA(LN(x_half))
    decoder    y = D LN(x)                     x = y - MSSA(LN(y))

Mask tokens replace the removed patches before the encoder, so that encoder and decoder see all tokens. The
paper's Listing 3 prints another decoder; this one is that of the published code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crate_kernels._core import checks
from crate_kernels.models._shared import fields, official, vision
from crate_kernels.models._shared.base import PreNorm, ReferenceModel, path_rates, run
from crate_kernels.models.crate import ISTALayer
from crate_kernels.nn import ISTA, MSSA, _linear, _symbols


@dataclass(frozen=True)
class CRATEMAEConfig:
    """Config of a CRATE-MAE: the published constructor's arguments, then constants of its blocks.

    Attributes:
        embed_dim, depth, num_heads: width, layers and subspaces of the encoder.
        decoder_embed_dim, decoder_depth, decoder_num_heads: the same of the decoder; its width must be the encoder's.
        img_size, patch_size: an int or (height, width), in pixels.
        in_chans: channels of the image.
        norm_pix_loss: compare with patches normalised by their own mean and variance.
        mask_ratio: part of the patches to remove if no mask is given.
        lambd: weight of ISTA's l1 norm: 0.5 for the paper's numbers, 5.0 for its figures; ``ista``: its step
            size. Neither is in checkpoints.
        dropout: in attention and after it.
        use_softmax: use a softmax in the decoder's attention; False uses the scores as weights.
        norm_eps: eps of the outer LayerNorms ``norm`` and ``decoder_norm``: 1e-6 in every published size, 1e-5 in a
            published class that was built without ``norm_layer``. Checkpoints do not contain it.
        drop_path_rate: part of the images that skip an attention in training (stochastic depth): from 0 in the first
            layer to this in the last, of the encoder and again of the decoder. What has no residual is never skipped.
        antialias: resize the positions to other images with antialiasing, as timm does; False is the published way.
        grad_checkpointing: recompute each layer in the backward instead of keeping its activations.
        backend: backend of the operators; None is the best available.

    Raises:
        ValueError, TypeError: an invalid value.
    """

    embed_dim: int
    depth: int
    num_heads: int
    decoder_embed_dim: int
    decoder_depth: int
    decoder_num_heads: int
    img_size: vision.Size = 224
    patch_size: vision.Size = 16
    in_chans: int = 3
    norm_pix_loss: bool = False
    mask_ratio: fields.Rate = 0.75
    lambd: float = 0.5
    ista: float = 0.1
    dropout: float = 0.0
    use_softmax: bool = True
    norm_eps: float = 1e-6
    drop_path_rate: fields.Rate = 0.0
    antialias: bool = False
    grad_checkpointing: bool = False
    backend: str | None = None

    def __post_init__(self) -> None:
        fields.check_types("CRATEMAE", self)
        vision.grid("CRATEMAE", self.img_size, self.patch_size, "img_size")
        if self.decoder_embed_dim != self.embed_dim:
            got = f"{self.decoder_embed_dim} and {self.embed_dim}"
            raise ValueError(f"CRATEMAE: decoder_embed_dim must be embed_dim, since tokens pass as they are; got {got}")
        for name, divisor in (("num_heads", self.num_heads), ("decoder_num_heads", self.decoder_num_heads), ("4", 4)):
            checks.multiple("CRATEMAE", "embed_dim", self.embed_dim, name, divisor)
        checks.number("CRATEMAE", "norm_eps", self.norm_eps, minimum=0.0)


def _size(dim: int, depth: int, heads: int) -> CRATEMAEConfig:
    return CRATEMAEConfig(dim, depth, heads, dim, depth, heads)


SIZES = {
    "crate_mae_tiny": _size(384, 12, 6),
    "crate_mae_small": _size(576, 12, 12),
    "crate_mae_base": _size(768, 12, 12),
    "crate_mae_large": _size(1024, 24, 16),
}


class EncoderBlock(nn.Module):
    """One CRATE layer; ``layers.0`` is (PreNorm of attention, PreNorm of ISTA).

    Args:
        config: of a CRATE-MAE, or of its encoder alone.
        drop_path: part of the images that skip the attention in training; default 0.
    """

    def __init__(self, config: Any, drop_path: float = 0.0) -> None:
        super().__init__()
        dim, heads, backend = config.embed_dim, config.num_heads, config.backend
        attention = MSSA(dim, heads, dim // heads, config.dropout, backend=backend)
        code = ISTA(dim, step_size=config.ista, lambd=config.lambd, backend=backend)
        self.layers = nn.ModuleList([ISTALayer((PreNorm(dim, attention, drop_path=drop_path), PreNorm(dim, code)))])

    def forward(self, x: Tensor, return_attention: bool = False, return_key: bool = False) -> Tensor:
        """Return the next tokens, or this layer's attention weights or projection instead."""
        return self.layers[0](x, return_attention, return_key)


class Dictionary(nn.Module):
    """Decode with a dictionary: ``D x``, without bias and nonlinearity; ``weight`` (dim, dim) as in ISTA."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.init.kaiming_uniform_(torch.empty(dim, dim)))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` (..., dim) times the transposed weight."""
        return F.linear(x, self.weight)


class DecoderBlock(nn.Module):
    """Inverse of a CRATE layer; ``layers.0`` is (PreNorm of the dictionary, PreNorm of attention)."""

    def __init__(self, config: CRATEMAEConfig, drop_path: float = 0.0) -> None:
        super().__init__()
        dim, heads = config.decoder_embed_dim, config.decoder_num_heads
        phi = "softmax" if config.use_softmax else "identity"
        attention = MSSA(dim, heads, dim // heads, config.dropout, phi=phi, backend=config.backend)
        halves = PreNorm(dim, Dictionary(dim)), PreNorm(dim, attention, drop_path=drop_path)
        self.layers = nn.ModuleList([nn.ModuleList(halves)])

    def forward(self, x: Tensor) -> Tensor:
        """Return the next tokens."""
        decode, attention = cast(nn.ModuleList, self.layers[0])
        decoded = decode(x)
        return decoded - attention(decoded)


def init_linear(linear: nn.Linear) -> None:
    """Draw the weights of a linear layer as the published code does."""
    nn.init.xavier_uniform_(linear.weight)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)


def initialise(model: Any) -> None:
    """Draw the stem and all linear layers of a model, as the published code does."""
    nn.init.xavier_uniform_(model.patch_embed["proj"].weight.flatten(1))
    for module in model.modules():
        if isinstance(module, nn.Linear):
            init_linear(module)


def embed(model: Any, imgs: Tensor, positions: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the tokens (batch, patches + 1, dim) that enter the first layer of a model or of its encoder alone."""
    name = model._name
    vision.check_images(name, imgs, model.config.in_chans, vision.pair(name, "patch_size", model.config.patch_size))
    x = model.patch_embed["proj"](imgs)
    positions = vision.resize_positions(positions, model.grid, (x.shape[2], x.shape[3]), model.config.antialias)
    x = x.flatten(2).transpose(1, 2)
    if mask is not None:
        if mask.shape != x.shape[:2]:
            raise ValueError(f"{name}: mask must be (batch, patches) = {tuple(x.shape[:2])}, got {tuple(mask.shape)}")
        x = torch.where(mask[:, :, None].bool(), model.mask_token.to(x.dtype), x)
    return torch.cat((model.cls_token.expand(x.shape[0], -1, -1).to(x.dtype), x), dim=1) + positions


class CRATEMAE(ReferenceModel):
    """Complete masked images with a white-box autoencoder.

    Parameters, under their published names: ``patch_embed.proj`` (convolution), ``cls_token``, ``mask_token``,
    ``blocks.{i}.layers.0.{0,1}``, ``norm``, ``decoder_blocks.{i}.layers.0.{0,1}``, ``decoder_norm``,
    ``decoder_pred``; the fixed positions ``decoder_pos_embed``, which the encoder adds; and ``pos_embed`` and
    ``decoder_embed``, which checkpoints contain but nothing uses. ``decoder_embed`` requires no gradient here:
    DistributedDataParallel would wait for it. Published optimisers list it, and leave it as drawn for lack of one.

    Args:
        config: sizes and options; ``crate_kernels.models.create`` has the published ones by name.
    """

    config_class = CRATEMAEConfig

    def __init__(self, config: CRATEMAEConfig) -> None:
        super().__init__(config)
        dim = config.embed_dim
        self.patch_size = vision.pair("CRATEMAE", "patch_size", config.patch_size)
        patch_dim = config.in_chans * self.patch_size[0] * self.patch_size[1]
        projection = nn.Conv2d(config.in_chans, dim, self.patch_size, self.patch_size)
        self.patch_embed = nn.ModuleDict({"proj": projection})
        self.cls_token = nn.Parameter(torch.empty(1, 1, dim))
        self.mask_token = nn.Parameter(torch.empty(1, 1, dim))
        positions = vision.sincos_positions(dim, self.grid).to(torch.get_default_device())
        self.pos_embed = nn.Parameter(positions, requires_grad=False)
        self.decoder_pos_embed = nn.Parameter(positions.clone(), requires_grad=False)
        rates = path_rates(config.drop_path_rate, config.depth)
        self.blocks = nn.ModuleList(EncoderBlock(config, rate) for rate in rates)
        self.norm = nn.LayerNorm(dim, config.norm_eps)
        self.decoder_embed = nn.Linear(dim, dim).requires_grad_(False)
        rates = path_rates(config.drop_path_rate, config.decoder_depth)
        self.decoder_blocks = nn.ModuleList(DecoderBlock(config, rate) for rate in rates)
        self.decoder_norm = nn.LayerNorm(dim, config.norm_eps)
        self.decoder_pred = nn.Linear(dim, patch_dim)
        nn.init.normal_(self.cls_token, std=0.02)
        nn.init.normal_(self.mask_token, std=0.02)
        initialise(self)

    @property
    def grid(self) -> tuple[int, int]:
        """Number of patches of an image of the config's size, (down, across)."""
        return vision.grid("CRATEMAE", self.config.img_size, self.config.patch_size, "img_size")

    def set_input_size(self, img_size: vision.Size | None = None, patch_size: vision.Size | None = None) -> None:
        """Change the size of the images; the config follows, and both fixed positions are resized to it.

        Images of any size of whole patches are taken before and after: their positions are resized at each call.

        Args:
            img_size: an int or (height, width), in pixels; unchanged by default.
            patch_size: must be that of the model, since the stem is not resized.

        Raises:
            ValueError: a size that is not of whole patches.
            NotImplementedError: another ``patch_size``.
        """
        vision.set_input_size(self, "img_size", img_size, patch_size, "pos_embed", "decoder_pos_embed")

    def patchify(self, imgs: Tensor) -> Tensor:
        """Cut (batch, channels, height, width) into (batch, patches, ph * pw * channels), channel last."""
        vision.check_images("CRATEMAE", imgs, self.config.in_chans, self.patch_size)
        return vision.patchify(imgs, self.patch_size)

    def unpatchify(self, x: Tensor, grid: tuple[int, int] | None = None) -> Tensor:
        """Assemble images from patches (batch, patches, ph * pw * channels).

        Args:
            x: patches, as from ``patchify`` and ``forward``.
            grid: number of patches of the image (down, across); those of ``img_size`` by default.

        Returns:
            (batch, channels, height, width).

        Raises:
            ValueError: another number or size of patches.
        """
        rows, columns = self.grid if grid is None else grid
        wanted = (rows * columns, self.decoder_pred.out_features)
        if x.dim() != 3 or tuple(x.shape[1:]) != wanted:
            layout = "(batch, patches, pixels) = (batch, {}, {})".format(*wanted)
            raise ValueError(
                f"CRATEMAE: x must be {layout} for a grid of {rows} x {columns}, got {tuple(x.shape)}; "
                "grid=(down, across) is for images of another size"
            )
        return vision.unpatchify(x, self.patch_size, (rows, columns))

    def random_mask(
        self, batch: int, patches: int, mask_ratio: float | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        """Draw the patches to remove; ``int(patches * (1 - mask_ratio))`` per image stay.

        Args:
            batch: number of images.
            patches: number of patches per image.
            mask_ratio: part of the patches to remove; the config's by default.
            generator: random generator on the model's device; torch's own by default.

        Returns:
            (batch, patches) float, 1 = removed, on the model's device.
        """
        ratio = self.config.mask_ratio if mask_ratio is None else mask_ratio
        ratio = checks.number("CRATEMAE", "mask_ratio", ratio, minimum=0.0, below=1.0)
        noise = torch.rand(batch, patches, device=self.cls_token.device, generator=generator)
        rank = noise.argsort(dim=1).argsort(dim=1)
        return (rank >= int(patches * (1 - ratio))).to(self.cls_token.dtype)

    def forward_encoder(self, imgs: Tensor, mask: Tensor | None = None, layers: int | None = None) -> Tensor:
        """Return the tokens after ``layers`` layers, (batch, patches + 1, dim); normalised if these are all."""
        x = embed(self, imgs, self.decoder_pos_embed, mask)
        for block in self.blocks[:layers]:
            x = run(self.config.grad_checkpointing, block, x)
        return self.norm(x) if layers is None else x

    def forward_decoder(self, x: Tensor) -> Tensor:
        """Return the patches (batch, patches, ph * pw * channels) predicted from the encoder's tokens."""
        for block in self.decoder_blocks:
            x = run(self.config.grad_checkpointing, block, x)
        # Copied: fully_shard's backward hook on a view is lost if the view is later changed in place.
        return _linear.linear(self.decoder_pred, self.decoder_norm(x), self.config.backend)[:, 1:].clone()

    def forward_loss(self, imgs: Tensor, pred: Tensor, mask: Tensor) -> Tensor:
        """Return the mean squared error over removed patches; 0 if there are none (NaN in the published code)."""
        wide = torch.promote_types(pred.dtype, torch.float32)  # a half-precision mean keeps 3 digits
        target, pred, mask = self.patchify(imgs).to(wide), pred.to(wide), mask.to(wide)
        if self.config.norm_pix_loss:
            target = (target - target.mean(-1, keepdim=True)) / (target.var(-1, keepdim=True) + 1e-6).sqrt()
        error = (pred - target).square().mean(-1)
        return (error * mask).sum() / mask.sum().clamp(min=1)

    @checks.closed
    def forward(
        self,
        imgs: Tensor,
        mask_ratio: float | None = None,
        mask: Tensor | None = None,
        **unknown: NoReturn,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Remove patches and predict them.

        Args:
            imgs: (batch, channels, height, width); for a size other than ``img_size``, positions are
                interpolated bicubically.
            mask_ratio: part of the patches to remove if no mask is given; the config's by default.
            mask: patches to remove, (batch, patches), 1 or True = removed; drawn by default.

        Returns:
            ``(loss, pred, mask)``: the mean squared error over removed patches, all predicted patches (batch, patches,
            ph * pw * channels), and the mask used, as floats.

        Raises:
            ValueError: images or a mask of a wrong shape.
        """
        if isinstance(unknown, dict) and unknown:
            checks.no_keyword(CRATEMAE.forward, unknown)
        _symbols.refuse("CRATEMAE", imgs)
        if mask is None:
            rows, columns = (size // patch for size, patch in zip(imgs.shape[-2:], self.patch_size, strict=True))
            mask = self.random_mask(imgs.shape[0], rows * columns, mask_ratio)
        pred = self.forward_decoder(self.forward_encoder(imgs, mask))
        mask = mask.to(imgs.dtype)
        return self.forward_loss(imgs, pred, mask), pred, mask

    def forward_features(self, imgs: Tensor) -> Tensor:
        """Return the encoder's tokens of whole images, (batch, patches + 1, dim), the input of a linear probe."""
        return self.forward_encoder(imgs)

    def get_selfattention_enc(self, imgs: Tensor, layer: int | None = None) -> Tensor:
        """Return attention weights (batch, heads, tokens, tokens) of an encoder layer; the last by default."""
        return self._inspect(imgs, "layer", layer, return_attention=True)

    def get_last_key_enc(self, imgs: Tensor, depth: int | None = None) -> Tensor:
        """Return projected tokens (batch, tokens, dim) of an encoder layer; the last by default."""
        return self._inspect(imgs, "depth", depth, return_key=True)

    def _inspect(self, imgs: Tensor, name: str, index: int | None, **what: bool) -> Tensor:
        index = vision.layer("CRATEMAE", name, index, len(self.blocks), {})
        return self.blocks[index](self.forward_encoder(imgs, layers=index), **what)


def norm_eps(norm_layer: Any) -> dict[str, Any]:
    """Read the eps of the outer norms from the published argument, a class or a partial of it."""
    norm = norm_layer(1) if callable(norm_layer) else norm_layer
    if not isinstance(norm, nn.LayerNorm):
        raise ValueError(f"from_official: norm_layer must make an nn.LayerNorm, got {norm_layer!r}")
    return {"norm_eps": norm.eps}


Config, Model = CRATEMAEConfig, CRATEMAE
# mlp_ratio: for the ordinary transformer that the published class can also build. note: says how a case was saved.
SYSTEMS = {
    "crate_mae": official.family(Config, Model, ignored=("mlp_ratio", "note"), translated={"norm_layer": norm_eps})
}
