"""The options of an experiment, what it hands to its job, how it ends; what a trial prints and writes."""

import json
import sys
from dataclasses import dataclass
from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from rich.console import Console

from crate_kernels.cli import main
from crate_kernels.experiments import EXPERIMENTS
from crate_kernels.experiments.common import command, machine
from crate_kernels.experiments.common.command import Experiment
from crate_kernels.experiments.common.fit import Unusable
from crate_kernels.experiments.common.trial import Trial

CPU = torch.device("cpu")


@dataclass
class Size:
    steps: int = 3


PRESETS = {"default": Size(9), "quick": Size(1), "paper": Size(99)}


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """Run a subcommand with this job; return the exit status."""

    def run(job, *options, presets=("default", "quick", "paper"), **fields):
        name = "crate_kernels.experiments.fake"
        settings: Any = SimpleNamespace(PRESETS={each: PRESETS[each] for each in presets})
        monkeypatch.setitem(sys.modules, f"{name}.settings", settings)
        monkeypatch.setitem(sys.modules, f"{name}.job", SimpleNamespace(run=job))
        subcommand = Experiment("fake", "a fake", "an hour", **{"ops": ("mssa",), **fields})
        monkeypatch.setattr("crate_kernels.cli.EXPERIMENTS", (subcommand,))
        return main(["fake", "--output", str(tmp_path / "out"), *options])

    return run


def test_a_job_gets_what_was_asked_for(fake, tmp_path):
    seen = []

    def job(trial, settings):
        seen.append((trial, settings))
        return 7

    assert fake(job) == 7
    assert fake(job, "--preset", "paper", "--seed", "3", "--backend", "composite", "--device", "cpu", "--fresh") == 7
    assert fake(job, "--quick", presets=("default", "quick")) == 7
    assert fake(job, presets=("default", "quick")) == 7
    assert fake(job, ops=()) == 7
    fields = [(t.name, t.folder, t.device, t.backend, t.seed, t.preset, t.fresh, t.ops, size.steps) for t, size in seen]
    folder = tmp_path / "out"
    assert fields == [
        ("fake", folder, CPU, None, 0, "default", False, ("mssa",), 9),
        ("fake", folder, CPU, "composite", 3, "paper", True, ("mssa",), 99),
        ("fake", folder, CPU, None, 0, "quick", False, ("mssa",), 1),
        ("fake", folder, CPU, None, 0, "default", False, ("mssa",), 9),
        ("fake", folder, CPU, None, 0, "default", False, (), 9),
    ]


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        (["--preset", "half"], {}),
        (["--quick"], {}),
        (["--preset", "quick"], {"presets": ("default", "quick")}),
        (["--backend", "composite"], {"ops": ()}),
        (["--seed", "1.5"], {}),
    ],
    ids=["preset", "quick", "no presets", "no operators", "seed"],
)
def test_options_that_a_subcommand_does_not_have(options, fields, fake):
    with pytest.raises(SystemExit) as stopped:
        fake(lambda *_: 0, *options, **fields)
    assert stopped.value.code == 2


def test_help_says_what_an_option_does(fake, capsys):
    with pytest.raises(SystemExit):
        fake(lambda *_: 0, "--help")
    said = " ".join(capsys.readouterr().out.split())
    for words in (
        "output folder (fake-output)",
        "(default: an hour on one core",
        "seed of all random numbers (0)",
        "start anew",
    ):
        assert words in said


def raising(error):
    def job(trial, settings):
        raise error

    return job


ENDS = {
    "unusable": (Unusable("it is old"), 2, "fake: it is old; --fresh starts anew, --output writes elsewhere"),
    "full": (OSError(28, "No space left on device", "x"), 2, "fake: [Errno 28] No space left on device: 'x'"),
    "interrupted": (KeyboardInterrupt(), 130, "Interrupted."),
}


@pytest.mark.parametrize(("error", "status", "words"), ENDS.values(), ids=ENDS)
def test_how_a_run_ends(error, status, words, fake, capsys):
    assert fake(raising(error)) == status
    printed = capsys.readouterr()
    assert (printed.out + printed.err).strip() == words


@pytest.mark.parametrize(("options", "again"), [([], ""), (["--fresh"], " without --fresh")], ids=["", "fresh"])
def test_an_interrupted_run_says_how_to_resume_it(options, again, fake, tmp_path, capsys):
    def job(trial, settings):
        (trial.folder / "a.checkpoint").touch()
        raise KeyboardInterrupt

    assert fake(job, *options) == 130
    wanted = f"Interrupted. The same command{again} resumes from {tmp_path / 'out'}."
    assert capsys.readouterr().out.strip() == wanted


def test_other_faults_are_not_hidden(fake):
    with pytest.raises(ZeroDivisionError):
        fake(raising(ZeroDivisionError()))


def test_the_baseline_is_refused_alone(fake, capsys):
    assert fake(lambda *_: 0, "--backend", "reference", baseline="reference") == 2
    assert "--backend must not be reference: that is what the others are compared with" in capsys.readouterr().err
    assert fake(lambda *_: 0, "--backend", "composite", baseline="reference") == 0


