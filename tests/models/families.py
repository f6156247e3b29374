"""Every family, small: a config, what it is fed and what comes out. The tests of all models run over this table."""

from dataclasses import replace

import torch

from crate_kernels.models.aot import AoTLM, AoTLMConfig, AoTRegression, AoTRegressionConfig, AoTVision, AoTVisionConfig
from crate_kernels.models.crate import CRATE, CRATEConfig
from crate_kernels.models.crate_alpha import CRATEAlpha, CRATEAlphaConfig
from crate_kernels.models.crate_lm import CRATELM, CRATELMConfig
from crate_kernels.models.crate_mae import CRATEMAE, CRATEMAEConfig
from crate_kernels.models.crate_mae_encoder import CRATEMAEEncoder, CRATEMAEEncoderConfig
from crate_kernels.models.tost import ToST, ToSTConfig
from crate_kernels.models.tost_lm import ToSTLM, ToSTLMConfig

PATCHES = {"image_size": (8, 12), "patch_size": (2, 4)}
TEXT = {"block_size": 9, "vocab_size": 11, "n_layer": 2, "n_head": 3, "n_embd": 24}
FAMILIES = {
    "crate": (CRATE, CRATEConfig(24, 2, 3, 8, **PATCHES, num_classes=5)),
    "crate_alpha": (CRATEAlpha, CRATEAlphaConfig(24, 2, 3, 8, **PATCHES, num_classes=5)),
    "crate_mae": (CRATEMAE, CRATEMAEConfig(24, 2, 3, 24, 2, 2, img_size=(8, 12), patch_size=(2, 4))),
    "crate_mae_encoder": (CRATEMAEEncoder, CRATEMAEEncoderConfig(24, 2, 3, (8, 12), (2, 4), num_classes=5)),
    "tost": (ToST, ToSTConfig(24, 2, 3, img_size=(16, 24), patch_size=8, num_classes=5)),
    "crate_lm": (CRATELM, CRATELMConfig(**TEXT)),
    "crate_lm_overcomplete": (CRATELM, CRATELMConfig(**TEXT, overcomplete=True)),
    "aot_vision": (AoTVision, AoTVisionConfig(24, 2, 3, image_size=8, patch_size=4, num_classes=5)),
    "aot_lm": (AoTLM, AoTLMConfig(**TEXT)),
    "aot_regression": (AoTRegression, AoTRegressionConfig(4, 24, 2, 3, n_positions=12)),
    "tost_lm": (ToSTLM, ToSTLMConfig(**TEXT, bias=False)),
}
# Built from PyTorch's operators alone, for comparison.
BASELINES = {"aot_mhsa_lm": (AoTLM, AoTLMConfig(**TEXT, attention="mhsa", bias=False))}


def build(family, seed=0, **changes):
    torch.manual_seed(seed)
    model_class, config = (FAMILIES | BASELINES)[family]
    return model_class(replace(config, **changes))


def drawn(model, seed=1):
    """Draw every parameter and running statistic of a model, so that ones, zeros and small scales hide nothing."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.is_floating_point():
                noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor)
                one = name.endswith((".temp", "running_var", "gamma1", "gamma2")) or (
                    tensor.dim() == 1 and name.endswith("weight")
                )
                tensor.copy_(1 + 0.1 * noise if one else 0.3 * noise)
    return model


def inputs(family, batch=2, dtype=torch.float32):
    """What ``forward`` takes."""
    generator = torch.Generator().manual_seed(2)
    if family.endswith(("_lm", "_overcomplete")):
        return (torch.randint(TEXT["vocab_size"], (batch, 7), generator=generator),)
    if family == "aot_regression":
        drawn = (torch.randn(batch, 6, *size, generator=generator, dtype=torch.float64) for size in ((4,), ()))
        return tuple(each.to(dtype) for each in drawn)
    size = {"tost": (16, 24), "aot_vision": (8, 8)}.get(family, (8, 12))
    img = torch.randn(batch, 3, *size, generator=generator, dtype=torch.float64).to(dtype)
    if family == "crate_mae":
        return img, None, (torch.rand(batch, 12, generator=generator) < 0.7).to(dtype)
    return (img,)


def output(family, result):
    """The tensor among what ``forward`` returns that everything enters."""
    if family == "crate_mae":
        return result[1]
    return result[0] if isinstance(result, tuple) else result
