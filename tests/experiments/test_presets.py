"""Every preset builds what it says, in the published sizes where it is called after the paper, and takes a step."""

from dataclasses import astuple, replace
from functools import cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from crate_kernels import models
from crate_kernels.experiments.classify.models import BUILDERS, fresh
from crate_kernels.experiments.demo import data
from crate_kernels.experiments.demo.settings import DemoSettings
from crate_kernels.experiments.demo.training import model_config
from crate_kernels.experiments.denoise.mixture import denoise
from crate_kernels.experiments.icl import job as icl
from crate_kernels.experiments.language import job as language
from crate_kernels.experiments.layers.job import training_settings
from crate_kernels.experiments.mae import job as mae

SUBCOMMANDS = ("denoise", "icl", "redunet", "layers", "classify", "mae", "language")
META = SimpleNamespace(seed=0, backend=None, device=torch.device("meta"))


def presets(subcommand):
    return import_module(f"crate_kernels.experiments.{subcommand}.settings").PRESETS


@cache  # some are looked at several times, by tests whose digits are the same
def built(subcommand, preset) -> dict[str, Any]:
    """The models of a subcommand by name, without memory for their weights."""
    settings, digits = presets(subcommand)[preset], data.load()
    with torch.device("meta"):
        if subcommand == "icl":
            return {name: icl.fresh(META, settings, name) for name in icl.models(settings)}
        if subcommand == "layers":
            return {"CRATE": models.CRATE(model_config(training_settings(settings, 0), digits, None))}
        if subcommand == "classify":
            return {name: fresh(name, settings, digits, None, 0) for name in settings.models or BUILDERS}
        if subcommand == "mae":
            return {"CRATE-MAE": mae.fresh(settings, digits, META)}
        return {name: language.fresh(META, settings, name) for name in language.MODELS}


DIGITS, MAE = (0, 2, 3, 5, 7, 8), ((1e2, 1e3), (0, 2, 3, 4, 5, 7, 8))
THEOREM = ((512, 4, 64, 256, 0.03, 0.5, 10, 0.6, "unscaled", 6), (128, 2, 32, 64, 0.03, 0.5, 10, 0.6, "unscaled", 4))


def figure(tokens, clusters, rank, dim, layers):
    return tuple(
        (tokens, clusters, rank, dim, noise, 0.05, layers, None, form, 0)
        for form in ("unscaled", "scaled", "normalised")
        for noise in (0.2, 0.5)
    )


# Every field, in order. The numbers and times of the pages are of the defaults, and the published sizes are the
# papers'; a quick run is what the other tests are of.
FIELDS = {
    ("demo", "default"): (0, 27, 100, 3e-3, 100, 0.05, 0.1, 0.15, 0.1, 0.07, 128, 4, 4, 32),
    ("demo", "quick"): (0, 1, 100, 3e-3, 100, 0.05, 0.1, 0.15, 0.1, 0.07, 128, 4, 4, 32),
    ("denoise", "default"): (THEOREM, figure(512, 4, 64, 256, 12), 5),
    ("denoise", "paper"): (THEOREM, figure(2048, 8, 64, 512, 12), 5),
    ("denoise", "quick"): (THEOREM[1:], figure(64, 2, 16, 32, 3), 2),
    ("icl", "default"): (
        ("linear", "sparse"), False, 2, 1, 7, 64, 8, 6, 2.0, 0.125, 4.0, True, True, 2000, 64, 2e-3, 100, 1280
    ),
    ("icl", "paper"): (
        ("linear", "sparse"), False, 20, 3, 41, 128, 8, 32, 1.0, 0.02, 1.0, False, False, 50_000, 64, 1e-4, 1000, 1280
    ),
    ("icl", "quick"): (("linear", "sparse"), False, 2, 1, 5, 16, 2, 2, 2.0, 0.125, 4.0, True, True, 6, 8, 2e-3, 2, 64),
    ("icl", "opposite"): (("linear",), True, 2, 1, 7, 64, 8, 6, 2.0, 0.125, 4.0, True, True, 1250, 64, 2e-3, 100, 1280),
    ("redunet", "default"): (500, 0.1, 2000, 0.5, 0.1, 500.0, (0, 1, 2, 3, 4), 20, 20, 15, 200, 40, 0, 5, 4),
    ("redunet", "paper"): (500, 0.1, 2000, 0.5, 0.1, 500.0, tuple(range(10)), 10, 10, 15, 200, 40, 20, 5, 20),
    ("redunet", "quick"): (20, 0.1, 10, 0.5, 0.1, 500.0, (0, 1), 8, 4, 15, 16, 2, 0, 5, 2),
    ("layers", "default"): (96, 12, 4, 24, 12, 100, 3e-3, 3.0, (0, 2, 4, 8, 12), DIGITS),
    ("layers", "paper"): (384, 12, 6, 64, 150, 100, 5e-4, 1.5, (0, 1, 5, 15, 50, 150), DIGITS),
    ("layers", "quick"): (16, 2, 2, 8, 1, 400, 3e-3, 3.0, (0, 1), (2, 7)),
    ("classify", "default"): ((), 64, 3, 4, 16, 8, 100, 3e-3, 50, 0.05),
    ("classify", "paper"): ((), 384, 12, 6, 64, 150, 100, 5e-4, 200, 0.05),
    ("classify", "quick"): ((), 16, 1, 2, 8, 1, 400, 3e-3, 2, 0.05),
    ("mae", "default"): (96, 3, 4, 0.5, 0.75, 1500, 100, 4e-3, 50, 0.05, *MAE),
    ("mae", "paper"): (768, 12, 12, 0.5, 0.75, 32_000, 100, 3e-5, 1600, 0.1, *MAE),
    ("mae", "quick"): (16, 1, 2, 0.5, 0.75, 4, 32, 4e-3, 2, 0.05, (1e3,), (2, 7)),
    ("language", "default"): (3, 4, 96, 96, 600, 16, 1, 3e-3, 50, 0.1, 300, 0.8),
    ("language", "paper"): (12, 12, 768, 1024, 600_000, 12, 40, 6e-4, 2000, 0.1, 300, 0.8),
    ("language", "quick"): (1, 2, 16, 16, 2, 4, 1, 3e-3, 1, 0.1, 8, 0.8),
}  # fmt: skip


