"""The image models as classifiers of transformers: CRATE, CRATE-alpha, ToST, AoT, and CRATE-MAE's encoder."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers.backbone_utils import BackboneMixin
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import PrefixChange
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BackboneOutput, BaseModelOutputWithPooling, ImageClassifierOutput
from transformers.utils.output_capturing import capture_outputs

from crate_kernels.integrations.transformers import base, configs
from crate_kernels.models import aot, crate, crate_alpha, crate_mae, tost
from crate_kernels.models._shared import preparation
from crate_kernels.models._shared.base import run

_PREFIX = "model"


def _conversions() -> list[Any]:
    """Describe how names of a file become names in memory; transformers applies the inverse on saving."""
    return [PrefixChange(prefix_to_add=_PREFIX)]


class CRATELayer(GradientCheckpointingLayer, crate.ISTALayer):
    """A layer of CRATE."""


class CRATEAlphaLayer(GradientCheckpointingLayer, crate_alpha.OvercompleteLayer):
    """A layer of CRATE-alpha."""


class CRATEMAELayer(GradientCheckpointingLayer, crate_mae.EncoderBlock):
    """A layer of CRATE-MAE's encoder."""


class ToSTLayer(GradientCheckpointingLayer, tost.TSSABlock):
    """A layer of ToST's patches."""


class ToSTClassLayer(GradientCheckpointingLayer, tost.ClassAttentionBlock):
    """A layer of ToST's class token, after those of the patches."""


class AoTVisionLayer(GradientCheckpointingLayer, aot.Layer):
    """A layer of AoT."""


_LAYERS = {  # of ours, which transformers can recompute
    layer.__mro__[2]: layer
    for layer in (CRATELayer, CRATEAlphaLayer, CRATEMAELayer, ToSTLayer, ToSTClassLayer, AoTVisionLayer)
}


