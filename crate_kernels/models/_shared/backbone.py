"""Image models as backbones: features of every layer, another head, parameters by layer.

Names and arguments are those of timm's vision transformers, so that tools made for these take our models too. Nothing
of timm is needed here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NoReturn

from torch import Tensor, nn

from crate_kernels._core import checks
from crate_kernels.models._shared import vision
from crate_kernels.models._shared.base import ReferenceModel, Stack, run

# What ``reset_classifier`` calls the values of the config's ``pool``.
POOLS = {"token": "cls", "avg": "mean", "": "none"}
Features = list[Tensor] | list[tuple[Tensor, Tensor]]


def check_head(owner: str, config: Any) -> None:
    """Require a number of classes and a ``pool`` that exist."""
    checks.integer(owner, "num_classes", config.num_classes, minimum=0)
    if config.pool not in POOLS.values():
        raise ValueError(f"{owner}: pool must be 'cls', 'mean' or 'none', got {config.pool!r}")


@dataclass(frozen=True)
class BackboneLayout:
    """Places of the parts of a model, and the names of its config's fields.

    Attributes:
        blocks: list of the layers.
        embedding: regular expression of the names of the parameters before the first layer.
        stem: first linear layer or convolution.
        after: list of the layers that follow the blocks and have features too; "" for none.
        norm: norm before the head.
        classifier: last linear layer.
        prefix_tokens: number of tokens before the patches in the blocks.
        fixed_size: the positions are those of one image size.
        positions: parameter or buffer of the positions; "" where they are computed.
        dim, img_size, in_chans, drop_rate: fields of the config.
    """

    blocks: str = "transformer.layers"
    embedding: str = "cls_token|pos_embedding|to_patch_embedding"
    stem: str = "to_patch_embedding.2"
    after: str = ""
    norm: str = "mlp_head.0"
    classifier: str = "mlp_head.1"
    prefix_tokens: int = 1
    fixed_size: bool = True
    positions: str = "pos_embedding"
    dim: str = "dim"
    img_size: str = "image_size"
    in_chans: str = "channels"
    drop_rate: str = "dropout"


class Classifier(ReferenceModel):
    """An image model that computes its logits from the class token, or from the mean of all tokens.

    ``model(img)`` is ``forward_head(forward_features(img))``. Without classes (``num_classes=0``) there is no last
    layer, and ``model(img)`` is the input that the layer would have. Without pooling (``pool="none"``) every token
    goes through the head.
    """

    task = "ForImageClassification"
    layout: ClassVar[BackboneLayout] = BackboneLayout()
    _inspected: ClassVar[dict[str, int]] = {}  # the layers that get_last_selfattention and get_last_key look at
    cls_token: nn.Parameter

    @property
    def num_classes(self) -> int:
        """Number of logits; 0 without a head."""
        return self.config.num_classes

    @property
    def num_features(self) -> int:
        """Width of a token."""
        return getattr(self.config, self.layout.dim)

    embed_dim = head_hidden_size = num_features

    @property
    def in_chans(self) -> int:
        """Number of channels of an image."""
        return getattr(self.config, self.layout.in_chans)

    @property
    def num_prefix_tokens(self) -> int:
        """Number of tokens before the patches in the layers."""
        return self.layout.prefix_tokens

    @property
    def global_pool(self) -> str:
        """How tokens are pooled, as in ``reset_classifier``, ``"token"``, ``"avg"`` or ``""``."""
        return next(name for name, pool in POOLS.items() if pool == self.config.pool)

    @property
    def feature_info(self) -> list[dict[str, Any]]:
        """The features of each layer as timm describes them, ``num_chs``, ``reduction`` (pixels) and ``module``."""
        reduction = max(self._patch_size())
        return [
            {"num_chs": self.num_features, "reduction": reduction, "module": f"{self.layout.blocks}.{index}"}
            for index in range(len(self._blocks()))
        ]

    def _blocks(self) -> nn.ModuleList:
        """Return the layers."""
        return self.get_submodule(self.layout.blocks)  # pyright: ignore[reportReturnType]

    def _patch_size(self) -> tuple[int, int]:
        return vision.pair(self._name, "patch_size", self.config.patch_size)

    def _embed(self, img: Tensor, resize: bool = False) -> Tensor:
        """Return the tokens (batch, prefix_tokens + patches, dim) that enter the first layer.

        With ``resize``, learned positions are resized to images of another size.
        """
        raise NotImplementedError

    def _finish(self, tokens: Tensor) -> Tensor:
        """Return the features (batch, patches + 1, dim) from the tokens after the last layer."""
        return tokens

    def _init_linear(self, linear: nn.Linear) -> None:
        """Draw the weights of a linear layer; PyTorch's own are kept by default."""

    def forward_features(self, img: Tensor, interpolate_pos_encoding: bool = False) -> Tensor:
        """Return the tokens after the last layer, (batch, patches + 1, dim), class token first.

        Args:
            img: images (batch, channels, height, width).
            interpolate_pos_encoding: resize learned positions to images of another size; default False.
        """
        tokens = self._embed(img, interpolate_pos_encoding)
        for block in self._blocks():
            tokens = run(self.config.grad_checkpointing, block, tokens)
        return self._finish(tokens)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Return logits (batch, num_classes) from the output of ``forward_features``.

        Args:
            x: tokens (batch, patches + 1, dim).
            pre_logits: return the input of the last layer instead, (batch, dim); default False.
        """
        if self.config.pool == "mean":
            x = x.mean(dim=1)
        elif self.config.pool == "cls":
            # Copied: fully_shard's backward hook on a view is lost if the view is later changed in place.
            x = x[:, 0].clone()
        if self.layout.norm.startswith("mlp_head"):  # elsewhere the features are normalised
            x = self.get_submodule(self.layout.norm)(x)
        return x if pre_logits else self.get_classifier()(x)

    @checks.closed
    def forward(self, img: Tensor, interpolate_pos_encoding: bool = False, **unknown: NoReturn) -> Tensor:
        """Return logits (batch, num_classes) of images (batch, channels, height, width).

        Args:
            img: the images.
            interpolate_pos_encoding: resize learned positions to images of another size, for this call; by default as
                ``dynamic_img_size`` of the config says. Models whose positions are computed take any size.

        Raises:
            ValueError: images of another size or number of channels.
        """
        if isinstance(unknown, dict) and unknown:
            checks.no_keyword(Classifier.forward, unknown)
        return self.forward_head(self.forward_features(img, interpolate_pos_encoding))

    def get_classifier(self) -> nn.Module:
        """Return the last layer: an ``nn.Linear``, or an ``nn.Identity`` without classes."""
        return self.get_submodule(self.layout.classifier)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the last layer by a new one; the config follows.

        Args:
            num_classes: outputs of the new layer; 0 for none.
            global_pool: ``"token"`` (the class token), ``"avg"`` (the mean of all tokens, the class token included,
                as in the published CRATE) or ``""`` (none); unchanged by default.

        Raises:
            ValueError: a negative number, or another kind of pooling.
        """
        pool = self.config.pool if global_pool is None else POOLS.get(global_pool)
        if pool is None:
            raise ValueError(f"{self._name}: global_pool must be 'token', 'avg' or '', got {global_pool!r}")
        token: Tensor | None = self.cls_token
        if pool == "cls" and token is None:
            raise ValueError(f"{self._name}: global_pool must be 'avg' or '', since the class token is pruned")
        self.config = replace(self.config, num_classes=num_classes, pool=pool)
        head, like = vision.head(self.num_features, num_classes), next(self.parameters())
        if isinstance(head, nn.Linear):
            self._init_linear(head)
        self.set_submodule(self.layout.classifier, head.to(like.device, like.dtype).train(self.training))

    @property
    def grid(self) -> tuple[int, int]:
        """Number of patches of an image of the config's size, (down, across)."""
        size = getattr(self.config, self.layout.img_size)
        return vision.grid(self._name, size, self.config.patch_size, self.layout.img_size)

    def set_input_size(self, img_size: vision.Size | None = None, patch_size: vision.Size | None = None) -> None:
        """Change the size of the images; the config follows, and learned positions are resized to it.

        They are a new parameter then: make optimizers after this.

        Args:
            img_size: an int or (height, width), in pixels; unchanged by default.
            patch_size: must be that of the model, since the stem is not resized.

        Raises:
            ValueError: a size that is not of whole patches.
            NotImplementedError: another ``patch_size``.
        """
        vision.set_input_size(self, self.layout.img_size, img_size, patch_size, self.layout.positions)

    def get_last_selfattention(self, img: Tensor, layer: int | None = None) -> Tensor:
        """Return the attention weights (batch, heads, tokens, tokens) of a layer, counted from 0; the last by default.

        Raises:
            ValueError: a layer that does not exist.
            NotImplementedError: layers without such weights: ToST's, and ordinary attention.
        """
        return self._inspect(img, "layer", layer, return_attention=True)

    def get_last_key(self, img: Tensor, depth: int | None = None) -> Tensor:
        """Return the projected tokens (batch, tokens, heads * head_dim) of a layer, from 0; the last by default.

        Raises:
            ValueError: a layer that does not exist.
            NotImplementedError: layers of ordinary attention, which have no one projection.
        """
        return self._inspect(img, "depth", depth, return_key=True)

    def _inspect(self, img: Tensor, name: str, index: int | None, **what: bool) -> Tensor:
        blocks = self._blocks()
        index = vision.layer(self._name, name, index, len(blocks), self._inspected)
        tokens = self._embed(img)
        for block in blocks[:index]:
            tokens = block(tokens)
        return blocks[index](tokens, **what)

    def _take(self, indices: int | Sequence[int] | None) -> list[int]:
        """Return the layers that ``indices`` mean, counted from 0."""
        depth = len(self._blocks())
        if indices is None or isinstance(indices, int):
            last = depth if indices is None else indices
            taken = list(range(depth - last, depth)) if 0 < last <= depth else []
        else:
            taken = [index + depth if index < 0 else index for index in indices]
        if not taken or not all(0 <= index < depth for index in taken):
            raise ValueError(f"{self._name}: indices must be of {depth} layers, got {indices!r}")
        return taken

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        output_dict: bool = False,
    ) -> Features | tuple[Tensor, Features] | dict[str, Any]:
        """Return the features, and the patches after some layers.

        Args:
            x: images (batch, channels, height, width).
            indices: the layers: the last ones if an int, all by default. Negative ones count from the end.
            return_prefix_tokens: return pairs with the class token (batch, 1, dim); ToST's layers have none, and then
                there are no pairs.
            norm: apply the norm before the head to the patches.
            stop_early: skip the layers after the last of ``indices``.
            output_fmt: ``"NCHW"`` is (batch, dim, rows, columns), ``"NLC"`` (batch, patches, dim).
            intermediates_only: return the list alone.
            output_dict: return ``image_features``, ``image_intermediates`` and, if asked for,
                ``image_intermediates_prefix`` in a dict.

        Returns:
            ``(features, intermediates)``: the output of ``forward_features``, and a list in the order of the layers.

        Raises:
            ValueError: layers that do not exist, or another format.
        """
        if output_fmt not in ("NCHW", "NLC"):
            raise ValueError(f"{self._name}: output_fmt must be 'NCHW' or 'NLC', got {output_fmt!r}")
        taken, prefix = self._take(indices), self.layout.prefix_tokens
        tokens, kept = self._embed(x), []
        for index, block in enumerate(self._blocks()[: max(taken) + 1 if stop_early else None]):
            tokens = run(self.config.grad_checkpointing, block, tokens)
            if index in taken:
                kept.append(self.get_submodule(self.layout.norm)(tokens) if norm else tokens)
        patches: Any = [each[:, prefix:] for each in kept]
        prefixes = [each[:, :prefix] for each in kept] if prefix and return_prefix_tokens else None
        if output_fmt == "NCHW":
            grid = [size // patch for size, patch in zip(x.shape[-2:], self._patch_size(), strict=True)]
            patches = [each.mT.unflatten(2, grid).contiguous() for each in patches]
        if output_dict:
            found = {"image_intermediates": patches}
            if prefixes is not None:
                found["image_intermediates_prefix"] = prefixes
            return found if intermediates_only else {**found, "image_features": self._finish(tokens)}
        if prefixes is not None:
            patches = list(zip(patches, prefixes, strict=True))
        return patches if intermediates_only else (self._finish(tokens), patches)

    def prune_intermediate_layers(
        self, indices: int | Sequence[int] | None = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Remove what ``forward_intermediates(indices=..., intermediates_only=True)`` does not need.

        Args:
            indices: the layers to keep, as there; also those before them are kept.
            prune_norm: remove the norm before the head; default False.
            prune_head: remove the head, and ToST's class token with its attention; default True.

        Returns:
            The layers, counted from 0.
        """
        taken, after = self._take(indices), self.layout.after
        depth = max(taken) + 1
        self.config = replace(self.config, depth=depth)
        self.set_submodule(self.layout.blocks, self._blocks()[:depth])
        if prune_norm:
            self.set_submodule(self.layout.norm, nn.Identity())
        if prune_head:
            if after:
                self.set_submodule(after, nn.ModuleList())
                self.register_parameter("cls_token", None)
            self.reset_classifier(0, "")
        return taken

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each layer in the backward instead of keeping its activations, or stop doing so."""
        self.config = replace(self.config, grad_checkpointing=enable)
        for child in self.children():
            if isinstance(child, Stack):
                child.grad_checkpointing = enable

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return regular expressions that sort parameters by layer, for a learning rate that decays with depth.

        Args:
            coarse: has no effect: there is nothing coarser than a layer here.
        """
        lists = [name for name in (self.layout.blocks, self.layout.after) if name]
        groups: dict[str, Any] = {name: [(rf"^{re.escape(name)}\.(\d+)", None)] for name in lists}
        groups[lists[-1]].append((rf"^{re.escape(self.layout.norm)}\.", (99999,)))  # with the layer before it
        return {"stem": rf"^(?:{self.layout.embedding})", **groups}