@pytest.mark.parametrize(("subcommand", "preset"), FIELDS)
def test_what_the_pages_report_is_of_these_settings(subcommand, preset):
    assert astuple(presets(subcommand)[preset]) == FIELDS[subcommand, preset]


@pytest.mark.parametrize("subcommand", SUBCOMMANDS)
def test_there_are_three(subcommand):
    more = ["opposite"] if subcommand == "icl" else []
    assert list(presets(subcommand)) == ["default", "paper", "quick", *more]


@pytest.mark.parametrize("preset", ["default", "paper", "quick"])
@pytest.mark.parametrize("subcommand", ["icl", "layers", "classify", "mae", "language"])
def test_a_preset_builds_its_models(subcommand, preset, small):
    found = built(subcommand, preset)
    assert found
    for model in found.values():
        parameters = list(model.parameters())
        assert parameters
        assert all(p.is_meta for p in parameters)


def shapes(module):
    return {name: tuple(p.shape) for name, p in module.named_parameters()}


# Model of a paper preset: the published size with the same layers, and the path of the layers.
LAYERS = {
    ("icl", "AoT-MSSA"): ("aot_icl_mssa", "layers"),
    ("icl", "AoT-MHSA"): ("aot_icl_mhsa", "layers"),
    ("icl", "transformer"): ("transformer_icl", "layers"),
    ("layers", "CRATE"): ("crate_tiny", "transformer"),
    ("classify", "CRATE"): ("crate_tiny", "transformer"),
    ("mae", "CRATE-MAE"): ("crate_mae_base", "blocks"),
    ("language", "causal CRATE"): ("crate_lm_base", "transformer.h"),
    ("language", "ToST"): ("tost_lm_base", "transformer.h"),
    ("language", "GPT-2"): ("gpt2_base", "transformer.h"),
}


@pytest.mark.parametrize(("subcommand", "name"), LAYERS)
def test_the_papers_layers(subcommand, name, small):
    published, path = LAYERS[subcommand, name]
    ours = built(subcommand, "paper")[name]
    with torch.device("meta"):
        theirs: Any = models.create(published)
    assert shapes(ours.get_submodule(path)) == shapes(theirs.get_submodule(path))


@pytest.mark.parametrize("preset", ["default", "paper", "quick"])
def test_mixtures_have_room_for_their_subspaces(preset):
    settings = presets("denoise")[preset]
    for mixture in (*settings.theorem, *settings.softmax):
        assert mixture.clusters * mixture.rank <= mixture.dim
        assert mixture.tokens % mixture.clusters == 0
    smallest = min(settings.softmax, key=lambda mixture: mixture.dim)
    few = replace(smallest, layers=1, tokens=4 * smallest.clusters)
    assert denoise(few, 0, torch.device("cpu"), None).isfinite().all()


def test_looks_are_epochs():
    for settings in presets("layers").values():
        assert settings.looks[0] == 0
        assert settings.looks[-1] == settings.epochs
        assert list(settings.looks) == sorted(set(settings.looks))


def test_the_demos_other_settings_are_kept():
    settings = presets("layers")["default"]
    assert replace(training_settings(settings, 3), seed=0) == replace(
        DemoSettings(),
        epochs=settings.epochs,
        batch_size=settings.batch_size,
        learning_rate=settings.learning_rate,
        weight_decay=settings.weight_decay,
        dim=settings.dim,
        depth=settings.depth,
        heads=settings.heads,
        dim_head=settings.dim_head,
    )