class ImageNetwork(base.Model):
    """A network of ours. Saved parameters have our names; in memory they have the prefix ``model.``.

    Args:
        config: sizes and options; ``num_labels`` is the number of classes.
    """

    base_model_prefix = _PREFIX
    main_input_name = "pixel_values"
    input_modalities = ["image"]  # noqa: RUF012 (transformers declares it so)
    _no_split_modules = ["CRATE", "CRATEAlpha", "ToST", "AoTVision", "CRATEMAEEncoder"]  # noqa: RUF012

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = self._network(config)
        for module in self.model.modules():
            module.__class__ = _LAYERS.get(type(module), type(module))
        # As from_pretrained would leave it: transformers removes the prefix only from what it loaded itself.
        self._weight_conversions = _conversions()
        self.post_init()
        lists = (self.model.layout.blocks, self.model.layout.after)
        filled = [name for name in lists if name and len(self.model.get_submodule(name))]
        self._fsdp_plan = {f"{_PREFIX}.{name}.*": base.FREED for name in filled}

    def _network(self, config: Any) -> Any:
        """Build our model, without values."""
        return base.network(config)

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        """Save as transformers does, with how to prepare images unless the folder says that already."""
        self._update_config()
        result = super().save_pretrained(save_directory, *args, **kwargs)
        preparation.write(Path(save_directory), self.model)
        return result

    def _update_config(self) -> None:
        """Copy into the config what ``set_input_size`` and ``reset_classifier`` have changed in our model."""
        name = self.model.layout.img_size
        if getattr(self.config, name) != getattr(self.model.config, name):
            setattr(self.config, name, getattr(self.model.config, name))

    def _our_name(self, name: str) -> str:
        return name.removeprefix(f"{_PREFIX}.")

    def get_input_embeddings(self) -> nn.Module:
        """Return the linear layer or convolution of the patches."""
        return self.model.get_submodule(self.model.layout.stem)

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the linear layer or convolution of the patches."""
        self.model.set_submodule(self.model.layout.stem, value)

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """Load weights under our names too, as a saved model has them: Trainer resumes so."""
        bare = {name.removeprefix(f"{_PREFIX}."): tensor for name, tensor in state_dict.items()}
        return super().load_state_dict({f"{_PREFIX}.{name}": t for name, t in bare.items()}, *args, **kwargs)

    def _check(self, kwargs: dict[str, Any], loss: tuple[str, ...] = ()) -> None:
        """Refuse arguments that nothing would read."""
        base.refuse_attentions(self, kwargs.pop("output_attentions", None))
        kwargs.pop("output_hidden_states", None)  # the decorator collects them
        base.refuse_unknown(self, kwargs, loss)


class ImageClassifier(ImageNetwork):
    """A classifier of ours."""

    accepts_loss_kwargs = False  # a mean over images needs no count of them

    def _update_config(self) -> None:
        super()._update_config()
        if self.config.num_labels != self.model.config.num_classes:
            self.config.num_labels = self.model.config.num_classes

    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        pixel_values: Tensor,
        labels: Tensor | None = None,
        interpolate_pos_encoding: bool = False,
        **kwargs: Any,
    ) -> ImageClassifierOutput:
        """Classify images.

        Args:
            pixel_values: (batch, channels, height, width).
            labels: (batch,) classes; for ``problem_type`` other than single labels, (batch, num_labels) numbers.
            interpolate_pos_encoding: resize learned positions to images of another size; default False.
            **kwargs: ``output_hidden_states`` for the tokens that enter the first layer and those after each,
                (batch, patches + 1, dim) with the class token first, or without it in ToST, whose class token comes
                after these layers; ``num_items_in_batch`` and ``ignore_index`` of the loss.

        Raises:
            NotImplementedError: ``output_attentions``.
            TypeError: any other argument.
        """
        self._check(kwargs, loss=("num_items_in_batch", "ignore_index"))
        # As a module, since accelerate moves its weights for a call.
        logits = self.model(pixel_values, bool(interpolate_pos_encoding))
        logits = logits[0] if isinstance(logits, tuple) else logits  # a pair of the same, if ToST is to distil
        if labels is not None:
            self._update_config()
        loss = None if labels is None else self.loss_function(labels, logits, self.config, **kwargs)
        return ImageClassifierOutput(loss=loss, logits=logits)


class _Features:
    """Our model's forward, without a classifier; as a module's, since accelerate moves weights for a call."""

    def forward(self: Any, img: Tensor, interpolate_pos_encoding: bool) -> tuple[Tensor, Tensor]:
        """Return the tokens and what a classifier would get."""
        tokens = self.forward_features(img, interpolate_pos_encoding)
        return tokens, self.forward_head(tokens, pre_logits=True)


class _Maps:
    """Our model's forward, of a backbone."""

    def forward(self: Any, img: Tensor, indices: list[int], interpolate_pos_encoding: bool) -> list[Tensor]:
        """Return the patches (batch, dim, rows, columns) after some layers, normalised; 0 is what enters the first."""
        tokens, maps, norm = self._embed(img, interpolate_pos_encoding), [], self.get_submodule(self.layout.norm)
        for index, block in enumerate([None, *self._blocks()[: max(indices)]]):
            tokens = tokens if block is None else run(self.config.grad_checkpointing, block, tokens)
            if index in indices:
                maps.append(norm(tokens)[:, self.layout.prefix_tokens :])
        grid = [size // patch for size, patch in zip(img.shape[-2:], self._patch_size(), strict=True)]
        return [patches.mT.unflatten(2, grid).contiguous() for patches in maps]


@cache
def _as(kind: type, network: type) -> Any:
    """Return a class of our model, of the same name, with the forward of ``kind``."""
    return type(network.__name__, (kind, network), {"__module__": __name__})


class ImageModel(ImageNetwork):
    """A network of ours without its classifier, whose weights in a folder are left out."""

    _kind: type = _Features

    def _network(self, config: Any) -> Any:
        network = base.undrawn(lambda: config.model_class(replace(config.ours(), num_classes=0)))
        network.__class__ = _as(self._kind, type(network))
        left_out = rf"\b{re.escape(network.layout.classifier)}\."
        self._keys_to_ignore_on_load_unexpected = [*(self._keys_to_ignore_on_load_unexpected or []), left_out]
        return network

    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self, pixel_values: Tensor, interpolate_pos_encoding: bool = False, **kwargs: Any
    ) -> BaseModelOutputWithPooling:
        """Return the features of images.

        Args:
            pixel_values: (batch, channels, height, width).
            interpolate_pos_encoding: resize learned positions to images of another size; default False.
            **kwargs: ``output_hidden_states`` as in the classifier.

        Returns:
            ``last_hidden_state``, the tokens of ``forward_features``, and ``pooler_output``, what a classifier gets.

        Raises:
            NotImplementedError: ``output_attentions``.
            TypeError: any other argument.
        """
        self._check(kwargs)
        tokens, pooled = self.model(pixel_values, bool(interpolate_pos_encoding))
        return BaseModelOutputWithPooling(last_hidden_state=tokens, pooler_output=pooled)


