"""Checkpoints as people have them: wrapped, of a larger model, of other classes and image sizes, written by Flax."""

import logging
import re

import numpy
import pytest
import torch

from crate_kernels import models
from crate_kernels.models.crate import CRATE, CRATEConfig
from crate_kernels.models.crate_alpha import CRATEAlpha, CRATEAlphaConfig
from tests.models.families import TEXT, build, drawn

CONFIG = {"image_size": 8, "patch_size": 4, "num_classes": 5, "dim": 24, "depth": 2, "heads": 3, "dim_head": 8}
IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.fixture(autouse=True)
def said(caplog):
    """The lines that the package says."""
    caplog.set_level(logging.WARNING, "crate_kernels")
    return lambda: [record.getMessage() for record in caplog.records]


def crate(**changes):
    torch.manual_seed(0)
    return drawn(CRATE(CRATEConfig(**{**CONFIG, **changes}))).double().eval()


def prefixed(state, prefix):
    return {prefix + name: t for name, t in state.items()}


HEAD = {"head.mlp.0.weight": torch.zeros(3, 3), "head.mlp.0.bias": torch.zeros(3)}
WRAPPED = {
    "teacher": (lambda s: {"student": {}, "teacher": s, "epoch": 3}, None),
    "state_dict_ema": (lambda s: {"state_dict_ema": s}, None),
    "lightning": (lambda s: {"state_dict": prefixed(s, "model.")}, None),
    "backbone": (lambda s: {"teacher": prefixed(s, "module.backbone.")}, None),
    "two": (
        lambda s: {"state_dict_ema": {"a": 1}, "state_dict": s},
        "took the weights under 'state_dict'; the .*'state_dict_ema'",
    ),
    "head-beside": (
        lambda s: {"teacher": {**prefixed(s, "backbone."), **HEAD}},
        r"left out 2 weights of the checkpoint, beside the backbone: head.mlp.\*.weight, head.mlp.\*.bias",
    ),
}


def test_a_wrapper_of_another_name_is_said():
    with pytest.raises(ValueError, match=r"unexpected student, a mapping: if it holds the weights, give it alone$"):
        models.from_official("crate", {"student": crate().state_dict()}, CONFIG)


@pytest.mark.parametrize(("wrap", "line"), WRAPPED.values(), ids=WRAPPED)
def test_wrapped_checkpoints(wrap, line, said):
    source = crate()
    model = models.from_official("crate", wrap(source.state_dict()), CONFIG).double().eval()
    assert torch.equal(model(IMAGES), source(IMAGES))
    lines = said()
    if line is None:
        assert not lines
    else:
        assert len(lines) == 1
        assert re.match(f"from_official: {line}", lines[0])


@pytest.mark.parametrize("config", [CONFIG, {**CONFIG, "num_classes": 99}], ids=["known", "other"])
def test_another_number_of_classes(config, said):
    source = crate()
    model = models.from_official("crate", source.state_dict(), config, num_classes=7).double().eval()
    assert model.config.num_classes == model.num_classes == 7
    assert model(IMAGES).shape == (2, 7)
    assert torch.equal(model.forward_features(IMAGES), source.forward_features(IMAGES))
    assert said() == [
        "from_official: left out 2 weights of the checkpoint, the classifier, which is replaced: mlp_head.*.weight, "
        "mlp_head.*.bias",
        "from_official: mlp_head.1 is new, of 7 classes",
    ]


@pytest.mark.parametrize("size", [16, (8, 12)], ids=["larger", "wider"])
def test_another_image_size(size, said):
    source = crate()
    model = models.from_official("crate", source.state_dict(), CONFIG, image_size=size).double().eval()
    grid = (4, 4) if size == 16 else (2, 3)
    assert model.pos_embedding.shape == (1, 1 + grid[0] * grid[1], 24)
    positions = source.pos_embedding[0, 1:].detach().T.view(1, 24, 2, 2)
    expected = torch.nn.functional.interpolate(positions, size=grid, mode="bicubic", align_corners=False)
    torch.testing.assert_close(model.pos_embedding[0, 1:].T.reshape(expected.shape), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model.pos_embedding[0, 0], source.pos_embedding[0, 0])
    assert said() == [f"from_official: pos_embedding is resized, from 2 x 2 patches to {grid[0]} x {grid[1]}"]
    assert model.config.image_size == size


def test_another_image_size_of_an_autoencoder(said):
    whole = build("crate_mae")
    config = {k: v for k, v in vars(whole.config).items() if k != "backend"}
    model = models.from_official("crate_mae", whole.state_dict(), config, image_size=(12, 8))
    names = "pos_embed and decoder_pos_embed are resized"
    assert said() == [f"from_official: {names}, from 4 x 3 patches to 6 x 2"]
    assert model.decoder_pos_embed.shape == (1, 13, 24)


def test_texts_have_no_image_size():
    model = build("crate_lm")
    with pytest.raises(ValueError, match="image_size must be None for crate_lm, which has no images"):
        models.from_official("crate_lm", model.state_dict(), TEXT, image_size=16)


