"""Configs of the models for transformers, with the fields of ours."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any, ClassVar, TypeVar

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.backbone_utils import BackboneConfigMixin

from crate_kernels import models
from crate_kernels._core import checks
from crate_kernels.models import aot, crate, crate_alpha, crate_lm, crate_mae, crate_mae_encoder, tost, tost_lm
from crate_kernels.models._shared.pretrained import Configured

Config = TypeVar("Config", bound="ModelConfig")


class ModelConfig(PreTrainedConfig):
    """What all configs have: the fields of one of our configs, and a way back to it.

    ``backend`` is the backend of the operators. It is not saved: the next machine may have a better one.
    """

    model_class: ClassVar[type[Configured]]
    base_model_fsdp_plan: ClassVar[dict[Any, str]] = {}  # models state theirs: this would name none of our modules

    @classmethod
    def of(cls: type[Config], config: Any, **overrides: Any) -> Config:
        """Return the config for transformers with the values of ours."""
        return cls(**{**{field.name: getattr(config, field.name) for field in fields(config)}, **overrides})

    def __post_init__(self, **others: Any) -> None:
        """Take what transformers or a folder has beside the fields; refuse what is near the name of one."""
        known = {*(field.name for field in fields(self.model_class.config_class)), *self.attribute_map}
        if "model_type" not in others:  # in every folder
            for name in others:
                guess = "" if hasattr(self, name) else checks.suggestion(name, known)
                if guess:
                    owner = f"{type(self).__name__}.__init__()"
                    raise TypeError(f"{owner} got an unexpected keyword argument {name!r}{guess}")
        super().__post_init__(**others)

    def ours(self) -> Any:
        """Return our config, which checks the values."""
        known = fields(self.model_class.config_class)
        return self.model_class.config_class(**{each.name: getattr(self, each.name) for each in known})

    def network(self) -> Any:
        """Build our model, freshly initialised."""
        return self.model_class(self.ours())

    def to_dict(self) -> dict[str, Any]:
        """Return all values but the backend."""
        return {name: value for name, value in super().to_dict().items() if name != "backend"}

    def validate_fields(self) -> None:
        """Check the values as our config does."""
        self.ours()


class LanguageModelConfig(ModelConfig):
    """Config of a language model: the fields of ours, and the tokens that transformers asks for."""

    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "n_embd",
        "max_position_embeddings": "block_size",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    }
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["cache", "past_key_values"]  # by both versions' names
    state: ClassVar[str]

    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    @property
    def layer_types(self) -> list[str]:
        """Name the kind of cache of each layer, from which ``DynamicCache(config=...)`` is built."""
        return [self.state] * self.num_hidden_layers  # pyright: ignore[reportAttributeAccessIssue]

    def validate_layer_type(self) -> None:
        """Accept our kinds of cache, of which transformers does not know."""


class ImageModelConfig(BackboneConfigMixin, ModelConfig):
    """Config of an image model: the fields of ours; ``num_classes`` is ``num_labels``, 2 by default.

    ``out_features`` or ``out_indices`` choose the maps of a backbone, of ``stage_names``; by default the last.
    """

    _out_features: list[str] | None = None
    _out_indices: list[int] | None = None

    @property
    def stage_names(self) -> list[str]:
        """Name what enters the first layer, and each layer."""
        return ["stem", *(f"stage{index + 1}" for index in range(self.num_hidden_layers))]  # pyright: ignore

    def __post_init__(self, **others: Any) -> None:
        """Take the maps of a backbone beside the fields; a backbone checks them, once its layers are there.

        A folder may come from anyone, and say any depth: no name of a layer is made before.
        """
        self._out_features, self._out_indices = (others.pop(name, None) for name in ("out_features", "out_indices"))
        super().__post_init__(**others)

    def to_dict(self) -> dict[str, Any]:
        """Return all values, with the number of classes under our name too: 0 of a model without a classifier."""
        return {**super().to_dict(), "num_classes": 0 if _is_headless(self.architectures) else self.num_labels}

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Return the config of a dict; what a model without a classifier wrote leaves the number of classes open."""
        if _is_headless(config_dict.get("architectures")):
            config_dict = {name: value for name, value in config_dict.items() if name != "num_classes"}
        return super().from_dict(config_dict, **kwargs)


