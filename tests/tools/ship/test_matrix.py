"""The table of supported versions: what is run, remembered, and said where it cannot be had."""

import subprocess
import sys

import pytest

pytest.importorskip("rich", reason="needs rich: pip install '.[demo]'")

from tests.tools.ship import matrix


@pytest.fixture
def cells(monkeypatch, tmp_path):
    """Two cells in a separate folder; returns the names of those that were run, which all pass."""
    ran = []

    def run(cell, part, workers):
        ran.append(cell.name)
        return {"passed": True, "said": "3 passed", "seconds": 1}

    monkeypatch.setattr(matrix, "FOLDER", tmp_path)
    monkeypatch.setattr(matrix, "CELLS", (matrix.Cell("3.11", "2.13.0"), matrix.Cell("3.12", "2.15.0")))
    monkeypatch.setattr(matrix, "run", run)
    monkeypatch.setattr(sys, "argv", ["matrix"])
    return ran


def test_a_cell_runs_once_on_the_same_sources(cells, monkeypatch):
    assert (matrix.main(), len(cells)) == (0, 2)
    assert (matrix.main(), len(cells)) == (0, 2)
    monkeypatch.setattr(matrix, "digest", lambda *folders: "changed")
    assert (matrix.main(), len(cells)) == (0, 4)


@pytest.mark.parametrize(("passed", "status"), [(True, 0), (False, 1), (None, 0)])
def test_a_failure_is_the_exit_status(passed, status, cells, monkeypatch, capsys):
    monkeypatch.setattr(matrix, "run", lambda *args: {"passed": passed, "said": "1 failed"})
    assert matrix.main() == status
    assert {True: "yes", False: "no", None: "not to be had"}[passed] in capsys.readouterr().out


@pytest.mark.parametrize("compiler", ["g++", "clang++"])
def test_what_cannot_be_had_says_why(compiler, tmp_path, monkeypatch):
    monkeypatch.setattr(matrix, "FOLDER", tmp_path)
    monkeypatch.setattr(matrix.shutil, "which", lambda name: name if name == "g++" else None)
    refused = subprocess.CompletedProcess([], 2, "", "error: there is no interpreter of 3.99")
    monkeypatch.setattr(matrix.subprocess, "run", lambda command, **_: refused)
    said = {"g++": "error: there is no interpreter of 3.99", "clang++": "there is no clang++"}[compiler]
    assert matrix.run(matrix.Cell("3.99", "2.13.0", compiler=compiler), "smoke", "1") == {"passed": None, "said": said}


def test_the_triton_of_a_cell_takes_the_place_of_pytorchs(tmp_path, monkeypatch):
    commands = []
    monkeypatch.setattr(matrix.shutil, "which", lambda name: name)
    monkeypatch.setattr(matrix, "uv", lambda *words: commands.append([str(word) for word in words]))
    assert matrix.environment(matrix.Cell("3.10", "2.11.0", "3.6.0"), tmp_path) == tmp_path / "bin" / "python"
    made, installed = commands
    assert made[-3:] == ["--python", "3.10", str(tmp_path)]
    assert {"torch==2.11.0", "triton==3.6.0", "numpy<2.4", *matrix.TOOLS} <= {*installed}
    assert (tmp_path / "override.txt").read_text().split() == ["triton==3.6.0", "numpy<2.4"]


def test_the_summary_is_pytests():
    log = "....\n= 2 failed, 3 passed, 1 skipped in 4.20s (0:00:04) =\nW1122 no CUDA runtime in /usr\n"
    assert matrix.summary(log) == "2 failed, 3 passed, 1 skipped"
    assert matrix.summary("Segmentation fault") == "no summary"


def test_cells_are_of_supported_versions():
    assert len({cell.name for cell in matrix.CELLS}) == len(matrix.CELLS)
    assert {"2.11.0", "2.12.1", "2.13.0"} < {cell.torch for cell in matrix.CELLS}
    assert {cell.python for cell in matrix.CELLS} == {"3.10", "3.11", "3.12", "3.13", "3.14", "3.15"}
