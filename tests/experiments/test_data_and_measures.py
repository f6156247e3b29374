"""Text, probes, principal components, turned digits: what the experiments feed and measure."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from crate_kernels.bench import clock
from crate_kernels.experiments.classify.models import BUILDERS, fresh
from crate_kernels.experiments.classify.settings import PRESETS as CLASSIFY
from crate_kernels.experiments.common.fit import Unusable
from crate_kernels.experiments.demo import data
from crate_kernels.experiments.language import job as language
from crate_kernels.experiments.language import text
from crate_kernels.experiments.language.settings import PRESETS as LANGUAGE
from crate_kernels.experiments.layers import job as layers
from crate_kernels.experiments.layers import watching
from crate_kernels.experiments.mae import job as mae
from crate_kernels.experiments.mae import probe
from crate_kernels.experiments.mae.settings import PRESETS as MAE
from crate_kernels.experiments.redunet import digits as turned_digits
from crate_kernels.experiments.redunet import gaussians
from crate_kernels.experiments.redunet.settings import PRESETS as REDUNET
from crate_kernels.models import CRATE, CRATEMAE, CRATEConfig, CRATEMAEConfig

CPU = torch.device("cpu")


def test_the_text_is_english_and_its_end_is_held_out():
    source = text.load()
    whole = text.readable(torch.cat([source.train, source.test]))
    assert 'The "assert" statement' in whole
    assert "�" not in whole
    assert len(source.test) == pytest.approx(0.1 * len(whole.encode()), abs=1)


def test_a_batch_is_followed_by_the_next_byte():
    source = torch.arange(200, dtype=torch.uint8)
    inputs, targets = text.batch(source, 7, 50, 0, 1)
    assert inputs.shape == (50, 7)
    assert torch.equal(targets, inputs + 1)
    assert torch.equal(text.batch(source, 7, 50, 0, 1)[0], inputs)
    assert not torch.equal(text.batch(source, 7, 50, 0, 2)[0], inputs)
    starts = text.batch(source, 7, 20_000, 3)[0][:, 0]
    assert (starts.min(), starts.max()) == (0, 192)  # the last byte is a target only
    inputs, targets = text.stretches(source, 7)
    assert torch.equal(inputs.flatten(), torch.arange(196))
    assert torch.equal(targets, inputs + 1)


def test_writing_is_timed_after_a_warm_up_and_to_the_end_of_the_kernels(monkeypatch):
    settings = replace(LANGUAGE["quick"], block=64, sample=7)
    seen: list[Any] = []

    def generate(prompt, count, temperature, use_cache=None, generator=None):
        seen.append((count, use_cache))
        return torch.zeros(1, count, dtype=torch.int64)

    monkeypatch.setattr(clock, "synchronize", lambda device: seen.append(device))
    fit: Any = SimpleNamespace(model=SimpleNamespace(generate=generate))
    _, rates = language._write_text(fit, SimpleNamespace(device=CPU, seed=0), settings)
    timed = [[CPU, (60, cached), CPU] for cached in (True, False)]
    assert seen == [(4, True), (4, False), *timed[0], *timed[1], (7, None)]
    assert min(rates) > 0


def test_a_probe_reads_what_is_linear_and_nothing_else():
    g = np.random.default_rng(0)
    settings = replace(MAE["quick"], strengths=(1.0, 10.0))
    x, labels = g.normal(size=(600, 8)), None
    labels = x[:, :3].argmax(1)
    x[:, 7] = 5.0  # a dead channel
    x[:, 1] *= 1e-3  # features are standardised: a scale changes nothing
    found = probe.accuracy(x[:400], labels[:400], x[400:], labels[400:], settings)
    assert found > 0.93
    mixed = g.permutation(labels)
    assert probe.accuracy(x[:400], mixed[:400], x[400:], mixed[400:], settings) < 0.5


def test_the_class_token_is_probed_apart_from_the_patches():
    torch.manual_seed(0)
    model, images = (
        CRATEMAE(CRATEMAEConfig(8, 1, 2, 8, 1, 2, img_size=4, patch_size=2, in_chans=1)),
        torch.randn(3, 1, 4, 4),
    )
    tokens = model.forward_features(images).detach()
    found = probe._features(model, images, cast(Any, SimpleNamespace(device=CPU)))
    wanted = {"the class token": tokens[:, 0], "the mean of the tokens": tokens[:, 1:].sum(1) / 4}
    wanted["all tokens"] = tokens[:, 1:].reshape(3, 32)
    assert found.keys() == wanted.keys()
    for name, each in wanted.items():
        torch.testing.assert_close(torch.from_numpy(found[name]), each)


def test_the_mean_digit_is_filled_into_the_same_patches(small):
    digits = data.load()
    images = digits.crop(digits.test_images[:5])
    masks = (torch.rand(5, digits.side**2, generator=torch.Generator().manual_seed(0)) < 0.3).float()
    off = (images - digits.crop(digits.train_images).mean(0)).square()
    hidden = masks.view(5, 1, digits.side, digits.side)
    hidden = hidden.repeat_interleave(digits.patch_size, 2).repeat_interleave(digits.patch_size, 3).bool()
    assert mae._error_of_the_mean(digits, images, masks) == pytest.approx(off[hidden].mean().item())


def test_the_tokens_of_each_layer_are_shown(small):
    torch.manual_seed(0)
    digits = data.load()
    config = CRATEConfig(
        8, 2, 2, 4, image_size=digits.image_size, patch_size=digits.patch_size, num_classes=10, channels=1
    )
    model: Any = CRATE(config).eval()
    found = watching.tokens(cast(Any, SimpleNamespace(model=model, device=CPU)), digits, (3, 1, 4))
    assert found.labels.tolist() == [3, 1, 4]
    images = digits.crop(digits.test_images[digits.first((3, 1, 4))])
    assert torch.equal(found.images, images[:, 0])
    x = model._embed(images)
    for index, layer in enumerate(model.transformer.layers):
        projected = layer[0].fn.qkv(layer[0].norm(x)).detach()
        colours, explained = watching._components(projected[:, 1:])
        torch.testing.assert_close(found.colours[index].flatten(1, 2), colours)
        assert found.explained[index] == pytest.approx(explained)
        half = x + layer[0](x)
        torch.testing.assert_close(found.codes[index], layer[1](half)[0].detach())
        x = layer(x)


def test_principal_components_are_those_of_all_patches_together():
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 5, 3, generator=g, dtype=torch.float64) * torch.tensor([5.0, 2.0, 1.0])
    basis = torch.linalg.qr(torch.randn(8, 3, generator=g, dtype=torch.float64)).Q
    colours, explained = watching._components(hidden @ basis.mT + 7.0)
    assert colours.shape == (2, 5, 3)
    assert (colours.amin((0, 1)), colours.amax((0, 1))) == (pytest.approx(0), pytest.approx(1))
    assert explained == pytest.approx(1)
    rows = (hidden - hidden.mean((0, 1))).flatten(0, 1)
    axes = torch.linalg.svd(rows, full_matrices=False).Vh
    for component in range(3):
        wanted = rows @ axes[component]
        correlation = torch.corrcoef(torch.stack([colours.flatten(0, 1)[:, component], wanted]))[0, 1]
        assert abs(correlation) == pytest.approx(1)


def test_additions_are_measured_beside_the_tokens_they_are_added_to():
    torch.manual_seed(0)
    model: Any = CRATE(CRATEConfig(8, 2, 2, 4, image_size=4, patch_size=2, num_classes=3, channels=1)).train()
    images = torch.randn(5, 1, 4, 4)
    x, wanted = model._embed(images), []
    for layer in model.transformer.layers:
        wanted.append((layer[0](x).std() / x.std()).item())
        x = layer(x)
    assert watching.added(model, images) == pytest.approx(wanted, rel=1e-5)
    model.transformer.layers[1][0].fn.to_out[0].weight.data.mul_(3.0)
    model.transformer.layers[1][0].fn.to_out[0].bias.data.mul_(3.0)
    assert watching.added(model, images) == pytest.approx([wanted[0], 3 * wanted[1]], rel=1e-5)


def test_gaussians_are_around_the_axes_of_the_sphere():
    x, labels = gaussians.draw(replace(REDUNET["default"], samples=4000), 0)
    assert torch.equal(labels.bincount(), torch.tensor([4000] * 3))
    torch.testing.assert_close(x.norm(dim=1), torch.ones(12000).double())
    for label in range(3):
        members = x[labels == label]
        assert members.mean(0).argmax() == label
        off = members[:, [i for i in range(3) if i != label]]
        assert off.std().item() == pytest.approx(0.1, rel=0.05)


def test_gaussians_are_pulled_apart(monkeypatch):
    settings = replace(REDUNET["default"], samples=60, layers=120)
    steps = []
    found = gaussians.build(settings, 0, CPU, lambda: steps.append(1))
    assert len(steps) == 120
    rates = found.train_rates[:, 0]
    assert rates[-1] > rates[0] + 0.1
    assert found.test_accuracy == 1.0
    overlap = (found.test[1] @ found.test[1].mT).abs()
    apart = found.labels[:, None] != found.labels
    before = (found.test[0] @ found.test[0].mT).abs()[apart].mean()
    assert overlap[apart].mean() < 0.5 * before
    for column in range(3):  # R - Rc, R and Rc belong together
        assert math.isfinite(found.test_rates[-1, column])
    torch.testing.assert_close(found.train_rates[:, 0], found.train_rates[:, 1] - found.train_rates[:, 2])


def test_a_turned_digit_is_what_it_was(small):
    """A turn is a shift along the angles, on which neither the features nor the estimate depend."""
    found = turned_digits.build(replace(REDUNET["quick"], tests=6, turns=4), CPU, lambda: None)
    assert found.invariance < 1e-9
    assert found.upright > 0.75
    assert found.turned == pytest.approx(found.upright)


def test_lifted_pictures_are_shifted_with_the_digit_too(small):
    """Filters along the angles keep the invariance; the network then has a channel a filter."""
    settings = replace(REDUNET["quick"], tests=4, turns=4, kernels=3, kernel_size=5)
    found = turned_digits.build(settings, CPU, lambda: None)
    assert found.invariance < 1e-9
    assert found.turned == pytest.approx(found.upright)
    plain = turned_digits.build(replace(settings, kernels=0), CPU, lambda: None)
    assert not torch.allclose(found.rates[0], plain.rates[0])
    assert all(torch.equal(a, b) for a, b in zip(found.examples, plain.examples, strict=True))


def test_layers_beyond_six_go_into_another_row():
    gram = torch.rand(8, 4, 4)
    seen: Any = SimpleNamespace(gram=gram)
    *axes, bar = layers._draw_subspaces(seen, 2).axes
    assert [ax.get_visible() for ax in axes] == [True] * 8 + [False] * 4
    assert [ax.get_title() for ax in axes[:8]] == [f"layer {index + 1}" for index in range(8)]
    for ax, wanted in zip(axes, gram, strict=False):
        assert np.array_equal(ax.images[0].get_array(), wanted.numpy())
        assert list(ax.get_xticks()) == list(ax.get_yticks()) == [-0.5, 1.5, 3.5]
    assert bar.get_ylabel() == "absolute cosine; a block is a head"


@pytest.mark.parametrize(
    ("values", "wanted"),
    [([3.0, 2.0, 2.5, 1.0], "2, 4 of 2-4"), ([1.0, 1.0, 2.0], "none of 2-3"), ([5.0], "none of 2-1")],
)
def test_layers_at_which_a_measure_falls(values, wanted):
    assert layers._falls(values) == wanted
    assert layers._series([1.25, 2.0], 1) == "1.2, 2.0"


@pytest.mark.parametrize("content", [None, "", "[]", '{"first": 1}', "[" * 9999])
def test_measurements_that_cannot_be_read_are_no_run_to_go_on_from(content, tmp_path):
    path = tmp_path / "seen.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(Unusable, match=r"seen.json cannot be read"):
        watching._read(path)
    path.write_text(json.dumps({"0": {"a": 1}, "12": {}}))
    assert watching._read(path) == {0: {"a": 1}, 12: {}}


@pytest.mark.parametrize("name", BUILDERS)
def test_every_model_to_classify_with_learns_from_every_parameter(name, small):
    digits = data.load()
    model = fresh(name, CLASSIFY["quick"], digits, None, 0)
    images = digits.crop(digits.train_images[:8])
    logits = model(images)
    assert logits.shape == (8, 10)
    logits.square().sum().backward()
    unused = [n for n, p in model.named_parameters() if p.grad is None]
    assert unused == []
    state = torch.get_rng_state()
    again = fresh(name, CLASSIFY["quick"], digits, None, 0)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))
