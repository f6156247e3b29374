"""Every preset builds what it says, in the published sizes where it is called after the paper, and takes a step."""

from dataclasses import replace
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

VERBS = ("denoise", "icl", "redunet", "layers", "classify", "mae", "language")
META = SimpleNamespace(seed=0, backend=None, device=torch.device("meta"))


def presets(verb):
    return import_module(f"crate_kernels.experiments.{verb}.settings").PRESETS


def built(verb, settings, digits) -> dict[str, Any]:
    """The models of a verb by name, without memory for their weights."""
    with torch.device("meta"):
        if verb == "icl":
            return {name: icl.fresh(META, settings, name) for name in icl.models(settings)}
        if verb == "layers":
            return {"CRATE": models.CRATE(model_config(training_settings(settings, 0), digits, None))}
        if verb == "classify":
            return {name: fresh(name, settings, digits, None, 0) for name in settings.models or BUILDERS}
        if verb == "mae":
            return {"CRATE-MAE": mae.fresh(settings, digits, META)}
        return {name: language.fresh(META, settings, name) for name in language.MODELS}


@pytest.mark.parametrize("verb", VERBS)
def test_there_are_three(verb):
    more = ["opposite"] if verb == "icl" else []
    assert list(presets(verb)) == ["default", "paper", "quick", *more]


@pytest.mark.parametrize("preset", ["default", "paper", "quick"])
@pytest.mark.parametrize("verb", ["icl", "layers", "classify", "mae", "language"])
def test_a_preset_builds_its_models(verb, preset, small):
    settings = presets(verb)[preset]
    found = built(verb, settings, data.load())
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


@pytest.mark.parametrize(("verb", "name"), LAYERS)
def test_the_papers_layers(verb, name, small):
    published, path = LAYERS[verb, name]
    ours = built(verb, presets(verb)["paper"], data.load())[name]
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


def test_the_books_digits():
    paper = presets("redunet")["paper"]
    assert (paper.samples, paper.noise, paper.layers, paper.eta, paper.eps) == (500, 0.1, 2000, 0.5, 0.1)
    assert (len(paper.digits), paper.images, paper.tests) == (10, 10, 10)
    assert (paper.channels, paper.timesteps, paper.polar_layers) == (15, 200, 40)
    assert (paper.kernels, paper.kernel_size, paper.turns) == (20, 5, 20)


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
