"""Training that can stop anywhere, and what lies on disk then."""

import os
import signal
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from crate_kernels._core import files
from crate_kernels.experiments.common.fit import Unusable, advance, deferred_interrupts, resume, save
from crate_kernels.experiments.common.trial import Trial
from crate_kernels.experiments.demo.training import Training, batch, fresh_model
from tests.experiments.demo.common import CPU, TINY, assert_equal, weights


def test_a_model_is_a_function_of_its_seed(training):
    torch.manual_seed(7)
    before = torch.get_rng_state()
    again = fresh_model(TINY, training.config, CPU)
    assert_equal(torch.get_rng_state(), before)
    assert_equal(dict(again.state_dict()), weights(training))


def test_only_matrices_decay(training):
    decay = {id(p): group["weight_decay"] for group in training.optimizer.param_groups for p in group["params"]}
    for p in training.model.parameters():
        assert decay[id(p)] == (TINY.weight_decay if p.dim() == 2 else 0.0)


def test_the_loss_has_smoothed_labels(small, training):
    images, labels = batch(TINY, small, 0)
    smoothed = 0.9 * F.one_hot(labels, 10) + 0.1 / 10
    expected = -(smoothed * training.model(images).log_softmax(-1)).sum(-1).mean()
    torch.testing.assert_close(training.loss(0), expected)


def test_the_learning_rate_rises_and_then_decays_to_nothing(training):
    rates = []
    while training.done < training.total:
        training.step()
        rates.append(training.optimizer.param_groups[0]["lr"])
    peak = training.settings.learning_rate
    assert rates[:3] == pytest.approx([peak / 2, peak, peak])
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert 0 < rates[-1] < peak / 2


def test_it_learns(small):
    settings = replace(TINY, epochs=8, batch_size=100, dim=32, dim_head=16, learning_rate=1e-2)
    training = Training(settings, small, "composite", CPU)
    assert training.evaluate() < 0.3
    while training.done < training.total:
        training.step()
    assert training.evaluate() > 0.7
    assert training.losses[-1] < training.losses[0] - 0.5


@pytest.mark.parametrize("stop", [1, 3, 6])
def test_a_resumed_run_is_the_uninterrupted_one(stop, small, training, tmp_path):
    for _ in range(stop):
        training.step()
    training.evaluate()
    save(training, tmp_path)
    resumed = Training(TINY, small, "composite", CPU)
    assert resume(resumed, tmp_path)
    assert resumed.watched == training.watched
    while training.done < training.total:
        assert resumed.step() == training.step()
    assert_equal(weights(resumed), weights(training))


def test_without_a_checkpoint_there_is_nothing_to_resume(training, tmp_path):
    assert not resume(training, tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "cannot be read"), (b"\x00" * 100, "cannot be read"), (b"\x02\x00\x00\x00\x00\x00\x00\x00{}", "cannot be")],
    ids=["empty", "zeros", "no metadata"],
)
def test_a_damaged_checkpoint_is_refused_and_kept(content, message, training, tmp_path):
    path = tmp_path / training.file
    path.write_bytes(content)
    before = weights(training)
    with pytest.raises(Unusable, match=message):
        resume(training, tmp_path)
    assert path.read_bytes() == content
    assert_equal(weights(training), before)


OTHER_RUNS = {
    "seed": (replace(TINY, seed=5), {}, "composite", "seed 0, now 5"),
    "digits": (TINY, {"name": "letters"}, "composite", "digits .*, now 'letters'"),
    "backend": (TINY, {}, "reference", "backend 'composite', now 'reference'"),
}


@pytest.mark.parametrize(("settings", "digits", "backend", "words"), OTHER_RUNS.values(), ids=OTHER_RUNS)
def test_a_checkpoint_of_another_run_is_refused(settings, digits, backend, words, small, training, tmp_path):
    save(training, tmp_path)
    other = Training(settings, replace(small, **digits), backend, CPU)
    with pytest.raises(Unusable, match=rf"other settings \({words}\)"):
        resume(other, tmp_path)


def test_a_failed_write_leaves_what_was_there(tmp_path, monkeypatch):
    path = files.put(tmp_path / "file", b"old")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        files.put(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "terminate"])
def test_an_interrupted_step_is_completed_and_kept(number, small, training, tmp_path, monkeypatch):
    inner = training.optimizer.step

    def interrupted_step():
        if training.done == 1:
            os.kill(os.getpid(), number)  # within a step, and within an epoch: the end of an epoch saves anyway
        inner()

    monkeypatch.setattr(training.optimizer, "step", interrupted_step)
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        advance(training, Trial("demo", tmp_path, CPU))
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    assert training.done == 2
    resumed, straight = (Training(TINY, small, "composite", CPU) for _ in range(2))
    assert resume(resumed, tmp_path)
    assert resumed.done == 2
    advance(resumed, Trial("demo", tmp_path, CPU))
    advance(straight, Trial("demo", tmp_path, CPU))
    assert_equal(weights(resumed), weights(straight))
    assert resumed.watched == straight.watched


@pytest.fixture
def interruptible():
    """Let Ctrl-C raise even where the tests are a shell's background job, which ignores it."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


def test_a_second_interrupt_is_immediate(training, tmp_path, monkeypatch, interruptible):
    def impatient_step():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("the second one did not raise")

    monkeypatch.setattr(training.optimizer, "step", impatient_step)
    with pytest.raises(KeyboardInterrupt):
        advance(training, Trial("demo", tmp_path, CPU))
    assert training.done == 0


def test_where_interrupts_are_ignored_they_stay_ignored():
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell does for its background jobs
    try:
        with deferred_interrupts() as received:
            os.kill(os.getpid(), signal.SIGINT)
            assert received == []
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, previous)
