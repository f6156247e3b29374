"""Whole models that are timed: their batches, verdicts, and what is not timed beside them."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from crate_kernels import models, nn
from crate_kernels.bench import gate, networks, providers
from tests.bench.test_measuring import CPU, timer


@pytest.mark.parametrize("network", [each for each in networks.NETWORKS if each.vit], ids=lambda each: each.name)
def test_a_vit_of_the_same_size_is_timed_beside_a_model(network, monkeypatch):
    def made(**sizes):
        options.update(sizes)
        return torch.nn.Linear(2, 2)

    options = {}
    timm: Any = ModuleType("timm.models.vision_transformer")
    timm.VisionTransformer = made
    monkeypatch.setitem(sys.modules, "timm.models.vision_transformer", timm)
    with torch.device("meta"):
        config = models.create(network.name).config
    vit = networks._model(network, "timm-vit", torch.bfloat16, CPU)
    ours = [
        next(getattr(config, name) for name in names if hasattr(config, name))
        for names in (("dim", "embed_dim"), ("depth",), ("heads", "num_heads"))
    ]
    assert list(options.values()) == list(network.vit) == ours
    assert list(options) == ["embed_dim", "depth", "num_heads"]
    assert next(vit.parameters()).dtype == torch.bfloat16


def test_what_a_network_is_not_timed_with(monkeypatch):
    image, text = networks.NETWORKS[0], networks.NETWORKS[-1]
    assert networks.unavailable_reason(text, "timm-vit", CPU) == "timm's ViT is no language model"
    monkeypatch.setattr(networks, "find_spec", lambda name: None)
    assert networks.unavailable_reason(image, "timm-vit", CPU) == "timm is not installed"
    assert networks.unavailable_reason(image, "eager", CPU) is None
    assert networks.unavailable_reason(text, "default-graphed", torch.device("cuda")) is None
    row = networks.measure(networks.blank(text, "fp32", "forward", "timm-vit"), text, CPU, timer)
    assert (row.times, row.skipped) == ([], "timm's ViT is no language model")
    assert (row.bench, row.op, row.case, row.unit) == ("models", "model", text.name, "tokens")


def test_batches_of_networks():
    images, labels = networks._batch(networks.Network("a", "images", 2, 3), torch.bfloat16, CPU)
    assert (images.shape, images.dtype) == ((2, 3, 224, 224), torch.bfloat16)
    assert (labels.shape, labels.dtype, int(labels.max()) < 1000) == ((2,), torch.int64, True)
    text = networks.Network("a", "tokens", 4, 3, seqlen=300)
    tokens, following = networks._batch(text, torch.float32, CPU)
    assert tokens.shape == following.shape == (4, 300)
    assert torch.equal(tokens[:, 1:], following[:, :-1])
    assert not torch.equal(networks._batch(text, torch.float32, CPU, 1)[0], tokens)
    few = networks._two_samples(text, torch.float32, CPU, 0)
    assert all(torch.equal(a, b[:2, :128]) for a, b in zip(few, (tokens, following), strict=True))


@pytest.mark.parametrize(("shares", "passed"), [([2, 0.5, 0.6, 0.7, 9], True), ([2, 3, 0.1, 0.2, 1.5], False)])
def test_a_network_beyond_its_tolerance_is_judged_by_the_median_draw(shares, passed, monkeypatch):
    drawn = []

    def verdict(draw, *args):
        drawn.append(draw)
        return gate.Verdict(0.0, 0.0, shares[draw], "logits")

    monkeypatch.setattr(networks, "_verdict_on", verdict)
    found = networks._verdict(networks.NETWORKS[0], torch.nn.Identity(), torch.float32, CPU)
    assert (found.share, found.passed) == (sorted(shares)[2], passed)
    assert drawn == [0, 1, 2, 3, 4]
    shares[0] = 0.99
    assert networks._verdict(networks.NETWORKS[0], torch.nn.Identity(), torch.float32, CPU).share == 0.99
    assert drawn == [0, 1, 2, 3, 4, 0]


def test_plain_forms_of_layers_are_the_layers():
    torch.manual_seed(0)
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    for layer in (
        nn.OvercompleteISTA(16, 4, step_size=0.2, lambd=0.01),
        nn.ISTA(16, step_size=0.2, lambd=0.01),
        nn.MSSA(16, 2, 8),
        nn.CausalMSSA(16, 2),
        nn.TSSA(16, 2),
        nn.CausalTSSA(16, 2, 5),
    ):
        layer = layer.double().eval()
        for parameter in layer.parameters():  # some start at zero
            torch.nn.init.normal_(parameter, std=0.3)
        plain = networks._Plain(layer, networks._FORMS[type(layer)])
        torch.testing.assert_close(plain(x), layer(x), rtol=1e-10, atol=1e-10)
        assert plain(x).abs().max() > 0.01


def test_a_backend_that_cannot_run_is_named_with_its_reason():
    assert providers.unavailable_reason("tssa", torch.float32, CPU, "composite") is None
    assert "interpreter" in providers.unavailable_reason("tssa", torch.float32, CPU, "triton")
    assert "takes torch.float32" in providers.unavailable_reason("tssa", torch.float64, CPU, "cpp")
