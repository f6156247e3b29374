"""The image models of the tests: ours, and the same weights as a classifier of transformers."""

from functools import cache

from transformers import AutoModelForImageClassification

from crate_kernels.integrations import transformers as integration
from tests.models import families

CONFIGS = {
    "crate": integration.CRATEConfig,
    "crate_alpha": integration.CRATEAlphaConfig,
    "crate_mae_encoder": integration.CRATEMAEEncoderConfig,
    "tost": integration.ToSTConfig,
    "aot_vision": integration.AoTVisionConfig,
}


@cache
def pair(family):
    """Return our model with drawn weights, and transformers' with the same; nobody changes them."""
    ours = families.drawn(families.build(family)).eval()
    return ours, wrapped(ours, family)


def wrapped(ours, family, **fields):
    model = AutoModelForImageClassification.from_config(CONFIGS[family].of(ours.config, **fields)).eval()
    model.load_state_dict(ours.state_dict())
    return model


def images(family):
    return families.inputs(family)[0]
