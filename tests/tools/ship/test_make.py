"""What the targets of the Makefile do again, and what make clean removes."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.fuzz import OUTPUT

ROOT = Path(__file__).parents[3]
MADE = ("made", "demo", "test", "dev", "mnist", "extension")
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


@pytest.fixture
def dry_run(tmp_path):
    """Return a function that prints what make would run where every environment is made already."""
    for name in ("Makefile", "pyproject.toml", "setup.py", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / ".venv").mkdir()
    for name in MADE:
        (tmp_path / ".venv" / f"{name}.stamp").touch()

    def run(*words):
        outside = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
        done = subprocess.run(["make", "-n", *words], cwd=tmp_path, env=outside, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.mark.parametrize("target", ["demo", "test", "fuzz", "bench"])
def test_a_library_that_is_missing_is_built_whatever_was_before(target, dry_run):
    """PyTorch, the compiler or the user's cache may have changed, which no file of the tree tells."""
    recipe = dry_run(target)
    assert "pip install" not in recipe
    assert recipe.startswith(".venv/bin/python -m crate_kernels build\n")


def test_clean_removes_what_the_targets_write(dry_run):
    removed = re.search(r"^rm -rf (.*)$", dry_run("clean"), re.MULTILINE)[1].split()
    assert {str(OUTPUT), "demo-output", "matrix-output", "bench-output", "build"} <= set(removed)


def test_help_lists_nine_targets_and_help_all_every_one():
    def listed(target):
        done = subprocess.run(["make", "-s", target], cwd=ROOT, capture_output=True, text=True, check=True)
        return set(re.findall(r"^  make (\S+)", done.stdout, re.MULTILINE))

    phony = re.search(r"^\.PHONY: help (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
    assert len(listed("help")) == 9
    assert listed("help-all") == {*phony} - {"extension"}
