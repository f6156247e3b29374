"""The image models as backbones: features of layers, another head, groups of parameters. Nothing of timm is needed."""

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from crate_kernels import models
from tests.models.families import build, drawn, inputs

FAMILIES = ("crate", "crate_alpha", "crate_mae_encoder", "tost", "aot_vision")
GRIDS = {"tost": (2, 3), "aot_vision": (2, 2)}
BLOCKS = {"crate_mae_encoder": "blocks", "tost": "blocks", "aot_vision": "layers"}


def model_of(family, **changes) -> Any:
    return drawn(build(family, **changes)).eval()


def tokens_after(model, family, img):
    """What each layer returns, by hooks."""
    seen = []
    for block in model.get_submodule(BLOCKS.get(family, "transformer.layers")):
        block.register_forward_hook(lambda m, args, out: seen.append(out))
    model.forward_features(img)
    return seen


@pytest.mark.parametrize("family", FAMILIES)
def test_intermediates_are_the_patches_after_each_layer(family):
    model, (img,) = model_of(family), inputs(family)
    rows, columns = GRIDS.get(family, (4, 3))
    seen = tokens_after(model, family, img)
    features, maps = model.forward_intermediates(img)
    assert_close(features, model.forward_features(img))
    prefix = 0 if family == "tost" else 1
    assert model.num_prefix_tokens == prefix
    for tokens, found in zip(seen, maps, strict=False):
        assert found.shape == (2, 24, rows, columns)
        assert_close(found.flatten(2).mT, tokens[:, prefix:])
    last = model.get_submodule(model.layout.norm)
    pairs = model.forward_intermediates(
        img, [-1], return_prefix_tokens=True, norm=True, output_fmt="NLC", intermediates_only=True
    )
    patches, *rest = pairs[0] if prefix else pairs
    assert_close(patches, last(seen[1])[:, prefix:])
    assert [t.shape for t in rest] == [(2, 1, 24)] * prefix


@pytest.mark.parametrize("family", FAMILIES)
def test_intermediates_of_some_layers(family):
    model, (img,) = model_of(family, depth=4), inputs(family)
    whole = model.forward_intermediates(img, intermediates_only=True)
    runs = []
    for index, block in enumerate(model.get_submodule(model.layout.blocks)):
        block.register_forward_hook(lambda m, args, out, index=index: runs.append(index))
    for indices, wanted in ((2, [2, 3]), ([0, -2], [0, 2]), (None, [0, 1, 2, 3]), ((1,), [1])):
        runs.clear()
        found = model.forward_intermediates(img, indices, stop_early=True, intermediates_only=True)
        assert_close(found, [whole[index] for index in wanted])
        assert runs == list(range(max(wanted) + 1))
    named = model.forward_intermediates(img, 1, return_prefix_tokens=True, output_dict=True)
    prefix = {"image_intermediates_prefix"} if model.num_prefix_tokens else set()
    assert named.keys() == {"image_features", "image_intermediates"} | prefix
    assert_close(named["image_features"], model.forward_features(img))
    assert "image_features" not in model.forward_intermediates(img, 1, output_dict=True, intermediates_only=True)


BAD = {
    "zero": lambda m, img: m.forward_intermediates(img, 0),
    "more": lambda m, img: m.forward_intermediates(img, 3),
    "beyond": lambda m, img: m.forward_intermediates(img, [2]),
    "before": lambda m, img: m.forward_intermediates(img, [-3]),
    "none": lambda m, img: m.prune_intermediate_layers([]),
    "format": lambda m, img: m.forward_intermediates(img, output_fmt="NHWC"),
    "pool": lambda m, img: m.reset_classifier(3, "max"),
    "classes": lambda m, img: m.reset_classifier(-1),
}
MESSAGES = {
    "format": "CRATE: output_fmt must be 'NCHW' or 'NLC', got 'NHWC'",
    "pool": "CRATE: global_pool must be 'token', 'avg' or '', got 'max'",
    "classes": "CRATE: num_classes must be >= 0, got -1",
}


@pytest.mark.parametrize("name", BAD)
def test_bad_calls(name):
    model, (img,) = build("crate"), inputs("crate")
    with pytest.raises(ValueError, match=MESSAGES.get(name, "CRATE: indices must be of 2 layers, got ")):
        BAD[name](model, img)
    assert model(img).shape == (2, 5)


@pytest.mark.parametrize("family", FAMILIES)
def test_another_head(family, tmp_path):
    model, (img,) = model_of(family), inputs(family)
    features = model.forward_features(img)
    assert (model.num_features, model.head_hidden_size, model.embed_dim, model.in_chans) == (24, 24, 24, 3)
    assert model.get_classifier().weight.shape == (5, 24)
    model.double().reset_classifier(7, "avg")
    assert (model.num_classes, model.global_pool, model.get_classifier().weight.dtype) == (7, "avg", torch.float64)
    assert not model.get_classifier().training
    out = model(img.double())
    assert out.shape == (2, 7)
    model.save_pretrained(tmp_path)
    assert_close(models.from_pretrained(tmp_path).double().eval()(img.double()), out)
    model.float().reset_classifier(0, "token")
    assert isinstance(model.get_classifier(), nn.Identity)
    assert_close(model(img), model.forward_head(features, pre_logits=True))
    model.reset_classifier(0, "")
    assert model(img).shape == features.shape
    model.reset_classifier(3)
    assert model(img).shape == (*features.shape[:2], 3)


