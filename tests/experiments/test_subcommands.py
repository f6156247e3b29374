"""Every experiment at its quick size: from start to files, refused, interrupted, resumed."""

import json
import os
import signal
from dataclasses import asdict

import pytest
import torch

from crate_kernels.bench import drawing
from crate_kernels.cli import main
from crate_kernels.experiments.common import command
from crate_kernels.experiments.common.fit import Fit
from crate_kernels.experiments.common.trial import Trial
from tests.experiments import shown

FIGURES = {
    "denoise": {"theorem", "softmax"},
    "icl": {"error", "learning"},
    "redunet": {"rates", "sphere", "turned"},
    "layers": {"epochs", "heatmaps", "subspaces", "principal"},
    "classify": {"classify"},
    "mae": {"reconstruction", "learning"},
    "language": {"language"},
}
# The others train as these do; classify and icl would only take longer.
TRAINED = ("mae", "layers")


@pytest.mark.parametrize("subcommand", FIGURES)
def test_a_subcommand_from_start_to_files(subcommand, run, metrics, monkeypatch):
    figures, tables, draw, compare = [], [], drawing.png, Trial.compare
    monkeypatch.setattr(drawing, "png", lambda figure: figures.append(figure) or draw(figure))
    monkeypatch.setattr(
        Trial, "compare", lambda self, rows, *header: tables.append(rows) or compare(self, rows, *header)
    )
    status, printed, folder = run(subcommand)
    assert status == 0
    assert "paper" in printed
    assert {path.stem for path in folder.glob("*.png")} == FIGURES[subcommand]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in folder.glob("*.png"))
    facts = metrics(folder)
    assert (facts["experiment"], facts["preset"], facts["seed"]) == (subcommand, "quick", 0)
    assert facts["seconds"] > 0
    assert " CPU, " in facts["machine"]["device"]
    assert facts["settings"] == json.loads(json.dumps(asdict(command.Experiment(subcommand, "").presets()["quick"])))
    shown.check(subcommand, figures, tables, facts)
    if subcommand == "language":
        samples = "\n\n".join(f"{name}:\n{each['sample']}" for name, each in facts["models"].items())
        assert (folder / "samples.txt").read_text() == f"{samples}\n"
        assert "What each writes is in" in printed


@pytest.mark.parametrize("subcommand", FIGURES)
def test_published_settings_are_a_preset(subcommand, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([subcommand, "--help"])
    assert stopped.value.code == 0
    assert "{default,paper,quick" in capsys.readouterr().out


@pytest.mark.parametrize("subcommand", TRAINED)
def test_an_interrupted_training_resumes(subcommand, run, undrawn, monkeypatch, metrics):
    taken, inner = [], Fit.step

    def interrupted(self):
        taken.append(self)
        if len(taken) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return inner(self)

    monkeypatch.setattr(Fit, "step", interrupted)
    status, printed, folder = run(subcommand)
    assert status == 130
    assert "Interrupted. The same command resumes from" in printed
    assert not (folder / "metrics.json").exists()
    status, printed, folder = run(subcommand)
    assert status == 0
    assert "esuming after step 2 of" in printed
    resumed = metrics(folder)
    status, _, folder = run(subcommand, "--fresh")
    assert status == 0
    straight = metrics(folder)
    for facts in (resumed, straight):
        _forget_times(facts)
    assert resumed == straight


def _forget_times(facts):
    for name in ("seconds", "tokens_per_second"):
        facts.pop(name, None)
    for value in facts.values():
        if isinstance(value, dict):
            _forget_times(value)


REFUSALS = {
    "seed": (["--seed", "-1"], "--seed must be >= 0, got -1"),
    "backend": (["--backend", "cublas"], "--backend must be one of"),
    "device": (["--device", "toaster"], "device"),
}


@pytest.mark.parametrize(("options", "message"), REFUSALS.values(), ids=REFUSALS)
def test_what_cannot_be_is_refused_before_anything_is_written(options, message, run):
    status, printed, folder = run("denoise", *options)
    assert status == 2
    assert printed.startswith("denoise: ")
    assert message in printed
    assert not folder.exists()


def test_a_device_that_does_not_work_is_refused(run, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("the driver is too old\nand more")

    monkeypatch.setattr(torch, "empty", broken)
    status, printed, folder = run("denoise")
    assert (status, printed) == (2, "denoise: --device cpu cannot be used: the driver is too old")
    assert not folder.exists()


def test_missing_packages_are_named(run, monkeypatch):
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == "matplotlib" else name)
    status, printed, folder = run("redunet")
    assert status == 2
    assert printed == "redunet: not installed: matplotlib; pip install matplotlib"
    assert not folder.exists()


def test_a_file_in_place_of_the_folder_is_refused(run, tmp_path):
    (tmp_path / "denoise").write_text("mine")
    status, printed, folder = run("denoise")
    assert status == 2
    assert "exists" in printed
    assert folder.read_text() == "mine"


def test_a_folder_that_another_run_has_is_refused(run, monkeypatch):
    def taken(path):
        raise command.files.InUse(f"{path} is in use by process 1 on a host")

    monkeypatch.setattr(command.files, "owned", taken)
    status, printed, folder = run("denoise")
    assert (status, printed) == (2, f"denoise: {folder} is in use by process 1 on a host")
    assert list(folder.iterdir()) == []


def test_another_run_is_not_overwritten(run, undrawn):
    *_, folder = run("mae")
    before = (folder / "crate-mae.checkpoint").read_bytes()
    status, printed, _ = run("mae", "--seed", "3")
    assert status == 2
    assert "other settings (seed 0, now 3); --fresh starts anew, --output writes elsewhere" in printed
    assert (folder / "crate-mae.checkpoint").read_bytes() == before
