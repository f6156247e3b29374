"""A step of several batches is the step of all of them at once; a training that goes on is the one that was stopped."""

import os
import signal

import pytest
import torch
from torch import nn

from crate_kernels.experiments.common.fit import Fit, train
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
def test_a_training_that_goes_on_was_measured_once_a_step(stop, tmp_path):
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