@pytest.mark.parametrize("family", ["crate_alpha", "crate_mae_encoder", "tost"])
def test_another_head_starts_as_the_first(family):
    """Of these families, the published code draws the head itself."""
    model = build(family)
    model.reset_classifier(2000)
    first, second = model.get_classifier().weight, build(family, num_classes=2000).get_classifier().weight
    assert abs(first.std() / second.std() - 1) < 0.02
    assert not model.get_classifier().bias.any()


@pytest.mark.parametrize("family", FAMILIES)
def test_pruned_layers(family):
    model, (img,) = model_of(family, depth=3), inputs(family)
    wanted = model.forward_intermediates(img, [0, 1], intermediates_only=True)
    assert model.prune_intermediate_layers([0, -2], prune_norm=True) == [0, 1]
    assert len(model.get_submodule(model.layout.blocks)) == len(model.feature_info) == model.config.depth == 2
    assert_close(model.forward_intermediates(img, [0, 1], intermediates_only=True), wanted)
    assert isinstance(model.get_submodule(model.layout.norm), nn.Identity)
    assert (model.num_classes, model.global_pool) == (0, "")
    assert not [name for name, _ in model.named_parameters() if name.startswith(("head", "mlp_head", "cls_attn"))]
    assert model(img).shape == model.forward_features(img).shape
    if family == "tost":
        assert model.forward_features(img).shape == (2, 6, 24)
        with pytest.raises(ValueError, match="ToST: global_pool must be 'avg' or '', since the class token is pruned"):
            model.reset_classifier(3, "token")
        model.reset_classifier(3, "avg")
        assert model(img).shape == (2, 3)


@pytest.mark.parametrize("family", FAMILIES)
def test_descriptions_name_what_is_there(family):
    with torch.device("meta"):
        model = build(family, depth=3)
    names = dict(model.named_parameters())
    assert f"{model.layout.stem}.weight" in names
    assert f"{model.layout.classifier}.weight" in names
    assert isinstance(model.get_submodule(model.layout.norm), nn.LayerNorm)
    info = model.feature_info
    size = 8 if family == "tost" else 4
    assert [(each["num_chs"], each["reduction"]) for each in info] == [(24, size)] * 3
    assert all(isinstance(model.get_submodule(each["module"]), nn.Module) for each in info)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_has_one_layer(family):
    model = build(family)
    groups = model.group_matcher()
    assert groups == model.group_matcher(coarse=True)
    patterns = [groups.pop("stem"), *(pattern for group in groups.values() for pattern, _ in group)]
    matches = {name: [p for p in patterns if re.match(p, name)] for name, _ in model.named_parameters()}
    last = "head" if "head.weight" in matches else "mlp_head.1"
    assert {name for name, found in matches.items() if not found} == {f"{last}.weight", f"{last}.bias"}
    assert all(len(found) == 1 for name, found in matches.items() if not name.startswith(last))
    stem = {name for name, found in matches.items() if found == patterns[:1]}
    assert not [name for name in stem if name.startswith((*groups, "norm", "mlp_head", "head"))]
    assert model.no_weight_decay() <= set(matches)


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpointing_can_be_set_later(family):
    model, (img,) = model_of(family), inputs(family)
    runs, block = [], model.get_submodule(model.layout.blocks)[0]
    block.register_forward_pre_hook(lambda *_: runs.append(1))
    for enable, wanted in ((True, 2), (False, 1)):
        for call in (model, lambda img: model.forward_intermediates(img, intermediates_only=True)[-1]):
            runs.clear()
            model.set_grad_checkpointing(enable)
            call(img).sum().backward()
            assert (len(runs), model.config.grad_checkpointing) == (wanted, enable)


def test_an_encoder_of_mae_reads_a_checkpoint_of_the_whole():
    whole: Any = model_of("crate_mae")
    (img, *_) = inputs("crate_mae")
    c = whole.config
    config = {name: getattr(c, name) for name in ("embed_dim", "depth", "num_heads", "img_size", "patch_size")}
    config |= {"decoder_embed_dim": 24, "decoder_depth": 2, "decoder_num_heads": 2}
    encoder: Any = models.from_official("crate_mae_encoder", {"model": whole.state_dict()}, config).eval()
    assert_close(encoder.forward_features(img), whole.forward_features(img))
    assert_close(encoder(img), whole.forward_features(img)[:, 0])
    again: Any = models.from_official("crate_mae_encoder", encoder.state_dict(), config).eval()
    larger = torch.ones(1, 3, 16, 20)
    assert_close(again.forward_features(larger), whole.forward_features(larger))
    with pytest.raises(ValueError, match=r"CRATEMAEEncoder: .* give a whole CRATEMAE") as refused:
        models.to_official(encoder)
    assert "crate_mae_encoder" not in str(refused.value)
    fitted, weights = build("crate_mae", img_size=(8, 12)), encoder.state_dict()  # as the message says
    fitted.load_state_dict({**weights, "decoder_pos_embed": weights["pos_embed"]}, strict=False)
    assert_close(fitted.eval().forward_features(img), whole.forward_features(img))
    assert models.to_official(fitted).keys() == whole.state_dict().keys()
    with pytest.raises(ValueError, match="CRATEMAEEncoder: embed_dim must be a multiple of 4, got 18"):
        build("crate_mae_encoder", embed_dim=18)
