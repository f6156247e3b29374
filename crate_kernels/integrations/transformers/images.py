"""The image models as classifiers of transformers: CRATE, CRATE-alpha, ToST, AoT, and CRATE-MAE's encoder."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import PrefixChange
from transformers.modeling_outputs import ImageClassifierOutput
from transformers.utils.generic import can_return_tuple

from crate_kernels.integrations.transformers import base, configs

_PREFIX = "model"


def _conversions() -> list[Any]:
    """Describe how names of a file become names in memory; transformers applies the inverse on saving."""
    return [PrefixChange(prefix_to_add=_PREFIX)]


class ImageClassifier(base.Model):
    """A classifier of ours. Saved parameters have our names; in memory they have the prefix ``model.``.

    Args:
        config: sizes and options; ``num_labels`` is the number of classes.
    """

    base_model_prefix = _PREFIX
    main_input_name = "pixel_values"
    input_modalities = ["image"]  # noqa: RUF012 (transformers declares it so)
    accepts_loss_kwargs = False  # a mean over images needs no count of them
    _no_split_modules = ["CRATE", "CRATEAlpha", "ToST", "AoTVision", "MAEEncoder"]  # noqa: RUF012

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = base.network(config)
        # As from_pretrained would leave it: transformers removes the prefix only from what it loaded itself.
        self._weight_conversions = _conversions()
        self.post_init()

    def _our_name(self, name: str) -> str:
        return name.removeprefix(f"{_PREFIX}.")

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """Load weights under our names too, as a saved model has them: Trainer resumes so."""
        bare = {name.removeprefix(f"{_PREFIX}."): tensor for name, tensor in state_dict.items()}
        return super().load_state_dict({f"{_PREFIX}.{name}": t for name, t in bare.items()}, *args, **kwargs)

    def _set_gradient_checkpointing(self, enable: bool = True, *args: Any, **kwargs: Any) -> None:
        self.model.config = replace(self.model.config, grad_checkpointing=enable)
        for module in self.model.modules():
            if hasattr(module, "grad_checkpointing"):  # a stack of layers that has no config
                module.grad_checkpointing = enable

    @can_return_tuple
    def forward(self, pixel_values: Tensor, labels: Tensor | None = None, **kwargs: Any) -> ImageClassifierOutput:
        """Classify images.

        Args:
            pixel_values: (batch, channels, height, width).
            labels: (batch,) classes; for ``problem_type`` other than single labels, (batch, num_labels) numbers.
            **kwargs: of the loss.

        Raises:
            NotImplementedError: hidden states or attentions are asked for, which these models do not keep.
        """
        for name in ("output_hidden_states", "output_attentions"):
            if kwargs.pop(name, None):
                raise NotImplementedError(
                    f"{type(self).__name__}: {name} cannot be given: the model does not keep them"
                )
        logits = self.model.forward_head(self.model.forward_features(pixel_values))
        loss = None if labels is None else self.loss_function(labels, logits, self.config, **kwargs)
        return ImageClassifierOutput(loss=loss, logits=logits)


class CRATEForImageClassification(ImageClassifier):
    """CRATE."""

    config_class = configs.CRATEConfig


class CRATEAlphaForImageClassification(ImageClassifier):
    """CRATE-alpha."""

    config_class = configs.CRATEAlphaConfig


class ToSTForImageClassification(ImageClassifier):
    """ToST for images."""

    config_class = configs.ToSTConfig


class AoTVisionForImageClassification(ImageClassifier):
    """The attention-only model for images."""

    config_class = configs.AoTVisionConfig


class CRATEMAEForImageClassification(ImageClassifier):
    """CRATE-MAE's encoder with a linear classifier; the decoder of a pre-trained folder is left out."""

    config_class = configs.CRATEMAEConfig
    _keys_to_ignore_on_load_unexpected = [r"decoder_(embed|blocks|norm|pred)\.", r"mask_token|\bpos_embed"]  # noqa: RUF012


for _config in (
    configs.CRATEConfig,
    configs.CRATEAlphaConfig,
    configs.ToSTConfig,
    configs.AoTVisionConfig,
    configs.CRATEMAEConfig,
):
    register_checkpoint_conversion_mapping(_config.model_type, _conversions(), overwrite=True)
