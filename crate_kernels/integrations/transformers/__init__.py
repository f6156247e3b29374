"""The models as those of transformers. Importing this registers them with its Auto classes.

``AutoModelForCausalLM`` and ``AutoModelForImageClassification`` then read the folders that our ``save_pretrained``
writes, and write folders that ``crate_kernels.models.from_pretrained`` reads.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForImageClassification

from crate_kernels.integrations.transformers.caches import KeyValueLayer, StatsLayer, SubspaceLayer
from crate_kernels.integrations.transformers.cards import card
from crate_kernels.integrations.transformers.configs import (
    AoTLMConfig,
    AoTVisionConfig,
    CRATEAlphaConfig,
    CRATEConfig,
    CRATELMConfig,
    CRATEMAEConfig,
    CRATEMAEEncoderConfig,
    ToSTConfig,
    ToSTLMConfig,
    config,
)
from crate_kernels.integrations.transformers.images import (
    AoTVisionForImageClassification,
    CRATEAlphaForImageClassification,
    CRATEForImageClassification,
    CRATEMAEEncoderForImageClassification,
    ToSTForImageClassification,
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
    "AoTVisionConfig",
    "AoTVisionForImageClassification",
    "CRATEAlphaConfig",
    "CRATEAlphaForImageClassification",
    "CRATEConfig",
    "CRATEForImageClassification",
    "CRATELMConfig",
    "CRATELMForCausalLM",
    "CRATELMModel",
    "CRATEMAEEncoderConfig",
    "CRATEMAEEncoderForImageClassification",
    "KeyValueLayer",
    "StatsLayer",
    "SubspaceLayer",
    "ToSTConfig",
    "ToSTForImageClassification",
    "ToSTLMConfig",
    "ToSTLMForCausalLM",
    "ToSTLMModel",
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
for _config, _head in (
    (CRATEConfig, CRATEForImageClassification),
    (CRATEAlphaConfig, CRATEAlphaForImageClassification),
    (ToSTConfig, ToSTForImageClassification),
    (AoTVisionConfig, AoTVisionForImageClassification),
    (CRATEMAEEncoderConfig, CRATEMAEEncoderForImageClassification),
):
    AutoConfig.register(_config.model_type, _config)
    AutoModelForImageClassification.register(_config, _head)
AutoConfig.register(CRATEMAEConfig.model_type, CRATEMAEConfig)  # a folder of the autoencoder, read as its encoder


def __dir__() -> list[str]:
    """List the public names."""
    return __all__
