"""The GPU suite without a GPU: its dry run passes, goes on where it stopped, and records failures."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from crate_kernels import cli
from crate_kernels._native import extension
from tests.gpu import __main__ as suite

ROOT = Path(__file__).parents[2]
pytest.importorskip("triton", reason="its dry run interprets Triton's kernels: pip install triton")


def dry_run(folder, *args):
    command = [sys.executable, "-m", "tests.gpu", "--dry-run", "--output", str(folder), *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)


def results(folder):
    (path,) = folder.glob("*.json")
    return json.loads(path.read_text())


@pytest.mark.exhaustive
def test_the_dry_run_passes_in_shards_and_goes_on_where_it_stopped(tmp_path):
    """On one operator: the second part of make test interprets all of them."""
    few = ("-k", "ista")
    stopped = dry_run(tmp_path, "--shard", "1/2", "--minutes", "0", *few)
    assert stopped.returncode == suite.INCOMPLETE, stopped.stdout + stopped.stderr
    counts = []
    for index in (1, 2):
        folder = tmp_path / str(index)
        done = dry_run(folder, "--shard", f"{index}/2", *few)
        assert done.returncode == 0, done.stdout + done.stderr
        record = results(folder)
        assert {test["outcome"] for test in record["tests"].values()} <= {"passed", "skipped"}
        assert set(record["machine"]) == {"gpu", "git", "python", "torch", "triton"}
        counts.append(set(record["tests"]))
    assert not counts[0] & counts[1]
    again = dry_run(tmp_path / "1", "--shard", "1/2", *few)
    assert again.returncode == 0
    assert "no tests ran" in again.stdout or "deselected" in again.stdout


def test_a_machine_without_git_is_named_all_the_same(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    machine = suite.machine()
    assert machine["git"] == "unknown"
    assert machine["torch"] == torch.__version__


@pytest.mark.parametrize("carried", [True, False])
def test_an_extension_that_was_carried_along_is_not_compiled_again(carried, monkeypatch):
    """What would compile it runs in a process of its own, here in this one."""
    commands, built = [], []
    monkeypatch.setattr(suite.subprocess, "run", lambda command, **options: commands.append(command))
    suite.build()
    ((python, flag, code),) = commands
    assert (python, flag) == (sys.executable, "-c")
    monkeypatch.setattr(extension, "PATH", Path("_cpu.so") if carried else None)
    monkeypatch.setattr(cli, "main", lambda arguments: built.append(arguments) or 0)
    exec(code, {})
    assert built == ([] if carried else [["build"]])


WITHOUT = """import sys, pytest
class Missing:
    @pytest.hookimpl(tryfirst=True)
    def pytest_load_initial_conftests(self):
        sys.modules["hypothesis"] = None
sys.exit(pytest.main(sys.argv[1:], plugins=[Missing()]))
"""


def test_operator_tests_are_collected_without_hypothesis():
    # Assertions are left as they are: rewriting them takes a third of the time, and none is met.
    options = ("--collect-only", "--assert=plain", *suite.OPTIONS, "-p", "no:hypothesispytest", "tests/ops")
    command = [sys.executable, "-c", WITHOUT, *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    for op in ("mssa", "tssa"):
        assert f"tests/ops/{op}/test_native.py::" in done.stdout
        assert f"tests/ops/{op}/test_native_drawn.py::" not in done.stdout


@pytest.mark.parametrize("shard", ["0/2", "3/2", "1", "a/b"])
def test_a_shard_that_is_none_is_refused(shard, capsys):
    with pytest.raises(SystemExit):
        suite.parse(["--shard", shard])
    assert "--shard must be I/N with 1 <= I <= N" in capsys.readouterr().err
