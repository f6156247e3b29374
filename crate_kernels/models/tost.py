"""ToST: token statistics transformer, vision (Wu et al. 2025, arXiv 2412.17810).

Blocks of token-statistics attention, linear in the number of tokens, run on the patches alone. Then a class token
is added, and two class-attention blocks (CaiT) collect the patches in it::

    x = x + gamma1 TSSA(LN(x))        x = x + gamma2 MLP(LN(x))

The frame is XCiT's: a convolutional stem, Fourier positions, layer scales. Paper and code differ in one number:
ToST-M has 71,481,064 parameters in the code, 68.1M in the paper.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crate_kernels._core import checks, operator
from crate_kernels.models._shared import fields, official, vision
from crate_kernels.models._shared.backbone import BackboneLayout, Classifier, check_head
from crate_kernels.models._shared.base import DropPath, run
from crate_kernels.nn import TSSA, _heads, _linear, _symbols


@dataclass(frozen=True)
class ToSTConfig:
    """Config of a ToST: the published constructor's arguments.

    Attributes:
        embed_dim, depth, num_heads: width, blocks and subspaces.
        img_size: an int or (height, width); inputs may have any size of whole patches, since positions are computed.
        patch_size: 8 or 16, an int or (height, width): the stem halves the image three or four times. Where one side is
            halved three times and the other four, the first convolution halves the other alone.
        in_chans: channels of the image.
        num_classes: outputs of the head; 0 for none: the model returns the last layer's input.
        mlp_ratio: hidden width of the MLPs over ``embed_dim``.
        qkv_bias: give the attention's projection a bias.
        qk_scale: factor of the class attention's scores; None is head_dim ** -0.5.
        drop_rate: dropout after attention, in MLPs and on the embedded tokens; ``attn_drop_rate``: in attention;
            ``drop_path_rate``: part of the images that skip a block's branch, the same in every block.
        cls_attn_layers: number of class-attention blocks.
        use_pos: add positions; without them ``pos_embeder`` stays in checkpoints and requires no gradient.
        eta: initial value of the layer scales.
        tokens_norm: class attention normalises all tokens before its MLP; False: the class token alone.
        distillation: return ``(logits, logits)`` in training, as published, for the published recipe's loss.
        pool: ``"cls"``, ``"mean"`` over all tokens, the class token included, or ``"none"``: logits of every token.
        grad_checkpointing: recompute each block in the backward instead of keeping its activations.
        backend: backend of the operator; None is the best available.

    Raises:
        ValueError, TypeError: an invalid value.
    """

    embed_dim: int = 768
    depth: int = 12
    num_heads: int = 12
    img_size: vision.Size = 224
    patch_size: vision.Size = 16
    in_chans: int = 3
    num_classes: fields.Count = 1000
    mlp_ratio: float = 4.0
    qkv_bias: bool = True
    qk_scale: float | None = None
    drop_rate: fields.Rate = 0.0
    attn_drop_rate: fields.Rate = 0.0
    drop_path_rate: fields.Rate = 0.0
    cls_attn_layers: fields.Count = 2
    use_pos: bool = True
    eta: float = 1.0
    tokens_norm: bool = False
    distillation: bool = False
    pool: str = "cls"
    grad_checkpointing: bool = False
    backend: str | None = None

    def __post_init__(self) -> None:
        fields.check_types("ToST", self)
        vision.grid("ToST", self.img_size, self.patch_size, "img_size")
        patch = vision.pair("ToST", "patch_size", self.patch_size)
        if not {8, 16}.issuperset(patch):
            raise ValueError(f"ToST: patch_size must be 8 or 16, got {self.patch_size}")
        check_head("ToST", self)
        if self.embed_dim % self.num_heads or self.embed_dim % (max(patch) // 2):
            wanted = f"num_heads = {self.num_heads} and of {max(patch) // 2} (the stem)"
            raise ValueError(f"ToST: embed_dim must be a multiple of {wanted}, got {self.embed_dim}")


_size = partial(ToSTConfig, tokens_norm=True)
SIZES = {
    "tost_tiny_12": _size(192, 12, 4),
    "tost_small_12": _size(384, 12, 8),
    "tost_tiny_24": _size(192, 24, 4, eta=1e-5),
    "tost_small_24": _size(384, 24, 8, eta=1e-5),
    "tost_medium_24": _size(512, 24, 8, eta=1e-5),
    "tost_large_24": _size(768, 24, 16, eta=1e-5),
    "tost_tiny_12_p8": _size(192, 12, 4, patch_size=8),
    "tost_small_12_p8": _size(384, 12, 8, patch_size=8),
    "tost_tiny_24_p8": _size(192, 24, 4, patch_size=8, eta=1e-5),
    "tost_small_24_p8": _size(384, 24, 8, patch_size=8, eta=1e-5),
    "tost_medium_24_p8": _size(512, 24, 8, patch_size=8, eta=1e-5),
    "tost_large_24_p8": _size(768, 24, 16, patch_size=8, eta=1e-5),
}


class ConvPatchEmbed(nn.Module):
    """Stem of 3x3 convolutions of stride 2, each with a SyncBatchNorm, with GELUs between them."""

    def __init__(self, config: ToSTConfig) -> None:
        super().__init__()
        patch = vision.pair("ToST", "patch_size", config.patch_size)
        halvings = 4 if max(patch) == 16 else 3
        widths = [config.in_chans, *(config.embed_dim >> left for left in reversed(range(halvings)))]
        parts: list[nn.Module] = []
        for index, (before, after) in enumerate(itertools.pairwise(widths)):
            stride = (2, 2) if index else (2 * patch[0] // max(patch), 2 * patch[1] // max(patch))
            convolution = nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
            parts += [nn.Sequential(convolution, nn.SyncBatchNorm(after)), nn.GELU()]
        self.proj = nn.Sequential(*parts[:-1])

    def forward(self, img: Tensor) -> Tensor:
        """Return (batch, embed_dim, rows, columns)."""
        # oneDNN's own layout: a forward of 8 images at width 384 takes 42 ms in place of 64 on two AVX-512 threads.
        if isinstance(img, Tensor) and img.is_cpu and not operator.is_mapped():  # torch.fx passes a proxy
            img = img.contiguous(memory_format=torch.channels_last)
        return self.proj(img)


class FourierPositions(nn.Module):
    """Positions as projected sines and cosines of the row and the column, 32 frequencies each."""

    def __init__(self, dim: int, hidden_dim: int = 32) -> None:
        super().__init__()
        self.hidden_dim = hidden_dim
        self.token_projection = nn.Conv2d(2 * hidden_dim, dim, 1)

    def _waves(self, count: int, device: torch.device) -> Tensor:
        """Return (count, hidden_dim): sine and cosine of 2 pi n / count, alternating, at each frequency."""
        place = torch.arange(1, count + 1, dtype=torch.float32, device=device)
        place = place / (count + 1e-6) * (2 * math.pi)
        channel = torch.arange(self.hidden_dim, dtype=torch.float32, device=device)
        angle = place[:, None] / 10000 ** (2 * (channel // 2) / self.hidden_dim)
        return torch.stack((angle[:, 0::2].sin(), angle[:, 1::2].cos()), dim=2).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        """Return (1, dim, rows, columns) for patches (batch, dim, rows, columns)."""
        if isinstance(x, _symbols.Proxy):
            return _symbols.leaf(self, x)
        rows, columns = x.shape[2], x.shape[3]
        down = self._waves(rows, x.device)[:, None].expand(-1, columns, -1)
        across = self._waves(columns, x.device)[None].expand(rows, -1, -1)
        waves = torch.cat((down, across), dim=2).permute(2, 0, 1)[None]
        return self.token_projection(waves.to(x.dtype))


class ToSTMLP(nn.Module):
    """Linear, GELU, Linear, with dropout after each; ``fc1`` and ``fc2``."""

    def __init__(self, config: ToSTConfig) -> None:
        super().__init__()
        hidden = int(config.embed_dim * config.mlp_ratio)
        self.fc1 = nn.Linear(config.embed_dim, hidden)
        self.fc2 = nn.Linear(hidden, config.embed_dim)
        self.drop = nn.Dropout(config.drop_rate)
        self.backend = config.backend

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, tokens, dim)."""
        hidden = self.drop(F.gelu(_linear.linear(self.fc1, x, self.backend)))
        return self.drop(_linear.linear(self.fc2, hidden, self.backend))