def test_seeds_from_zero_on(fake, capsys):
    assert fake(lambda *_: 0, "--seed", "-1") == 2
    assert fake(lambda *_: 0, "--seed", "0") == 0


def test_cores_are_shared_before_the_job(fake, monkeypatch):
    seen = []
    monkeypatch.setattr(command.load, "share_cores", lambda device, say: seen.append((device, say)))
    assert fake(lambda *_: len(seen)) == 1
    assert seen == [(CPU, print)]


def test_operators_of_each_subcommand():
    crate = ("mssa", "ista")
    assert {each.name: each.ops for each in EXPERIMENTS} == {
        "demo": crate, "denoise": ("mssa",), "icl": ("mssa",), "redunet": (), "layers": crate,
        "classify": ("mssa", "tssa", "ista"), "mae": crate, "language": ("mssa", "tssa", "ista"),
    }  # fmt: skip
    assert [each.name for each in EXPERIMENTS if each.baseline] == ["demo"]
    assert [each.name for each in EXPERIMENTS if not each.lasts] == ["demo"]


@pytest.mark.parametrize("there", [False, True])
def test_the_device_by_default(there, monkeypatch):
    made = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    monkeypatch.setattr(torch, "empty", lambda size, device: made.append((size, str(device))) or torch.zeros(1))
    assert machine.choose(None, (), None) == torch.device("cuda" if there else "cpu")
    assert machine.choose("cpu", (), None) == CPU
    assert made == [(1, "cuda" if there else "cpu"), (1, "cpu")]


def test_a_backend_that_lacks_an_operator_is_refused():
    with pytest.raises(ValueError, match="backend must be None or one of"):
        machine.choose("cpu", ("ista", "mssa"), "cublas")
    assert machine.choose("cpu", (), "cublas") == CPU


def test_backends_by_operator_where_they_differ(monkeypatch):
    asked = []
    chosen = {"mssa": "cpp", "ista": "composite", "tssa": "cpp"}
    monkeypatch.setattr(machine._backend, "resolve", lambda op, *rest: asked.append(rest) or chosen[op])
    assert machine.backends(("mssa", "tssa"), None, CPU) == "cpp"
    assert machine.backends(("mssa", "ista"), "x", CPU) == "mssa cpp, ista composite"
    assert asked == [(None, CPU, torch.float32)] * 2 + [("x", CPU, torch.float32)] * 2
    assert list(machine.describe(CPU)) == ["device", "torch", "python", "crate_kernels"]


def trial_on(folder, terminal, **fields):
    written = StringIO()
    console = Console(file=written, force_terminal=terminal, width=100)
    return Trial("fake", folder, CPU, console=console, **fields), written


@pytest.mark.parametrize("terminal", [False, True], ids=["log", "terminal"])
def test_a_bar_moves_by_one(terminal, tmp_path):
    trial, written = trial_on(tmp_path, terminal)
    with trial.progress("counting", 5, 2) as advance:
        advance("half")
        advance()
    if terminal:
        assert "counting" in written.getvalue()
        assert "4/5" in written.getvalue()
    else:
        assert written.getvalue() == "counting\n"


def test_a_line_has_no_colours(tmp_path):
    trial, written = trial_on(tmp_path, True)
    trial.say("12 of 'these' True")
    assert written.getvalue() == "12 of 'these' True\n"


def test_a_table_has_names_on_the_left_and_numbers_on_the_right(tmp_path):
    trial, written = trial_on(tmp_path, False)
    trial.compare([["a", "1", "22"], ["long name", "-", "3"]])
    cells = [[cell[1:-1] for cell in line.split("│")[1:-1]] for line in written.getvalue().splitlines() if "│" in line]
    assert cells == [["a        ", "    1", "      22"], ["long name", "    -", "       3"]]
    assert "paper" in written.getvalue()
    assert "measured" in written.getvalue()


@pytest.mark.parametrize("ops", [(), ("mssa", "ista")], ids=["none", "two"])
def test_what_a_trial_writes(ops, tmp_path):
    trial, written = trial_on(tmp_path, False, ops=ops, seed=4, preset="paper", backend="composite")
    trial._start -= 100
    trial.write({"one": Figure(), "two": Figure()}, {"found": [1.5]}, Size(2))
    assert {path.name for path in tmp_path.iterdir()} == {"one.png", "two.png", "metrics.json"}
    text = (tmp_path / "metrics.json").read_text()
    facts = json.loads(text)
    assert text == json.dumps(facts, indent=2) + "\n"
    assert facts.pop("machine") == trial.machine == machine.describe(CPU)
    assert 100 <= facts.pop("seconds") < 160
    assert facts == {
        "experiment": "fake", "preset": "paper", "seed": 4, "backend": "composite" if ops else None,
        "settings": {"steps": 2}, "found": [1.5],
    }  # fmt: skip
    said = " ".join(written.getvalue().split())
    assert said.startswith("Wrote one.png, two.png and metrics.json into ")
    assert said.endswith(" s")
