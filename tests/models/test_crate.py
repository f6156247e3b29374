"""CRATE: sizes, keys, variants, loading, errors."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from crate_kernels import models
from crate_kernels.analysis import rate_gradient
from crate_kernels.models.crate import RateGradientStep
from tests.models import families

PUBLISHED = {  # what the published constructor takes
    "image_size": [8, 12],
    "patch_size": [2, 4],
    "num_classes": 5,
    "dim": 24,
    "depth": 2,
    "heads": 3,
    "dim_head": 8,
}


def build(seed=0, **changes) -> Any:
    return families.build("crate", seed, **changes)


def images(batch=2, dtype=torch.float32):
    return torch.randn(batch, 3, 8, 12, generator=torch.Generator().manual_seed(1), dtype=dtype)


def test_create_overrides():
    with torch.device("meta"):
        model: Any = models.create("crate_tiny", num_classes=10, backend="reference", depth=3, image_size=32)
    assert model.config.num_classes == 10
    assert model.pos_embedding.shape == (1, 5, 384)
    assert len(model.transformer.layers) == 3
    assert all(m.backend == "reference" for m in model.modules() if hasattr(m, "backend"))


def test_patches_are_flattened_row_by_row_channel_last():
    img = images()
    patches = build().to_patch_embedding[0](img)
    assert patches.shape == (2, 12, 24)
    for index in range(12):
        row, col = 2 * (index // 3), 4 * (index % 3)
        wanted = img[:, :, row : row + 2, col : col + 4].permute(0, 2, 3, 1).flatten(1)
        assert torch.equal(patches[:, index], wanted)


def test_the_class_token_comes_first():
    model, img, seen = build(), images(), []
    model.transformer.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    model(img)
    token = model.cls_token[0] + model.pos_embedding[0, :1]
    patches = model.to_patch_embedding(img) + model.pos_embedding[:, 1:]
    torch.testing.assert_close(seen, [torch.cat([token.expand(2, 1, -1), patches], dim=1)])


@pytest.mark.parametrize("pool", ["cls", "mean"])
def test_pool(pool):
    model = build(pool=pool)
    tokens = model.forward_features(images())
    pooled = tokens[:, 0] if pool == "cls" else tokens.sum(1) / 13
    torch.testing.assert_close(model(images()), model.mlp_head(pooled))


def test_inspection():
    model, img = build().eval(), images()
    keys = []
    for attention, _ in model.transformer.layers:
        attention.fn.qkv.register_forward_hook(lambda m, args, out: keys.append(out))
    model(img)
    for index in range(2):
        assert torch.equal(model.get_last_key(img, index), keys[index])
        w = keys[index].unflatten(-1, (3, 8)).transpose(1, 2)
        weights = (8**-0.5 * w @ w.mT).softmax(-1)
        torch.testing.assert_close(model.get_last_selfattention(img, layer=index), weights)


def half_step(model, x):
    """The first layer up to the input of its ISTA block."""
    seen = []
    handle = model.transformer.layers[0][1].norm.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    model.transformer(x, 1)
    handle.remove()
    return seen[0]


RESIDUALS = {
    "published": ({}, 1.0, 1.0),
    "tied": ({"attention": "tied", "gamma": 0.5}, 1.0, 1.0),
    "leaky": ({"kappa": 0.5, "gamma": 0.4}, 0.8, 0.2),
    "leaky-tied": ({"attention": "tied", "kappa": 0.5, "gamma": 0.4}, 0.8, 0.2),
    "gradient": ({"attention": "gradient", "gamma": 0.4}, 1.0, 1.0),
    "gradient-step": ({"attention": "gradient", "gamma": 0.4, "kappa": 0.5}, 1.0, 0.5),
}


@pytest.mark.parametrize(("changes", "kept", "step"), RESIDUALS.values(), ids=RESIDUALS)
def test_residual(changes, kept, step):
    model, x = build(**changes).double().eval(), torch.randn(2, 13, 24, dtype=torch.float64)
    wanted = kept * x + step * model.transformer.layers[0][0](x)
    torch.testing.assert_close(half_step(model, x), wanted)
    layer = model.transformer.layers[0]
    assert torch.equal(layer[:](x), layer(x))
    assert any("to_out" in name for name in model.state_dict()) == ("attention" not in changes)
    out = model(images(dtype=torch.float64))
    out.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_a_gradient_step_alone_has_the_gamma_of_a_model():
    (step,) = (m for m in build(attention="gradient", depth=1).modules() if isinstance(m, RateGradientStep))
    assert RateGradientStep(24, 3, 8).gamma == step.gamma == 1.0


def test_gradient_step_is_equation_9():
    torch.manual_seed(0)
    module, x = RateGradientStep(24, 3, 8, gamma=0.4).double(), torch.randn(2, 13, 24, dtype=torch.float64)
    subspaces = module.qkv.weight.view(3, 8, 24).mT
    torch.testing.assert_close(module(x), -rate_gradient(x, subspaces, eps_squared=8 / (13 * 0.4)))
    assert torch.equal(module(x, return_key=True), module.qkv(x))
    with torch.autocast("cpu", torch.bfloat16):
        low = module.float()(x.float())
    assert (low - module.double()(x)).abs().max() < 0.05 * module(x).abs().max()


def test_gradient_step_is_factored_in_float32_under_autocast(monkeypatch):
    """The Gram matrix squares the condition of the tokens: in bfloat16 it would lose all of a small direction."""
    module, x = RateGradientStep(24, 3, 8, gamma=0.4), torch.randn(2, 13, 24)
    factored, cholesky = [], torch.linalg.cholesky
    monkeypatch.setattr(torch.linalg, "cholesky", lambda a: factored.append(a) or cholesky(a))
    with torch.autocast("cpu", torch.bfloat16):
        module(x)
        v = module(x, return_key=True).float().unflatten(-1, (3, 8)).transpose(1, 2)
    torch.testing.assert_close(factored, [torch.eye(8) + 0.4 * v.mT @ v])


@pytest.mark.parametrize("prox", ["nonnegative", "soft", "mm"])
def test_prox_reaches_every_layer(prox):
    model = build(prox=prox, ista=0.2, lambd=0.3, alpha=0.5)
    codes = [m for m in model.modules() if hasattr(m, "prox")]
    assert [(m.prox, m.step_size, m.lambd, m.alpha) for m in codes] == [(prox, 0.2, 0.3, 0.5)] * 2


NESTINGS = {
    "bare": lambda state: state,
    "state_dict": lambda state: {"epoch": 3, "state_dict": state, "optimizer": {"state": {}}},
    "model": lambda state: {"model": state, "args": None},
    "model_ema": lambda state: {"model_ema": state},
    "model-before-ema": lambda state: {"model_ema": {}, "model": state},
    "twice": lambda state: {"model": {"state_dict": state}},
}
PREFIXES = ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.module."]


@pytest.mark.parametrize("prefix", PREFIXES, ids=lambda prefix: prefix or "none")
@pytest.mark.parametrize("nest", NESTINGS.values(), ids=NESTINGS)
def test_from_official(nest, prefix):
    source = build(seed=5, ista=0.2, lambd=0.5)
    checkpoint = nest({prefix + name: value for name, value in source.state_dict().items()})
    before, config = copy.deepcopy(checkpoint), copy.deepcopy(PUBLISHED)
    model: Any = models.from_official("crate", checkpoint, {**PUBLISHED, "ista": 0.2, "lambd": 0.5})
    assert torch.equal(model(images()), source(images()))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    torch.testing.assert_close(checkpoint, before, rtol=0, atol=0)
    assert config == PUBLISHED


def broken(state):
    state = {name: value for name, value in state.items() if "mlp_head" not in name}
    state["transformer.layers.2.0.norm.weight"] = torch.zeros(24)
    state["cls_token"] = torch.zeros(1, 24)
    state["pos_embedding"] = [0.0]
    state["to_patch_embedding.1.weight"] = state["to_patch_embedding.1.weight"].to_sparse()
    state["to_patch_embedding.1.bias"] = state["to_patch_embedding.1.bias"].to("meta")
    return state


def test_from_official_lists_all_that_does_not_fit():
    with pytest.raises(ValueError, match="state_dict does not fit the crate of this config") as caught:
        models.from_official("crate", {"state_dict": broken(build().state_dict())}, PUBLISHED)
    assert sorted(str(caught.value).split("\n  ")[1:]) == [
        "cls_token must be (1, 1, 24), got (1, 24)",
        "missing mlp_head.0.bias (24,)",
        "missing mlp_head.0.weight (24,)",
        "missing mlp_head.1.bias (5,)",
        "missing mlp_head.1.weight (5, 24)",
        "pos_embedding must be a Tensor, got list",
        "to_patch_embedding.1.bias must be dense and hold values, got torch.strided on meta",
        "to_patch_embedding.1.weight must be dense and hold values, got torch.sparse_coo on cpu",
        "unexpected transformer.layers.2.0.norm.weight",
    ]


def official(system="crate", state=None, config=None):
    state = build().state_dict() if state is None else state
    return models.from_official(system, state, PUBLISHED if config is None else config)


BAD = {
    "size": (lambda: models.create("crate_huge"), ValueError, "create: name must be one of crate_tiny, .*'crate_huge'"),
    "override": (lambda: models.create("crate_tiny", width=3), ValueError, "create: arguments must be among .*; got w"),
    "near-size": (lambda: models.create("crate_smal"), ValueError, "got 'crate_smal'; did you mean crate_small"),
    "near-override": (lambda: models.create("crate_tiny", num_labels=3), ValueError, "did you mean num_classes"),
    "size-type": (lambda: models.create(["crate"]), TypeError, "create: name must be a string, got list"),
    "system-type": (lambda: official(["crate"]), TypeError, "from_official: system must be a string, got list"),
    "image-list": (lambda: build()([1]), TypeError, r"CRATE: img must be a Tensor \(batch, channels=3, .*, got list"),
    "image-int": (
        lambda: build()(images().int()),
        ValueError,
        "CRATE: img must have a floating dtype, got torch.int32",
    ),
    "system": (lambda: official("vit"), ValueError, "from_official: system must be one of crate, .*got 'vit'"),
    "config": (lambda: official(config={**PUBLISHED, "mlp": 4}), ValueError, "from_official: arguments .*; got mlp"),
    "config-short": (lambda: official(config={"dim": 24}), ValueError, "config must give depth, heads$"),
    "config-type": (lambda: official(config=[1]), TypeError, "from_official: config must be a mapping, got list"),
    "state-type": (lambda: official(state=[1]), TypeError, "from_official: state_dict must be a mapping, got list"),
    "state-path": (lambda: official(state="a.pth"), TypeError, r"got str: read the file by torch.load"),
    "state-twice": (lambda: official(state={"a": 1, "module.a": 2}), ValueError, "name each weight once, got a twice"),
    "image-size": (lambda: build(image_size=9), ValueError, "image_size must be a multiple of patch_size, got 9x9 by"),
    "patch-size": (lambda: build(patch_size=0), ValueError, "CRATE: patch_size must be >= 1, got 0"),
    "pair": (lambda: build(image_size=(8, 8, 8)), TypeError, r"CRATE: image_size must be .* width\), got \(8, 8, 8\)"),
    "pool": (lambda: build(pool="max"), ValueError, "CRATE: pool must be 'cls', 'mean' or 'none', got"),
    "attention": (lambda: build(attention="mhsa"), ValueError, "CRATE: attention must be 'mssa', 'tied' or 'gradient'"),
    "prox": (lambda: build(prox="hard"), ValueError, "ISTA: prox must be"),
    "channels": (lambda: build()(torch.ones(1, 1, 8, 12)), ValueError, r"img must be \(batch, channels=3, height"),
    "rank": (lambda: build()(torch.ones(3, 8, 12)), ValueError, r"CRATE: img must be .*, got \(3, 8, 12\)"),
    "height": (lambda: build()(torch.ones(1, 3, 9, 12)), ValueError, r"in patches of 2x4, got \(1, 3, 9, 12\)"),
    "smaller": (lambda: build()(torch.ones(1, 3, 8, 8)), ValueError, r"img must have 8x12 pixels, got \(1, 3, 8, 8\)"),
    "dim-head": (lambda: RateGradientStep(8, 2, 0), ValueError, "RateGradientStep: dim_head must be >= 1, got 0"),
    "layer": (
        lambda: build().get_last_selfattention(images()),
        ValueError,
        "CRATE: layer must be < 2 layers, got 5, its default; layer=None is the last",
    ),
    "negative": (lambda: build().get_last_key(images(), -1), ValueError, "CRATE: depth must be >= 0, got -1"),
    "no-attention": (
        lambda: build(attention="gradient").get_last_selfattention(images(), 0),
        ValueError,
        "RateGradientStep: return_attention must be False",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), BAD.values(), ids=BAD)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_module_of_the_model_keeps_its_hooks():
    model, seen = build(), []
    for layer in model.transformer.layers:
        assert isinstance(layer[0].fn.qkv, nn.Linear)
        layer[0].fn.qkv.register_forward_hook(lambda *_: seen.append("rate"))
        layer[1].register_forward_hook(lambda *_: seen.append("sparsity"))
    model(images())
    assert seen == ["rate", "sparsity"] * 2
