"""The table of supported versions: what is run, remembered, and said where it cannot be had."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("rich", reason="needs rich: pip install '.[demo]'")

from tests.tools.ship import matrix


@pytest.fixture
def cells(monkeypatch, tmp_path):
    """Two cells in a folder of their own; returns the names of those that were run, which all pass."""
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
    monkeypatch.setattr(matrix, "content_hash", lambda: "changed")
    assert (matrix.main(), len(cells)) == (0, 4)


@pytest.mark.parametrize(("passed", "status"), [(True, 0), (False, 1), (None, 0)])
def test_a_failure_is_the_exit_status(passed, status, cells, monkeypatch, capsys):
    monkeypatch.setattr(matrix, "run", lambda *args: {"passed": passed, "said": "1 failed"})
    assert matrix.main() == status
    assert {True: "yes", False: "no", None: "not to be had"}[passed] in capsys.readouterr().out


def test_what_cannot_be_had_says_why(cells, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(matrix.shutil, "which", lambda name: name if name == "g++" else None)
    result = matrix.run(matrix.Cell("3.99", "2.13.0"), "smoke", "1")
    assert result == {"passed": None, "said": "there is no python3.99, and no uv to bring one"}
    assert matrix.run(matrix.Cell("3.11", "2.13.0", compiler="clang++"), "smoke", "1")["said"] == "there is no clang++"


@pytest.mark.parametrize("there", [True, False])
def test_packages_are_shared_where_uv_is(there, monkeypatch):
    monkeypatch.setattr(matrix.shutil, "which", lambda name: f"/bin/{name}" if there else None)
    command = matrix.installer(Path("of-a-cell/bin/python"))
    assert (command[0] == "uv") == there
    assert "of-a-cell/bin/python" in command


def test_an_environment_is_made_again_for_other_packages(monkeypatch, tmp_path):
    made = []

    def install(step, **_):
        tmp_path.mkdir(exist_ok=True)
        made.append(step)
        return subprocess.CompletedProcess(step, 0, "3.11", "")

    monkeypatch.setattr(matrix.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(matrix.subprocess, "run", install)
    cell, counts = matrix.Cell("3.11", "2.13.0"), []
    for tools in (("numpy",), ("numpy",), ("numpy", "transformers")):
        monkeypatch.setattr(matrix, "TOOLS", tools)
        assert matrix.environment(cell, tmp_path) == tmp_path / "bin" / "python"
        counts.append(len(made))
    assert 0 < counts[0] == counts[1] < counts[2]


def test_the_summary_is_pytests():
    log = "....\n= 2 failed, 3 passed, 1 skipped in 4.20s (0:00:04) =\nW1122 no CUDA runtime in /usr\n"
    assert matrix.summary(log) == "2 failed, 3 passed, 1 skipped"
    assert matrix.summary("Segmentation fault") == "no summary"


def test_cells_are_of_supported_versions():
    assert len({cell.name for cell in matrix.CELLS}) == len(matrix.CELLS)
    assert {"2.11.0", "2.12.1", "2.13.0"} < {cell.torch for cell in matrix.CELLS}
    assert {cell.python for cell in matrix.CELLS} == {"3.10", "3.11", "3.12", "3.13", "3.14", "3.15"}
