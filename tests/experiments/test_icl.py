"""Prompts, and the floors that no method gets below."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from crate_kernels.experiments.icl import prompts
from crate_kernels.experiments.icl.job import fresh, models
from crate_kernels.experiments.icl.settings import PRESETS

SETTINGS = replace(PRESETS["quick"], dims=4, examples=9, nonzeros=2)


def test_where_a_model_starts():
    trial: Any = SimpleNamespace(seed=0, backend=None, device=torch.device("cpu"))
    paired, plain = (fresh(trial, replace(SETTINGS, paired=each, derived=each), "AoT-MSSA") for each in (True, False))
    weights = paired.wpe.weight.detach()
    questions, answers = weights[: 2 * SETTINGS.examples : 2], weights[1 : 2 * SETTINGS.examples : 2]
    torch.testing.assert_close(answers - questions, (answers - questions)[:1].expand_as(answers))
    assert (answers != questions).all()
    assert (questions[0] != questions[1]).all()
    assert torch.equal(weights[2 * SETTINGS.examples :], plain.wpe.weight[2 * SETTINGS.examples :])
    for layer, derived in ((plain.layers[0], False), (paired.layers[0], True)):
        w, out = layer.attn.qkv.weight, layer.attn.to_out[0].weight
        assert torch.allclose(out / out.norm(), w.mT / w.norm()) is derived
    again = fresh(trial, replace(SETTINGS, paired=True, derived=True), "AoT-MSSA")
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), paired.parameters(), strict=True))


def test_every_second_head_can_attend_to_what_is_opposite():
    settings = replace(SETTINGS, opposite=True, heads=4)
    trial: Any = SimpleNamespace(seed=0, backend=None, device=torch.device("cpu"))
    plain, turned = (fresh(trial, settings, name) for name in list(models(settings))[:2])
    for ours, theirs in zip(plain.parameters(), turned.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    plain_attn, attn = plain.layers[0].attn, turned.layers[0].attn
    x = torch.randn(2, 5, settings.dim, generator=torch.Generator().manual_seed(0))
    w = attn.qkv(x).unflatten(-1, (settings.heads, -1)).transpose(1, 2)
    signs = torch.tensor([-1.0, 1.0]).repeat(settings.heads // 2)[:, None, None]
    scores = signs * attn.scale * (w @ w.mT)
    weights = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf).softmax(-1)
    expected = attn.to_out((weights @ w).transpose(1, 2).flatten(2))
    torch.testing.assert_close(attn(x), expected)
    assert not torch.allclose(plain_attn(x), expected)


@pytest.mark.parametrize("task", ["linear", "sparse"])
def test_prompts(task):
    xs, ys, weights = prompts.draw(SETTINGS, task, 2000, 0)
    assert xs.shape == (2000, 9, 4)
    torch.testing.assert_close(ys, (xs * weights[:, None]).sum(-1))
    counted = (weights != 0).sum(1)
    assert torch.all(counted == (2 if task == "sparse" else 4))
    # Every place is as likely: 2000 draws, so a share is known to 1%.
    assert (weights != 0).double().mean(0) == pytest.approx(counted[0].item() / 4, abs=0.05)
    assert xs.std().item() == pytest.approx(1, rel=0.02)
    assert weights[weights != 0].std().item() == pytest.approx(1, rel=0.05)
    again = prompts.draw(SETTINGS, task, 2000, 0)
    assert all(torch.equal(a, b) for a, b in zip(again, (xs, ys, weights), strict=True))
    assert not torch.equal(prompts.draw(SETTINGS, task, 2000, 1)[0], xs)


def test_least_squares_is_exact_from_as_many_examples_as_unknowns():
    xs, ys, weights = prompts.draw(SETTINGS, "sparse", 64, 0)
    found = prompts.least_squares(xs, ys)
    wanted = torch.linalg.lstsq(xs[:, :3].double(), ys[:, :3, None].double(), driver="gelsd").solution
    torch.testing.assert_close(found[:, 3], (xs[:, 3].double() * wanted[..., 0]).sum(-1))
    assert torch.equal(found[:, 0], torch.zeros(64).double())
    errors = prompts.errors(found, ys, 2.0)
    assert errors[0] == pytest.approx(ys[:, 0].double().square().mean().item() / 2)
    assert max(errors[4:]) < 1e-6
    assert errors[2] > 0.05
    informed = prompts.errors(prompts.knowing_the_support(xs, ys, weights), ys, 2.0)
    assert max(informed[2:]) < 1e-6
    assert informed[1] > 0.05


def test_a_guess_of_zero_has_error_one(run, undrawn, metrics, monkeypatch):
    quick = replace(PRESETS["quick"], dims=4, nonzeros=1, tests=4096)
    monkeypatch.setitem(PRESETS, "quick", quick)
    *_, folder = run("icl")
    for task in ("linear", "sparse"):
        assert metrics(folder)["tasks"][task]["floors"]["least squares"][0] == pytest.approx(1.0, abs=0.2)