def test_images_of_the_saved_size_change_nothing(said):
    source = crate()
    model = models.from_official("crate", source.state_dict(), CONFIG, image_size=8).double().eval()
    assert torch.equal(model(IMAGES), source(IMAGES))
    assert not said()


def test_a_backbone_without_a_classifier_gets_one(said):
    source = crate(num_classes=0)
    checkpoint = {"teacher": prefixed(source.state_dict(), "backbone.")}
    model = models.from_official("crate", checkpoint, CONFIG, num_classes=7)
    assert model.double().eval()(IMAGES).shape == (2, 7)
    assert said() == ["from_official: mlp_head.1 is new, of 7 classes"]
    with pytest.raises(ValueError, match=r"missing mlp_head.1.weight \(5, 24\)"):
        models.from_official("crate", source.state_dict(), CONFIG)


def test_the_demo_checkpoint_has_two_heads(said):
    source = crate(num_classes=24)
    state = {**source.state_dict(), "head.weight": torch.zeros(9, 24), "head.bias": torch.zeros(9)}
    size = {name: value for name, value in CONFIG.items() if name != "num_classes"}
    model = models.from_official("crate_base_demo", {"model": state}, size)  # a size of 21842 classes
    assert torch.equal(model.double().eval()(IMAGES), source(IMAGES))
    (line,) = said()
    assert line.endswith(
        "2 weights of the checkpoint, a second head, which forward does not apply: head.weight, head.bias"
    )


def test_what_is_left_out_is_said(said):
    decoder = models.to_official(models.create("crate_mae_tiny", depth=1, decoder_depth=1, img_size=32))
    models.from_official("crate_mae_encoder_tiny", decoder, {"depth": 1, "img_size": 32})
    args = {"n_layer": 2, "n_head": 2, "n_embd": 8, "block_size": 4, "vocab_size": 16}
    published = models.to_official(models.create("crate_lm_base", **args))
    models.from_official("crate_lm", published, args)
    first, second = said()
    assert "the decoder's: " in first
    assert second == "from_official: left out 2 weights of the checkpoint, causal masks: transformer.h.*.attn.bias"


NONE = {
    "classes": ({"num_classes": 3}, ValueError, "num_classes must be None for crate_mae, which has no classifier"),
    "type": ({"num_classes": "3"}, TypeError, "from_official: num_classes must be an int, got str"),
    "negative": ({"num_classes": -1}, ValueError, "from_official: num_classes must be >= 0, got -1"),
}


@pytest.mark.parametrize(("changes", "error", "message"), NONE.values(), ids=NONE)
def test_changes_that_a_model_has_not(changes, error, message):
    args = {"embed_dim": 24, "depth": 1, "num_heads": 3, "img_size": 8, "patch_size": 4}
    args |= {"decoder_embed_dim": 24, "decoder_depth": 1, "decoder_num_heads": 3}
    model = models.CRATEMAE(models.CRATEMAEConfig(24, 1, 3, 24, 1, 3, img_size=8, patch_size=4))
    with pytest.raises(error, match=message):
        models.from_official("crate_mae", model.state_dict(), args, **changes)


def flax(heads=3, dim_head=8, dim=24, depth=2, classes=5, tokens=5):
    """Draw the parameters of the training code, under its names and in its shapes."""
    generator = numpy.random.default_rng(0)

    def draw(*shape):
        return 0.3 * generator.standard_normal(shape)

    blocks = {}
    for i in range(depth):
        blocks[f"encoderblock_{i}"] = {
            **{f"LayerNorm_{j}": {"scale": 1 + draw(dim), "bias": draw(dim)} for j in range(2)},
            "MultiHeadDotProductSubspaceAttention_0": {
                "proj": {"kernel": draw(dim, heads, dim_head)},
                "out": {"kernel": draw(heads, dim_head, dim)},
            },
            "OvercompleteISTABlock_0": {"D": draw(dim, 4 * dim), "D1": draw(dim, 4 * dim)},
        }
    return {
        "embedding": {"kernel": draw(4, 4, 3, dim), "bias": draw(dim)},
        "cls": draw(1, 1, dim),
        "pos_embedding": draw(1, tokens, dim),
        "Transformer": blocks,
        "encoder_norm": {"scale": 1 + draw(dim), "bias": draw(dim)},
        "head": {"kernel": draw(dim, classes), "bias": draw(classes)},
    }


