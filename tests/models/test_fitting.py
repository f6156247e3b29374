"""A config that does not fit a checkpoint: the error says which size, and what it must be."""

import pytest
import torch

from crate_kernels import models
from tests.models.families import TEXT, build
from tests.models.test_crate import PUBLISHED
from tests.models.test_crate_alpha import clipa, tower

TOST = {"embed_dim": 24, "depth": 2, "num_heads": 3, "img_size": (16, 24), "patch_size": 8, "num_classes": 5}

HEAD = "; from_official(..., num_classes=...) makes another head"
POSITIONS = "; from_official(..., image_size=...) resizes the positions"
WRONG = {
    "forgotten": ("crate", {"dim_head": ...}, "dim_head must be 8, got 64 by default"),
    "heads": ("crate", {"dim_head": 12}, "dim_head must be 8, got 12, or heads must be 2, got 3"),
    "width": ("crate", {"dim": 48}, "dim must be 24, got 48"),
    "depth": ("crate", {"depth": 5}, "depth must be 2, got 5"),
    "more-layers": ("crate", {"depth": 1}, "depth must be 2, got 1"),
    "classes": ("crate", {"num_classes": ...}, f"num_classes must be 5, got 1000 by default{HEAD}"),
    "channels": ("crate", {"channels": 1}, "channels must be 3, got 1"),
    "two": (
        "crate",
        {"dim_head": 16, "num_classes": 7},
        f"dim_head must be 8, got 16; num_classes must be 5, got 7{HEAD}",
    ),
    "alpha": ("crate_alpha", {"overcomplete_ratio": 2}, "overcomplete_ratio must be 4, got 2"),
    "tost": ("tost_vision", {"num_heads": 6}, "num_heads must be 3, got 6"),
    "vocabulary": ("crate_lm", {"vocab_size": 50304}, "vocab_size must be 11, got 50304"),
    "positions": ("tost_lm", {"block_size": ...}, "block_size must be 9, got 1024 by default"),
}
CONFIGS = {
    "crate": PUBLISHED,
    "crate_alpha": PUBLISHED,
    "tost_vision": TOST,
    "crate_lm": TEXT,
    "tost_lm": {**TEXT, "bias": False},
}


@pytest.mark.parametrize(("system", "changes", "message"), WRONG.values(), ids=WRONG)
def test_the_size_that_does_not_fit(system, changes, message):
    state = build("tost" if system == "tost_vision" else system).state_dict()
    models.from_official(system, state, CONFIGS[system])
    config = {name: value for name, value in {**CONFIGS[system], **changes}.items() if value is not ...}
    with pytest.raises(ValueError, match="from_official: config does not fit the weights of this") as caught:
        models.from_official(system, state, config)
    assert str(caught.value).partition(f"{system}: ")[2] == message


SIDES = {
    "image": ({"image_size": ...}, f"image_size must be 16, got 224 by default{POSITIONS}"),
    "patch": ({"patch_size": 8}, "patch_size must be 4, got 8"),
    "both": (
        {"image_size": 8, "patch_size": 8},
        f"patch_size must be 4, got 8; image_size must be 16, got 8{POSITIONS}",
    ),
}


@pytest.mark.parametrize(("changes", "message"), SIDES.values(), ids=SIDES)
def test_a_side_of_a_square(changes, message):
    config = {**PUBLISHED, "image_size": 16, "patch_size": 4}
    state = models.from_official("crate_tiny", build("crate", image_size=16, patch_size=4).state_dict(), config)
    wrong = {name: value for name, value in {**config, **changes}.items() if value is not ...}
    with pytest.raises(ValueError, match="config does not fit the weights of this crate: ") as caught:
        models.from_official("crate", state.state_dict(), wrong)
    assert str(caught.value).endswith(f"crate: {message}")


