"""CRATE-alpha: its start, CLIPA checkpoints, errors. Its equations are in test_restated."""

import copy
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from crate_kernels import models
from crate_kernels.models.crate_alpha import CRATEAlpha, CRATEAlphaConfig
from tests.models import restated
from tests.models.families import build, drawn, inputs

PUBLISHED = {"image_size": 8, "patch_size": 4, "num_classes": 5, "dim": 24, "depth": 2, "heads": 3, "dim_head": 8}


def test_starts_as_the_training_code_starts_it():
    torch.manual_seed(0)
    model = CRATEAlpha(CRATEAlphaConfig(128, 1, 2, 64, image_size=32, patch_size=8))
    attention, code = model.transformer.layers[0]
    bounds = {128: (code.fn.D, code.fn.D1), 3 * 64: (model.conv1.weight,)}
    for fan, weights in bounds.items():
        for weight in weights:
            bound = (6 / fan) ** 0.5
            assert 0.95 * bound < weight.abs().max() <= bound
    deviations = {0.02: (attention.fn.qkv.weight, attention.fn.to_out[0].weight, model.pos_embedding)}
    deviations |= {1e-6: (model.cls_token,)}
    deviations[0.02] += (model.mlp_head[1].weight,)
    for std, weights in deviations.items():
        for weight in weights:
            assert abs(weight.std() / std - 1) < 5 / (2 * weight.numel()) ** 0.5  # five standard deviations
    assert not model.conv1.bias.any()
    assert not model.mlp_head[1].bias.any()


def clipa(model, text=True):
    """The checkpoint of a CLIPA two-tower model whose vision tower is ``model``, its head without a bias."""
    state = model.state_dict()
    tower = {
        "conv1.weight": state["conv1.weight"],
        "class_embedding": state["cls_token"][0, 0],
        "positional_embedding": state["pos_embedding"][0],
        "ln_post.weight": state["mlp_head.0.weight"],
        "ln_post.bias": state["mlp_head.0.bias"],
        "proj": state["mlp_head.1.weight"].T,
    }
    for i in range(model.config.depth):
        ours, theirs = f"transformer.layers.{i}.", f"transformer.resblocks.{i}."
        for place, norm in (("0", "ln_1"), ("1", "ln_2")):
            for leaf in ("weight", "bias"):
                tower[f"{theirs}{norm}.{leaf}"] = state[f"{ours}{place}.norm.{leaf}"]
        tower[f"{theirs}attn.in_proj_weight"] = state[f"{ours}0.fn.qkv.weight"].repeat(3, 1)
        tower[f"{theirs}attn.out_proj.weight"] = state[f"{ours}0.fn.to_out.0.weight"]
        tower[f"{theirs}mlp.c_fc"], tower[f"{theirs}mlp.c_proj"] = state[f"{ours}1.fn.D"], state[f"{ours}1.fn.D1"]
    if not text:
        return tower
    names = ["positional_embedding", "text_projection", "logit_scale", "token_embedding.weight", "ln_final.weight"]
    names += ["ln_final.bias", "transformer.resblocks.0.ln_1.weight", "transformer.resblocks.0.mlp.c_fc.weight"]
    names += ["transformer.resblocks.0.attn.in_proj_weight"]
    return {f"visual.{name}": value for name, value in tower.items()} | {name: torch.zeros(6, 2) for name in names}


def tower():
    """A model as CLIPA's vision tower is: no bias in the stem or the head, its last norm's eps 1e-6."""
    model: Any = drawn(CRATEAlpha(CRATEAlphaConfig(24, 2, 3, 8, 8, 4, num_classes=5, head_eps=1e-6))).double().eval()
    with torch.no_grad():
        model.conv1.bias.zero_()
        model.mlp_head[1].bias.zero_()
    return model


@pytest.mark.parametrize("text", [True, False], ids=["two-towers", "vision-tower"])
def test_a_clipa_checkpoint(text):
    source, img = tower(), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    checkpoint = {"state_dict": clipa(source, text)}
    before = copy.deepcopy(checkpoint)
    model = models.from_official("crate_alpha", checkpoint, PUBLISHED).double().eval()
    assert model.config.head_eps == 1e-6
    assert torch.equal(model(img), source(img))
    assert str(checkpoint) == str(before)


def test_a_published_checkpoint_keeps_its_own_eps():
    source = drawn(CRATEAlpha(CRATEAlphaConfig(**PUBLISHED)))
    model = models.from_official("crate_alpha", source.state_dict(), PUBLISHED)
    assert model.config.head_eps == 1e-5
    img = torch.randn(2, 3, 8, 8)
    assert torch.equal(model(img), source(img))


def without(state, name):
    return {key: value for key, value in state.items() if key != name}


def unequal(state, name="visual.transformer.resblocks.1.attn.in_proj_weight"):
    changed = state[name].clone()
    changed[-1, -1] += 1e-6
    return {**state, name: changed}


def load(change, **config):
    return models.from_official("crate_alpha", change(clipa(tower())), {**PUBLISHED, **config})


CLIPA = {
    "thirds": (lambda: load(unequal), r"1.attn.in_proj_weight must hold one projection three times, got different"),
    "two-thirds": (
        lambda: load(lambda s: {**s, "visual.transformer.resblocks.0.attn.in_proj_weight": torch.zeros(8, 4)}),
        r"0.attn.in_proj_weight must be \(3 \* dim, dim\), got \(8, 4\)",
    ),
    "no-tensor": (
        lambda: load(lambda s: {**s, "visual.transformer.resblocks.0.attn.in_proj_weight": 1}),
        r"0.attn.in_proj_weight must be \(3 \* dim, dim\), got int",
    ),
    "missing": (
        lambda: load(lambda s: without(s, "visual.transformer.resblocks.1.mlp.c_fc")),
        r"missing transformer.layers.1.1.fn.D \(24, 96\)",
    ),
    "unexpected": (lambda: load(lambda s: {**s, "visual.extra": torch.ones(1)}), "unexpected extra$"),
    "other-size": (
        lambda: load(lambda s: s, num_classes=7),
        "config does not fit the weights of this crate_alpha: num_classes must be 5, got 7",
    ),
}


@pytest.mark.parametrize(("call", "message"), CLIPA.values(), ids=CLIPA)
def test_a_clipa_checkpoint_that_does_not_fit(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_patches_may_be_of_any_shape():
    model = drawn(build("crate_alpha").double())
    (img,) = inputs("crate_alpha", dtype=torch.float64)
    assert_close(model(img), restated.crate_alpha(model.state_dict(), model.config, img))


BAD = {
    "channels": (lambda: build("crate_alpha")(torch.ones(1, 1, 8, 12)), r"CRATEAlpha: img must be \(batch, channels=3"),
    "smaller": (lambda: build("crate_alpha")(torch.ones(1, 3, 8, 8)), "CRATEAlpha: img must have 8x12 pixels"),
    "image-size": (lambda: build("crate_alpha", image_size=9), "CRATEAlpha: image_size must be a multiple of patch_"),
    "eps": (lambda: build("crate_alpha", head_eps=-1.0), "CRATEAlpha: head_eps must be >= 0.0, got -1.0"),
}


@pytest.mark.parametrize(("call", "message"), BAD.values(), ids=BAD)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