class ImageBackbone(BackboneMixin, ImageModel):
    """A network of ours as the backbone of another model: maps after the layers in the config's ``out_features``.

    They are normalised as the classifier's input is, as those of transformers' own ViTs are.
    """

    _kind = _Maps
    has_attentions = False

    def _network(self, config: Any) -> Any:
        network = super()._network(config)
        config.set_output_features_output_indices(config._out_features, config._out_indices)
        return network

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.num_features = [config.hidden_size] * len(config.stage_names)

    @capture_outputs(tie_last_hidden_states=False)
    def forward(  # pyright: ignore
        self, pixel_values: Tensor, interpolate_pos_encoding: bool = False, **kwargs: Any
    ) -> BackboneOutput:
        """Return the maps of images.

        Args:
            pixel_values: (batch, channels, height, width).
            interpolate_pos_encoding: resize learned positions to images of another size; default False.
            **kwargs: ``output_hidden_states`` as in the classifier.

        Returns:
            ``feature_maps``, a tuple of (batch, hidden_size, rows, columns).
        """
        self._check(kwargs)
        maps = self.model(pixel_values, self.out_indices, bool(interpolate_pos_encoding))
        return BackboneOutput(feature_maps=tuple(maps))


class CRATEForImageClassification(ImageClassifier):
    """CRATE."""

    config_class = configs.CRATEConfig
    _can_record_outputs = {"hidden_states": CRATELayer}  # noqa: RUF012


class CRATEAlphaForImageClassification(ImageClassifier):
    """CRATE-alpha."""

    config_class = configs.CRATEAlphaConfig
    _can_record_outputs = {"hidden_states": CRATEAlphaLayer}  # noqa: RUF012


class ToSTForImageClassification(ImageClassifier):
    """ToST for images."""

    config_class = configs.ToSTConfig
    _can_record_outputs = {"hidden_states": ToSTLayer}  # noqa: RUF012


class AoTVisionForImageClassification(ImageClassifier):
    """The attention-only model for images."""

    config_class = configs.AoTVisionConfig
    _can_record_outputs = {"hidden_states": AoTVisionLayer}  # noqa: RUF012


class CRATEMAEEncoderForImageClassification(ImageClassifier):
    """CRATE-MAE's encoder with a linear classifier; what only the decoder of a pre-trained folder needs is left out."""

    config_class = configs.CRATEMAEEncoderConfig
    _can_record_outputs = {"hidden_states": CRATEMAELayer}  # noqa: RUF012
    # decoder_pos_embed among them: the whole has its fixed positions twice.
    _keys_to_ignore_on_load_unexpected = [r"\bdecoder_", r"\bmask_token$"]  # noqa: RUF012


def _derive(parent: type[ImageNetwork], classifier: type[ImageNetwork], end: str) -> Any:
    """Return the model of a family without its classifier."""
    name = classifier.__name__.replace("ForImageClassification", end)
    body = {
        "__module__": __name__,
        "__doc__": f"{classifier.__doc__} Without its classifier.",
        "config_class": classifier.config_class,
        "_can_record_outputs": classifier._can_record_outputs,
        "_keys_to_ignore_on_load_unexpected": classifier._keys_to_ignore_on_load_unexpected,
    }
    return type(name, (parent,), body)


CLASSIFIERS = (
    CRATEForImageClassification,
    CRATEAlphaForImageClassification,
    ToSTForImageClassification,
    AoTVisionForImageClassification,
    CRATEMAEEncoderForImageClassification,
)
MODELS = CRATEModel, CRATEAlphaModel, ToSTModel, AoTVisionModel, CRATEMAEEncoderModel = (
    *(_derive(ImageModel, each, "Model") for each in CLASSIFIERS),
)
BACKBONES = CRATEBackbone, CRATEAlphaBackbone, ToSTBackbone, AoTVisionBackbone, CRATEMAEEncoderBackbone = (
    *(_derive(ImageBackbone, each, "Backbone") for each in CLASSIFIERS),
)

for _config in (
    configs.CRATEConfig,
    configs.CRATEAlphaConfig,
    configs.ToSTConfig,
    configs.AoTVisionConfig,
    configs.CRATEMAEEncoderConfig,
):
    register_checkpoint_conversion_mapping(_config.model_type, _conversions(), overwrite=True)