NAMED = {
    "config": ("crate", "crate_tiny", "crate_tiny"),
    "system": ("crate_tiny", "crate_tiny", {}),
    "change": ("crate_tiny", "crate_base", {"dim": 768, "heads": 12}),
    "alpha": ("crate_alpha_s16", "crate_alpha_s16", {}),
    "mae": ("crate_mae_tiny", "crate_mae_tiny", {}),
    "encoder": ("crate_mae_encoder", "crate_mae_encoder_tiny", "crate_mae_encoder_tiny"),
    "tost": ("tost_vision", "tost_tiny_24", "tost_tiny_24"),
    "lm": ("crate_lm_base", "crate_lm_base", {"backend": "reference"}),
    "overcomplete": ("crate_lm_overcomplete_1l", "crate_lm_overcomplete_1l", {}),
    "tost-lm": ("tost_lm_base", "tost_lm_base", {}),
    "redunet": ("redunet_polar", "redunet_polar", {}),  # of 40 layers; redunet_gaussians has 2,000
}


@pytest.mark.parametrize(("system", "size", "config"), NAMED.values(), ids=NAMED)
def test_a_size_by_name(system, size, config):
    with torch.device("meta"):
        source = models.create(size)
        backend = {"backend": config["backend"]} if isinstance(config, dict) and "backend" in config else {}
        wanted = models.create(size, **backend).config
        # A checkpoint holds values, which this one needs none of.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("crate_kernels.models._shared.official.check", lambda *_: None)
            model = models.from_official(system, source.state_dict(), config)
    assert model.config == wanted


def test_the_weights_decide_what_a_size_leaves_open():
    """CLIPA's eps, which a size has as by default."""
    config = {"dim": 24, "depth": 2, "heads": 3, "dim_head": 8, "image_size": 8, "patch_size": 4, "num_classes": 5}
    assert models.from_official("crate_alpha_b16", clipa(tower()), config).config.head_eps == 1e-6


BAD = {
    "near": (("crate_smal", {}), "system must be one of crate, .*got 'crate_smal'; did you mean crate_small\\?"),
    "unpublished": (("aot_vision_mssa", {}), "no checkpoint of aot_vision_mssa was published"),
    "other": (("crate", {}, "tost_tiny_12"), "config must be a size of crate, got tost_tiny_12 of tost_vision"),
    "unknown": (("crate", {}, "tiny"), "config must be a mapping or one of crate_tiny, .*got 'tiny'"),
    "field": (("crate_tiny", {}, {"lmbda": 1}), "arguments must be among .*; got lmbda; did you mean lambd\\?"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD)
def test_bad_names(arguments, message):
    with pytest.raises(ValueError, match=f"from_official: {message}"):
        models.from_official(*arguments) if len(arguments) == 3 else models.from_official(*arguments, {})


@pytest.mark.parametrize("saved", [5, 0])
def test_a_folder_with_another_number_of_classes(saved, tmp_path):
    build("crate", num_classes=saved).save_pretrained(tmp_path)
    message = rf"config.json: num_classes must be {saved}, as saved, got 10; load it as it is and call"
    for load in (models.from_pretrained, models.CRATE.from_pretrained):
        with pytest.raises(ValueError, match=message + r" model.reset_classifier\(10\)"):
            load(tmp_path, num_classes=10)
    with pytest.raises(ValueError, match="num_classes must be >= 0, got -1"):
        models.from_pretrained(tmp_path, num_classes=-1)
    model = models.from_pretrained(tmp_path, num_classes=saved)
    model.reset_classifier(10)
    assert model(torch.randn(1, 3, 8, 12)).shape == (1, 10)


@pytest.mark.parametrize("system", ["crate", "crate_alpha", "aot_vision"])
def test_a_folder_with_another_image_size(system, tmp_path):
    build(system).save_pretrained(tmp_path)
    message = r"config.json: image_size must be .*, as saved, got \(16, 12\); load it as it is and call"
    with pytest.raises(ValueError, match=message + r" model.set_input_size\(\(16, 12\)\)"):
        models.from_pretrained(tmp_path, image_size=(16, 12))
    model = models.from_pretrained(tmp_path)
    model.set_input_size((16, 12))
    assert model(torch.randn(1, 3, 16, 12)).shape[0] == 1
