"""A step of several batches is the step of all of them at once; a resumed training is the one that was stopped."""

import os
import signal
from dataclasses import replace
from io import StringIO

import pytest
import torch
from rich.console import Console
from torch import nn

from crate_kernels.experiments.common.fit import Fit, decayed, every, resume, train
from crate_kernels.experiments.common.trial import Trial


def fitted(pieces, size):
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    xs = torch.randn(48, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    seen = []

    def loss(index):
        seen.append(index)
        return model(xs[size * index : size * (index + 1)]).square().mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fit = Fit("a", model, optimizer, loss, 4, 1, {}, clip=0.5, pieces=pieces)
    for _ in range(4):
        fit.step()
    return fit, seen


def test_pieces_make_one_step():
    whole, _ = fitted(1, 12)
    split, seen = fitted(3, 4)
    assert seen == list(range(12))
    assert split.losses == pytest.approx(whole.losses, rel=1e-12)
    assert len(split.losses) == 4
    for ours, theirs in zip(split.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)


def watched_at_every_second_step(stop):
    """Return a training of six steps, measured before it and at every second step; it is stopped at one."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    fit = Fit("a", model, torch.optim.SGD(model.parameters(), lr=0.1), lambda step: loss(step), 6, 1, {})
    fit.watch, fit.watch_at = lambda: model.weight.sum().item(), {0, 2, 4, 6}

    def loss(step):
        if step + 1 == stop:
            os.kill(os.getpid(), signal.SIGINT)
        return model(torch.ones(2, 3)).square().mean()

    return fit


@pytest.mark.parametrize("stop", [1, 2, 3, 6])
def test_a_resumed_training_was_measured_once_a_step(stop, tmp_path):
    (tmp_path / "straight").mkdir()
    straight = watched_at_every_second_step(None)
    train(straight, Trial("a", tmp_path / "straight", torch.device("cpu")))
    trial = Trial("a", tmp_path, torch.device("cpu"))
    if stop < 6:
        with pytest.raises(KeyboardInterrupt):
            train(watched_at_every_second_step(stop), trial)
    else:
        train(watched_at_every_second_step(stop), trial)
    fit = watched_at_every_second_step(None)
    train(fit, trial)
    assert [step for step, _ in fit.watched] == [0, 2, 4, 6]
    assert fit.watched == straight.watched
    assert straight.seconds is not None
    assert fit.seconds is None  # those of a part would pass for those of the whole
    assert fit.losses == pytest.approx(straight.losses)


def small(total=6, warmup=2, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return Fit("A, b 2", model, optimizer, lambda step: model(torch.ones(2, 3)).mean(), total, warmup, {}, **options)


def test_what_a_fit_is_by_default():
    fit = small()
    assert (fit.file, small(file="mine").file) == ("a--b-2.checkpoint", "mine")
    assert (fit.done, fit.parameters, fit.pieces, fit.clip, fit.seconds) == (0, 3 * 4 + 4 + 4 + 1, 1, None, None)
    assert fit.facts() == {"losses": [], "parameters": 21, "seconds": None}


@pytest.mark.parametrize(
    ("warmup", "wanted"), [(0, [1, 0.75, 0.25]), (1, [1, 1, 0.5]), (2, [0.5, 1, 1]), (3, [1 / 3, 2 / 3, 1])]
)
def test_the_rate_of_each_step(warmup, wanted):
    fit, rates = small(3, warmup), []
    for _ in range(3):
        fit.step()
        rates.append(fit.optimizer.param_groups[0]["lr"] / 0.5)
    assert rates == pytest.approx(wanted)


@pytest.mark.parametrize("clip", [None, 1e-3, 1e3])
def test_gradients_are_clipped_to_a_norm_if_one_is_set(clip):
    fit = small(warmup=0, clip=clip)
    fit.model = fit.model.eval()
    fit.model[1].p = 0.0
    before = [p.detach().clone() for p in fit.model.parameters()]
    gradients = torch.autograd.grad(fit.loss(0), list(fit.model.parameters()))
    norm = torch.stack([g.norm() for g in gradients]).norm().item()
    assert 1e-2 < norm < 1e2
    share = min(1.0, (clip or 1e9) / norm)
    fit.step()
    for old, new, gradient in zip(before, fit.model.parameters(), gradients, strict=True):
        torch.testing.assert_close(new, old - 0.5 * share * gradient, rtol=1e-4, atol=1e-7)


def test_a_model_is_trained_in_train_mode_and_measured_in_eval_mode_without_gradients():
    seen = []
    fit = small(watch=lambda: seen.append((fit.model.training, torch.is_grad_enabled())) or 0.5, watch_at={2})
    fit.loss, inner = lambda step: seen.append(fit.model.training) or inner(step), fit.loss
    for _ in range(3):
        fit.step()
    assert seen == [True, True, (False, False), True]
    assert fit.watched == [(2, 0.5)]
    assert fit.evaluate() == 0.5
    assert fit.watched == [(2, 0.5), (3, 0.5)]


def test_every():
    assert (every(2, 5), every(2, 4), every(9, 5), every(1, 2)) == ({2, 4, 5}, {2, 4}, {5}, {1, 2})


@pytest.mark.parametrize(("max_dim", "decaying"), [(float("inf"), {2, 3, 4}), (2, {2})])
def test_what_decays(max_dim, decaying):
    model = nn.ParameterList(torch.zeros([1] * dim) for dim in range(5))
    groups = decayed(model, 0.25, max_dim)
    assert [group["weight_decay"] for group in groups] == [0.25, 0.0]
    assert [{p.dim() for p in group["params"]} for group in groups] == [decaying, set(range(5)) - decaying]


@pytest.mark.parametrize("terminal", [False, True], ids=["log", "terminal"])
def test_a_log_gets_a_line_a_measurement_and_a_terminal_a_bar(terminal, tmp_path):
    written = StringIO()
    console = Console(file=written, force_terminal=terminal, width=120, no_color=True)
    trial = replace(Trial("a", tmp_path, torch.device("cpu")), console=console)
    fit = small(4, watch=lambda: 0.25, watch_name="share", watch_at={2, 4})
    train(fit, trial)
    lines = written.getvalue().splitlines()
    if terminal:
        assert not any(line.startswith("  step") for line in lines)
        assert "4/4  loss" in written.getvalue()
        assert "share 0.2500" in written.getvalue()
    else:
        losses = [f"{fit.losses[step - 1]:.3f}" for step in (2, 4)]
        assert lines == [
            "A, b 2",
            f"  step 2/4  loss {losses[0]}  share 0.2500",
            f"  step 4/4  loss {losses[1]}  share 0.2500",
        ]
    written.truncate(0)
    again = small(4, watch=lambda: 0.25, watch_name="share", watch_at={2, 4})
    train(again, trial)
    assert "A, b 2: already trained; --fresh trains anew" in written.getvalue()
    assert again.losses == fit.losses
    anew = small(4)
    train(anew, replace(trial, fresh=True))
    assert anew.seconds is not None
    assert anew.watched == []


def test_what_was_measured_is_kept_though_the_process_dies(tmp_path):
    """Each measurement writes the checkpoint: an end without a signal loses the steps since the last one."""

    def dies(step):
        if step == 3:
            raise MemoryError
        return loss(step)

    fit = small(watch=lambda: 0.25, watch_at={2})
    loss, fit.loss = fit.loss, dies
    with pytest.raises(MemoryError):
        train(fit, Trial("a", tmp_path, torch.device("cpu")))
    kept = small()
    assert resume(kept, tmp_path)
    assert (kept.done, kept.watched) == (2, [(2, 0.25)])
    assert not resume(small(), tmp_path / "elsewhere")