class _Scaled(nn.Module):
    """Base of both kinds of block: two norms, an MLP and two layer scales."""

    def __init__(self, config: ToSTConfig, attention: nn.Module, drop_path: float) -> None:
        super().__init__()
        dim = config.embed_dim
        self.norm1 = nn.LayerNorm(dim, 1e-6)
        self.attn = attention
        self.norm2 = nn.LayerNorm(dim, 1e-6)
        self.mlp = ToSTMLP(config)
        self.gamma1 = nn.Parameter(torch.full((dim,), float(config.eta)))
        self.gamma2 = nn.Parameter(torch.full((dim,), float(config.eta)))
        self.drop_path = DropPath(drop_path)


class TSSABlock(_Scaled):
    """Token-statistics attention and an MLP, each on normalised tokens and with a scaled residual."""

    def __init__(self, config: ToSTConfig) -> None:
        rates = (config.attn_drop_rate, config.drop_rate)
        sizes = (config.embed_dim, config.num_heads, config.qkv_bias, None)
        super().__init__(config, TSSA(*sizes, *rates, backend=config.backend), config.drop_path_rate)

    def forward(self, x: Tensor, return_attention: bool = False, return_key: bool = False) -> Tensor:
        """Return the next patch tokens (batch, patches, dim), or the projected tokens if ``return_key``."""
        if return_attention:
            raise NotImplementedError(
                "ToST: get_last_selfattention must be of a model with weights between tokens, which these layers do "
                "not have; get_last_key gives the projected tokens, crate_kernels.tssa their membership"
            )
        if return_key:
            attention: Any = self.attn
            return attention.qkv(self.norm1(x))
        x = torch.addcmul(x, self.gamma1, self.drop_path(self.attn(self.norm1(x))))
        return torch.addcmul(x, self.gamma2, self.drop_path(self.mlp(self.norm2(x))))