def _is_headless(architectures: list[str] | None) -> bool:
    """Say if a folder is of a model without a classifier."""
    return any(name.endswith(("Model", "Backbone")) for name in architectures or ())


def _derive(base: type[ModelConfig], family: Any, **extra: Any) -> Any:
    """Make the config class of a family from the fields of ours.

    Sizes without a default have that of the family's first published size, since transformers builds configs from
    nothing. Types are left to ``ours``, whose checks are stricter and whose messages are the package's own.
    """
    ours, first = family.Config, next(iter(family.SIZES.values()))
    if base is ImageModelConfig:
        extra["attribute_map"] = _image_names(family)
    own = [field for field in fields(ours) if base is not ImageModelConfig or field.name != "num_classes"]
    defaults = {field.name: getattr(first, field.name) if field.default is MISSING else field.default for field in own}
    body = {
        "__annotations__": dict.fromkeys(defaults, Any),
        "__doc__": f"Config of {family.Model.__name__} for transformers; its fields are those of ours.",
        "__module__": __name__,
        "model_type": family.Model.__name__,
        "model_class": family.Model,
        **defaults,
        **extra,
    }
    return strict(type(ours.__name__, (base,), body))


def _image_names(family: Any) -> dict[str, str]:
    """Map names that transformers has for the fields of an image model to ours, and our number of classes to theirs."""
    layout, known = family.Model.layout, [field.name for field in fields(family.Config)]
    names = {
        "hidden_size": layout.dim,
        "num_hidden_layers": "depth",
        "num_attention_heads": "heads" if "heads" in known else "num_heads",
        "num_channels": layout.in_chans,
        "image_size": layout.img_size,
    }
    return {"num_classes": "num_labels", **{theirs: ours for theirs, ours in names.items() if theirs != ours}}


CRATELMConfig = _derive(LanguageModelConfig, crate_lm, state="subspace")
ToSTLMConfig = _derive(LanguageModelConfig, tost_lm, state="token_stats")
AoTLMConfig = _derive(
    LanguageModelConfig,
    aot.language,
    state=property(lambda config: "subspace" if config.attention == "mssa" else "key_value"),
)
CRATEConfig = _derive(ImageModelConfig, crate)
CRATEAlphaConfig = _derive(ImageModelConfig, crate_alpha)
ToSTConfig = _derive(ImageModelConfig, tost)
AoTVisionConfig = _derive(ImageModelConfig, aot.vision)
CRATEMAEEncoderConfig = _derive(ImageModelConfig, crate_mae_encoder)


class CRATEMAEFolderConfig(PreTrainedConfig):
    """Config in the folder of a whole CRATE-MAE, read as that of its encoder: only this is a model of transformers."""

    model_type = "CRATEMAE"

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Return the config of the encoder."""
        whole, encoder = ({field.name for field in fields(each.Config)} for each in (crate_mae, crate_mae_encoder))
        left_out = {"model_type", "architectures", *(whole - encoder)}
        encoder_dict = {name: value for name, value in config_dict.items() if name not in left_out}
        return CRATEMAEEncoderConfig.from_dict(encoder_dict, **kwargs)


_BY_MODEL = {
    each.model_type: each
    for each in (
        CRATELMConfig,
        ToSTLMConfig,
        AoTLMConfig,
        CRATEConfig,
        CRATEAlphaConfig,
        ToSTConfig,
        AoTVisionConfig,
        CRATEMAEEncoderConfig,
    )
}


def config(name: str, **overrides: Any) -> Any:
    """Return the config of a published size for transformers.

    Args:
        name: one of ``crate_kernels.models.names()``, of a model that transformers can use.
        **overrides: fields to change: ``backend="reference"``, ``num_labels=10``.

    Raises:
        ValueError: no size has that name, or transformers cannot use its model.
    """
    family = models._OWNERS.get(name)
    if family is None or family.Model.__name__ not in _BY_MODEL:
        known = [size for size, owner in models._OWNERS.items() if owner.Model.__name__ in _BY_MODEL]
        guess = checks.suggestion(str(name), known)
        raise ValueError(f"config: name must be one of {', '.join(known)}, got {name!r}{guess}")
    return _BY_MODEL[family.Model.__name__].of(family.SIZES[name], **overrides)
