"""The models as those of transformers. Importing this registers them with its Auto classes.

``AutoModelForCausalLM`` then reads the folders that ``save_pretrained`` of ours writes, and writes folders that
``crate_kernels.models.from_pretrained`` reads.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from crate_kernels.integrations.transformers.caches import KeyValueLayer, StatsLayer, SubspaceLayer
from crate_kernels.integrations.transformers.configs import AoTLMConfig, CRATELMConfig, ToSTLMConfig, config
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
    "CRATELMConfig",
    "CRATELMForCausalLM",
    "CRATELMModel",
    "KeyValueLayer",
    "StatsLayer",
    "SubspaceLayer",
    "ToSTLMConfig",
    "ToSTLMForCausalLM",
    "ToSTLMModel",
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
