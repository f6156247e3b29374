"""The command: from digits to report, refused, interrupted, resumed."""

import json
import os
import re
import signal

import pytest
from safetensors import safe_open

from crate_kernels import models
from crate_kernels._core import backends
from crate_kernels.cli import main
from crate_kernels.experiments.common import command
from crate_kernels.experiments.demo import compare, data, whitebox
from crate_kernels.experiments.demo.settings import PRESETS, DemoSettings
from crate_kernels.experiments.demo.training import Training
from tests.experiments.demo.common import CPU


@pytest.fixture
def demo(small, tmp_path, monkeypatch, capsys):
    """Run the command on the small digits; return its status, what it printed and its folder."""
    monkeypatch.setattr(data, "load", lambda: small)
    monkeypatch.setitem(PRESETS, "quick", DemoSettings(epochs=1, dim=16, depth=2, heads=2, dim_head=8))
    monkeypatch.setattr(compare, "QUICK_STEPS", 4)

    def run(*options):
        status = main(["demo", "--quick", "--output", str(tmp_path / "out"), *options])
        printed = capsys.readouterr()
        return status, printed.out, printed.err, tmp_path / "out"

    return run


def test_the_demo_from_digits_to_report_which_other_settings_do_not_overwrite(demo, small):
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

    start = Training(DemoSettings(**metrics["settings"]), small, None, CPU)
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

    before = (folder / "checkpoint.safetensors").read_bytes()
    status, _, err, _ = demo("--seed", "3")
    assert status == 2
    assert re.search(r"other settings \(seed 0, now 3\); --fresh starts anew, --output writes elsewhere", err)
    assert (folder / "checkpoint.safetensors").read_bytes() == before


@pytest.mark.exhaustive
def test_a_finished_run_is_not_trained_again_unless_asked(demo, undrawn):
    demo()
    status, out, _, folder = demo()
    assert status == 0
    assert "already trained" in out
    assert json.loads((folder / "metrics.json").read_text())["training_seconds"] is None
    status, out, _, folder = demo("--fresh")
    assert status == 0
    assert "already trained" not in out
    assert json.loads((folder / "metrics.json").read_text())["training_seconds"] > 0


def test_an_interrupted_demo_resumes(demo, undrawn, monkeypatch):
    steps = Training.step

    def interrupted(self):
        if self.done == 5 and self.config.backend != "reference":
            os.kill(os.getpid(), signal.SIGINT)
        return steps(self)

    monkeypatch.setattr(Training, "step", interrupted)
    status, out, _, folder = demo()
    assert status == 130
    assert "The same command resumes from" in out
    assert not (folder / "report.html").exists()
    monkeypatch.setattr(Training, "step", steps)
    status, out, _, folder = demo()
    assert status == 0
    assert "resuming after step 6 of 14" in out
    # Neither part's time is the time of a whole training.
    assert json.loads((folder / "metrics.json").read_text())["training_seconds"] is None


@pytest.mark.parametrize("factor", [1.001, float("nan")])
def test_a_wrong_operator_fails_the_demo(factor, demo, undrawn, monkeypatch):
    composite = backends.kernel("ista", "composite")
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
    "backend": (["--backend", "cublas"], "--backend must be one of"),
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
    assert err == "demo: not installed: rich, scikit-learn; pip install rich scikit-learn\n"
    assert not folder.exists()


def test_a_file_in_place_of_the_folder_is_refused(demo, tmp_path):
    (tmp_path / "out").write_text("mine")
    status, _, err, folder = demo()
    assert status == 2
    assert "exists" in err
    assert folder.read_text() == "mine"