class ClassAttention(nn.Module):
    """Attention of the class token to all tokens; patch tokens are returned unchanged."""

    def __init__(self, config: ToSTConfig) -> None:
        super().__init__()
        dim, self.heads, self.scale = config.embed_dim, config.num_heads, config.qk_scale
        self.qkv = nn.Linear(dim, 3 * dim, config.qkv_bias)
        self.attn_drop = nn.Dropout(config.attn_drop_rate)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(config.drop_rate)
        self.backend = config.backend

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, tokens, dim)."""
        if isinstance(x, _symbols.Proxy):
            return _symbols.leaf(self, x)
        projected = _heads.whole("ToST", _linear.linear(self.qkv, x, self.backend), 3 * x.shape[-1], _heads.THREE_PARTS)
        query, key, value = (_heads.split(part, self.heads) for part in projected.chunk(3, dim=-1))
        rate = self.attn_drop.p if self.attn_drop.training else 0.0
        gathered = F.scaled_dot_product_attention(query[:, :, :1], key, value, dropout_p=rate, scale=self.scale)
        token = self.proj_drop(_linear.linear(self.proj, _heads.merge(gathered), self.backend))
        return torch.cat((token, x[:, 1:]), dim=1)


class ClassAttentionBlock(_Scaled):
    """CaiT's class attention, with the arithmetic of the published code.

    Patch tokens take part in both residuals. The attention returns ``norm1(x)`` for them, so they become
    ``x + gamma1 norm1(x)``. The MLP's branch returns them unchanged, so they double. The class token
    gets ``gamma2 MLP``. With ``tokens_norm``, ``norm2`` replaces the stream of all tokens, else only the class
    token's.
    """

    def __init__(self, config: ToSTConfig) -> None:
        super().__init__(config, ClassAttention(config), 0.0)  # no drop_path here in the published code
        self.tokens_norm = config.tokens_norm

    def forward(self, x: Tensor) -> Tensor:
        """Return the next tokens (batch, patches + 1, dim), class token first."""
        x = torch.addcmul(x, self.gamma1, self.attn(self.norm1(x)))
        x = self.norm2(x) if self.tokens_norm else torch.cat((self.norm2(x[:, :1]), x[:, 1:]), dim=1)
        return x + torch.cat((self.gamma2 * self.mlp(x[:, :1]), x[:, 1:]), dim=1)


class ToST(Classifier):
    """Classify images with token-statistics attention.

    Parameters, under their published names: ``patch_embed.proj.{0,2,4[,6]}.{0,1}`` (convolution, SyncBatchNorm),
    ``pos_embeder.token_projection``, ``cls_token``, ``blocks.{i}.{norm1,attn.{qkv,temp,to_out.0},norm2,mlp.fc1,mlp.fc2,
    gamma1,gamma2}``, ``cls_attn_blocks.{i}`` with ``attn.{qkv,proj}``, ``norm``, ``head``.

    Args:
        config: sizes and options; ``crate_kernels.models.create`` has the published ones by name.
    """

    config_class = ToSTConfig
    layout = BackboneLayout(
        blocks="blocks",
        embedding="cls_token|patch_embed|pos_embeder",
        stem="patch_embed.proj.0.0",
        after="cls_attn_blocks",
        norm="norm",
        classifier="head",
        prefix_tokens=0,
        fixed_size=False,
        positions="",
        dim="embed_dim",
        img_size="img_size",
        in_chans="in_chans",
        drop_rate="drop_rate",
    )

    def __init__(self, config: ToSTConfig) -> None:
        super().__init__(config)
        dim = config.embed_dim
        self.patch_embed = ConvPatchEmbed(config)
        self.pos_embeder = FourierPositions(dim).requires_grad_(config.use_pos)
        self.cls_token = nn.Parameter(torch.empty(1, 1, dim))
        self.pos_drop = nn.Dropout(config.drop_rate)
        self.blocks = nn.ModuleList(TSSABlock(config) for _ in range(config.depth))
        self.cls_attn_blocks = nn.ModuleList(ClassAttentionBlock(config) for _ in range(config.cls_attn_layers))
        self.norm = nn.LayerNorm(dim, 1e-6)
        self.head = vision.head(dim, config.num_classes)
        self._initialise()

    def _initialise(self) -> None:
        nn.init.trunc_normal_(self.cls_token, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                self._init_linear(module)

    def _init_linear(self, linear: nn.Linear) -> None:
        nn.init.trunc_normal_(linear.weight, std=0.02)
        if linear.bias is not None:
            nn.init.zeros_(linear.bias)

    def no_weight_decay(self) -> set[str]:
        """Name the class token, and the temperatures.

        The published attention names its ``temp``, but the published training asks only the model, which names
        ``cls_token``. So the published training decayed the temperatures.
        """
        return {"cls_token", *(name for name, _ in self.named_parameters() if name.endswith(".temp"))}

    def _embed(self, img: Tensor, resize: bool = False) -> Tensor:
        """Return the patch tokens (batch, patches, embed_dim) that enter the first block."""
        vision.check_images("ToST", img, self.config.in_chans, self._patch_size())
        x = self.patch_embed(img)
        if self.config.use_pos:
            x = x + self.pos_embeder(x)
        return self.pos_drop(x.flatten(2).transpose(1, 2))

    def _finish(self, tokens: Tensor) -> Tensor:
        """Return the normalised tokens after the last block, (batch, patches + 1, embed_dim), class token first."""
        x = tokens
        token: Tensor | None = self.cls_token
        if token is not None:  # pruned
            x = torch.cat((token.expand(x.shape[0], -1, -1).to(x.dtype), x), dim=1)
        for block in self.cls_attn_blocks:
            x = run(self.config.grad_checkpointing, block, x)
        return self.norm(x)

    @checks.closed
    def forward(self, img: Tensor, interpolate_pos_encoding: bool = False, **unknown: NoReturn) -> Any:
        """Return logits (batch, num_classes) of images (batch, in_chans, height, width).

        In training with ``distillation``, return a pair of the same logits. Positions are computed, so images may have
        any size, whatever ``interpolate_pos_encoding``.

        Raises:
            ValueError: images of another number of channels, or not of whole patches.
        """
        if isinstance(unknown, dict) and unknown:
            checks.no_keyword(ToST.forward, unknown)
        logits = super().forward(img, interpolate_pos_encoding)
        return (logits, logits) if self.training and self.config.distillation else logits


Config, Model = ToSTConfig, ToST
SYSTEMS = {"tost_vision": official.family(Config, Model, ignored=("patch_proj",))}