def forward_of_flax(params, img):
    """The forward of the training code, channels last: eps of Flax's norms is 1e-6."""
    tree = torch.utils._pytree.tree_map(torch.from_numpy, params)

    def norm(x, p):
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt() * p["scale"] + p["bias"]

    patches = img.permute(0, 2, 3, 1).unfold(1, 4, 4).unfold(2, 4, 4)  # (n, h, w, c, ph, pw)
    x = torch.einsum("nhwcpq,pqcd->nhwd", patches, tree["embedding"]["kernel"]) + tree["embedding"]["bias"]
    x = torch.cat([tree["cls"].expand(len(x), 1, -1), x.flatten(1, 2)], 1) + tree["pos_embedding"]
    for i in range(len(tree["Transformer"])):
        block = tree["Transformer"][f"encoderblock_{i}"]
        kernels = block["MultiHeadDotProductSubspaceAttention_0"]
        w = torch.einsum("nld,dhk->nlhk", norm(x, block["LayerNorm_0"]), kernels["proj"]["kernel"])
        weights = (torch.einsum("nqhk,nlhk->nhql", w, w) / w.shape[-1] ** 0.5).softmax(-1)
        x = x + torch.einsum("nhql,nlhk,hkd->nqd", weights, w, kernels["out"]["kernel"])
        y, (d, d1) = norm(x, block["LayerNorm_1"]), block["OvercompleteISTABlock_0"].values()
        z = torch.relu(0.1 * y @ d - 0.01)
        z = torch.relu(z + 0.1 * (y - z @ d.T) @ d - 0.01)
        x = x + z @ d1.T
    return norm(x, tree["encoder_norm"])[:, 0] @ tree["head"]["kernel"] + tree["head"]["bias"]


def as_file(tree, prefix=""):
    leaves = {}
    for name, value in tree.items():
        leaves |= as_file(value, f"{prefix}{name}/") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return leaves


FLAX = {
    "tree": lambda p: p,
    "params": lambda p: {"params": p, "step": numpy.zeros(())},
    "file": lambda p: as_file(p),
    "tensors": lambda p: {name: torch.from_numpy(array) for name, array in as_file(p).items()},
    "file-with-state": lambda p: as_file({"params": p, "opt": {"count": numpy.zeros(())}}),
}
FLAX_CONFIG = {"image_size": 8, "patch_size": 4, "num_classes": 5, "dim": 24, "depth": 2}


@pytest.mark.parametrize("form", FLAX.values(), ids=FLAX)
def test_a_flax_checkpoint_computes_what_the_training_code_computes(form):
    params = flax()
    model = models.from_official("crate_alpha", form(params), FLAX_CONFIG).double().eval()
    assert (model.config.heads, model.config.dim_head) == (3, 8)
    torch.testing.assert_close(model(IMAGES), forward_of_flax(params, IMAGES), rtol=1e-5, atol=1e-5)


def test_a_flax_file_is_read_from_disk(tmp_path, said):
    params = flax()
    numpy.savez(tmp_path / "checkpoint.npz", **as_file({"params": params, "opt": {"count": numpy.zeros(())}}))
    with numpy.load(tmp_path / "checkpoint.npz") as file:
        model = models.from_official("crate_alpha", file, FLAX_CONFIG).double().eval()
    torch.testing.assert_close(model(IMAGES), forward_of_flax(params, IMAGES), rtol=1e-5, atol=1e-5)
    assert said() == ["from_official: left out 1 weights of the checkpoint, beside the parameters: opt/count"]


def test_flax_parameters_may_be_half_and_lack_biases():
    params = flax()
    del params["embedding"]["bias"], params["head"]["bias"]
    source = models.from_official("crate_alpha", params, FLAX_CONFIG)
    assert not source.conv1.bias.any()
    assert not source.mlp_head[1].bias.any()
    half = params["embedding"]["kernel"].astype(numpy.float32).view(numpy.uint32) >> 16  # bfloat16, rounded down
    params["embedding"]["kernel"] = half.astype(numpy.uint16).view("V2")  # as numpy.load gives it
    found = models.from_official("crate_alpha", params, FLAX_CONFIG).conv1.weight
    torch.testing.assert_close(found, source.conv1.weight, rtol=2**-7, atol=0)


def test_other_parameters_of_flax_are_refused():
    params = flax()
    params["Transformer"]["encoderblock_0"]["ls1"] = {"layer_scale": numpy.ones(24)}
    with pytest.raises(ValueError, match=r"unexpected transformer.layers.0.ls1/layer_scale"):
        models.from_official("crate_alpha", params, FLAX_CONFIG)
    params["Transformer"]["encoderblock_0"]["ls1"] = 3
    with pytest.raises(ValueError, match="encoderblock_0/ls1 must be an array, got int"):
        models.from_official("crate_alpha", params, FLAX_CONFIG)


def test_classes_of_every_family_may_change():
    source = drawn(CRATEAlpha(CRATEAlphaConfig(24, 2, 3, 8, 8, 4, num_classes=5)))
    alpha = {name: value for name, value in CONFIG.items() if name != "num_classes"}
    assert models.from_official("crate_alpha", source.state_dict(), alpha, num_classes=3)(IMAGES.float()).shape == (
        2,
        3,
    )
    tost = models.ToST(models.ToSTConfig(24, 1, 3, img_size=16, num_classes=5))
    sizes = {"embed_dim": 24, "depth": 1, "num_heads": 3, "img_size": 16}
    found = models.from_official("tost_vision", tost.state_dict(), sizes, num_classes=3).eval()
    assert found(torch.zeros(1, 3, 16, 16)).shape == (1, 3)
