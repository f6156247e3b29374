"""The models as those of transformers. Importing this registers them with its Auto classes.

``AutoModelForCausalLM``, ``AutoModelForImageClassification``, ``AutoModel`` and ``AutoBackbone`` then read the folders
that our ``save_pretrained`` writes, and write folders that ``crate_kernels.models.from_pretrained`` reads.
"""

from typing import Any

from transformers import AutoBackbone, AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForImageClassification

from crate_kernels.integrations.transformers.caches import KeyValueLayer, StatsLayer, SubspaceLayer
from crate_kernels.integrations.transformers.cards import card
from crate_kernels.integrations.transformers.configs import (
    AoTLMConfig,
    AoTVisionConfig,
    CRATEAlphaConfig,
    CRATEConfig,
    CRATELMConfig,
    CRATEMAEEncoderConfig,
    CRATEMAEFolderConfig,
    ToSTConfig,
    ToSTLMConfig,
    config,
)
from crate_kernels.integrations.transformers.images import (
    BACKBONES,
    CLASSIFIERS,
    MODELS,
    AoTVisionBackbone,
    AoTVisionForImageClassification,
    AoTVisionModel,
    CRATEAlphaBackbone,
    CRATEAlphaForImageClassification,
    CRATEAlphaModel,
    CRATEBackbone,
    CRATEForImageClassification,
    CRATEMAEEncoderBackbone,
    CRATEMAEEncoderForImageClassification,
    CRATEMAEEncoderModel,
    CRATEModel,
    ToSTBackbone,
    ToSTForImageClassification,
    ToSTModel,
)
from crate_kernels.integrations.transformers.language import (
    AoTLMForCausalLM,
    AoTLMModel,
    CRATELMForCausalLM,
    CRATELMModel,
    ToSTLMForCausalLM,
    ToSTLMModel,
)

__all__ = [
    "AoTLMConfig",
    "AoTLMForCausalLM",
    "AoTLMModel",
    "AoTVisionBackbone",
    "AoTVisionConfig",
    "AoTVisionForImageClassification",
    "AoTVisionModel",
    "CRATEAlphaBackbone",
    "CRATEAlphaConfig",
    "CRATEAlphaForImageClassification",
    "CRATEAlphaModel",
    "CRATEBackbone",
    "CRATEConfig",
    "CRATEForImageClassification",
    "CRATELMConfig",
    "CRATELMForCausalLM",
    "CRATELMModel",
    "CRATEMAEEncoderBackbone",
    "CRATEMAEEncoderConfig",
    "CRATEMAEEncoderForImageClassification",
    "CRATEMAEEncoderModel",
    "CRATEModel",
    "KeyValueLayer",
    "StatsLayer",
    "SubspaceLayer",
    "ToSTBackbone",
    "ToSTConfig",
    "ToSTForImageClassification",
    "ToSTLMConfig",
    "ToSTLMForCausalLM",
    "ToSTLMModel",
    "ToSTModel",
    "card",
    "config",
]

for _config, _base, _head in (
    (CRATELMConfig, CRATELMModel, CRATELMForCausalLM),
    (ToSTLMConfig, ToSTLMModel, ToSTLMForCausalLM),
    (AoTLMConfig, AoTLMModel, AoTLMForCausalLM),
):
    AutoConfig.register(_config.model_type, _config)
    AutoModel.register(_config, _base)
    AutoModelForCausalLM.register(_config, _head)
for _head, _base, _backbone in zip(CLASSIFIERS, MODELS, BACKBONES, strict=True):
    _config: Any = _head.config_class
    AutoConfig.register(_config.model_type, _config)
    AutoModelForImageClassification.register(_config, _head)
    AutoModel.register(_config, _base)
    AutoBackbone.register(_config, _backbone)
AutoConfig.register(
    CRATEMAEFolderConfig.model_type, CRATEMAEFolderConfig
)  # a folder of the autoencoder, read as its encoder


def __dir__() -> list[str]:
    """List the public names."""
    return __all__
