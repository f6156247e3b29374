"""Names and parameter counts of every published size, on the meta device."""

import pytest
import torch

from crate_kernels import models

# As the published classes count: all parameters, fixed positions included, at 224x224 and 1000 classes.
COUNTED = {
    "crate_tiny": 6_090_856,
    "crate_small": 13_116_328,
    "crate_base": 22_796_008,
    "crate_large": 77_641_192,
    "crate_base_demo": 38_831_570,
    "crate_small_21k": 14_118_482,
    "crate_base_21k": 38_831_570,
    "crate_base_768": 22_625_664,
    "crate_alpha_b16": 72_328_936,
    "crate_alpha_l14": 253_650_920,
    "tost_tiny_12": 5_769_328,
    "tost_tiny_12_p8": 5_759_560,
    "tost_small_12": 22_589_944,
    "tost_tiny_24": 10_223_008,
    "tost_small_24": 40_344_664,
    "tost_medium_24": 71_481_064,
    "tost_large_24": 160_286_920,
}
# In millions, to the digits that are published; language models without positions.
ROUNDED = {
    "crate_mae_tiny": ("11.56", 2),
    "crate_mae_small": ("25.41", 2),
    "crate_mae_base": ("44.64", 2),
    "crate_mae_large": ("154.3", 1),
    "crate_lm_base": ("59.9", 1),
    "crate_lm_overcomplete_12l": ("81.1", 1),
    "tost_lm_base": ("109.6", 1),
    "tost_lm_medium": ("303.7", 1),
    "tost_lm_large": ("655.1", 1),
}


def alpha(width, depth, patch):
    """Stem, positions, class token; two norms, three projections' worth of 2 + 8 widths a layer; head."""
    stem = width * 3 * patch**2 + width + width * ((224 // patch) ** 2 + 1) + width
    return stem + depth * (4 * width + 10 * width**2) + 2 * width + 1000 * width + 1000


def causal(width, layers, hidden=None):
    """Embeddings; two norms, two projections and a bias, a dictionary a layer; a norm where overcomplete."""
    layer = 4 * width + 2 * width**2 + width + width * (hidden or width)
    return 50304 * width + layers * layer + (2 * width if hidden else 0)


def mae_encoder(width, layers):
    """Stem, class token; two norms, two projections and a bias, a dictionary a layer; a norm; no head."""
    return (width * 768 + width) + width + layers * (5 * width + 3 * width**2) + 2 * width


def tost_of_patch_8(name):
    """One convolution of stride 2 fewer: the stem starts at a width of embed_dim / 4, not / 8."""
    width = {"small": 384, "tiny": 192, "medium": 512, "large": 768}[name.split("_")[1]]
    first = 3 * 9 * (width // 8) + (width // 8) * (width // 4) * 9 + 2 * (width // 8)
    return COUNTED[name.removesuffix("_p8")] - first + 3 * 9 * (width // 4)


# No count is published for these: from the equations.
DERIVED = {
    **{
        f"crate_alpha_{name}": alpha(*sizes)
        for name, sizes in {
            "ti16": (192, 12, 16),
            "s16": (576, 12, 16),
            "b32": (768, 12, 32),
            "b8": (768, 12, 8),
            "l32": (1024, 24, 32),
            "l8": (1024, 24, 8),
            "h14": (1280, 32, 14),
            "g14": (1408, 40, 14),
            "G14": (1664, 48, 14),
            "e14": (1792, 56, 14),
        }.items()
    },
    **{
        f"crate_mae_encoder_{name}": mae_encoder(*sizes)
        for name, sizes in {"tiny": (384, 12), "small": (576, 12), "base": (768, 12), "large": (1024, 24)}.items()
    },
    **{
        f"crate_lm_{name}": causal(*sizes)
        for name, sizes in {
            "medium": (1024, 24),
            "large": (1280, 36),
            "xl": (1600, 48),
            **{f"overcomplete_{layers}l": (768, layers, 3072) for layers in (1, 2, 3, 6)},
        }.items()
    },
    **{
        name: tost_of_patch_8(name)
        for name in ("tost_small_12_p8", "tost_tiny_24_p8", "tost_small_24_p8", "tost_medium_24_p8", "tost_large_24_p8")
    },
}


def count(name):
    with torch.device("meta"):
        model = models.create(name)
    return model.num_parameters() if "_lm_" in name else sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", [*COUNTED, *DERIVED])
def test_parameter_count(name):
    assert count(name) == {**COUNTED, **DERIVED}[name]


@pytest.mark.parametrize(("name", "published", "digits"), [(k, *v) for k, v in ROUNDED.items()], ids=ROUNDED)
def test_parameter_count_in_millions(name, published, digits):
    assert f"{count(name) / 1e6:.{digits}f}" == published


def test_the_equations_count_what_is_published():
    assert alpha(768, 12, 16) == COUNTED["crate_alpha_b16"]
    assert alpha(1024, 24, 14) == COUNTED["crate_alpha_l14"]
    assert tost_of_patch_8("tost_tiny_12_p8") == COUNTED["tost_tiny_12_p8"]


def test_names():
    """AoT and ReduNet count theirs in other tests."""
    assert {name for name in models.names() if name.startswith(("crate", "tost"))} == {*COUNTED, *ROUNDED, *DERIVED}
