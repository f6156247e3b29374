"""The image models as classifiers of transformers: CRATE, CRATE-alpha, ToST, AoT, and CRATE-MAE's encoder."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import PrefixChange
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import ImageClassifierOutput
from transformers.utils.output_capturing import capture_outputs

from crate_kernels.integrations.transformers import base, configs
from crate_kernels.models import aot, crate, crate_alpha, crate_mae, tost

_PREFIX = "model"


def _conversions() -> list[Any]:
    """Describe how names of a file become names in memory; transformers applies the inverse on saving."""
    return [PrefixChange(prefix_to_add=_PREFIX)]


class CRATELayer(GradientCheckpointingLayer, crate.Layer):
    """A layer of CRATE."""


class CRATEAlphaLayer(GradientCheckpointingLayer, crate_alpha.Layer):
    """A layer of CRATE-alpha."""


class CRATEMAELayer(GradientCheckpointingLayer, crate_mae.EncoderBlock):
    """A layer of CRATE-MAE's encoder."""


class ToSTLayer(GradientCheckpointingLayer, tost.Block):
    """A layer of ToST's patches."""


class ToSTClassLayer(GradientCheckpointingLayer, tost.ClassAttentionBlock):
    """A layer of ToST's class token, after those of the patches."""


class AoTVisionLayer(GradientCheckpointingLayer, aot.Layer):
    """A layer of AoT."""


_LAYERS = {  # of ours, which transformers can recompute
    layer.__mro__[2]: layer
    for layer in (CRATELayer, CRATEAlphaLayer, CRATEMAELayer, ToSTLayer, ToSTClassLayer, AoTVisionLayer)
}


class ImageClassifier(base.Model):
    """A classifier of ours. Saved parameters have our names; in memory they have the prefix ``model.``.

    Args:
        config: sizes and options; ``num_labels`` is the number of classes.
    """

    base_model_prefix = _PREFIX
    main_input_name = "pixel_values"
    input_modalities = ["image"]  # noqa: RUF012 (transformers declares it so)
    accepts_loss_kwargs = False  # a mean over images needs no count of them
    _no_split_modules = ["CRATE", "CRATEAlpha", "ToST", "AoTVision", "CRATEMAEEncoder"]  # noqa: RUF012

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = base.network(config)
        for module in self.model.modules():
            module.__class__ = _LAYERS.get(type(module), type(module))
        # As from_pretrained would leave it: transformers removes the prefix only from what it loaded itself.
        self._weight_conversions = _conversions()
        self.post_init()
        lists = (self.model.layout.blocks, self.model.layout.after)
        held = [name for name in lists if name and len(self.model.get_submodule(name))]
        self._fsdp_plan = {f"{_PREFIX}.{name}.*": base.FREED for name in held}

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
        base.refuse_attentions(self, kwargs.pop("output_attentions", None))
        kwargs.pop("output_hidden_states", None)  # kept by the decorator
        base.refuse_unknown(self, kwargs, loss=("num_items_in_batch", "ignore_index"))
        # As a module, since accelerate moves its weights for a call.
        logits = self.model(pixel_values, bool(interpolate_pos_encoding))
        logits = logits[0] if isinstance(logits, tuple) else logits  # a pair of the same, if ToST is to distil
        loss = None if labels is None else self.loss_function(labels, logits, self.config, **kwargs)
        return ImageClassifierOutput(loss=loss, logits=logits)


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


for _config in (
    configs.CRATEConfig,
    configs.CRATEAlphaConfig,
    configs.ToSTConfig,
    configs.AoTVisionConfig,
    configs.CRATEMAEEncoderConfig,
):
    register_checkpoint_conversion_mapping(_config.model_type, _conversions(), overwrite=True)
