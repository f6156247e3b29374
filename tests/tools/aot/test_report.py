"""What the machine code of the main kernels says may only fall."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.aot import harness

harness.needs_compiler()

from tests.tools.aot import families, report  # noqa: E402  # only where Triton compiles

ROOT = Path(__file__).parents[3]
OLDER = ROOT / ".venv-triton-3.6"
QUICK = ("mssa_forward-d64-n16384", "mssa_backward-d64-n16384")
CASES = [
    pytest.param(name, target, id=f"{name}-{target}", marks=() if quick else pytest.mark.exhaustive)
    for target in report.TARGETS
    for name in families.FAMILIES
    for quick in [name in QUICK and target == "sm_90"]
]


@pytest.mark.skipif(
    report.VERSION not in report.read(), reason=f"needs figures of Triton {report.VERSION}: report --record"
)
@pytest.mark.parametrize(("name", "target"), CASES)
def test_no_figure_grows(name, target):
    kernels = [figures for figures, _ in report.family(name, target)]
    assert report.grown({name: report.summary(kernels)}, target) == []


@pytest.mark.exhaustive
@pytest.mark.skipif(not OLDER.exists(), reason="needs Triton 3.6 beside .venv: make aot")
@pytest.mark.parametrize("target", report.TARGETS)
def test_no_figure_grows_with_the_older_triton(target):
    path = os.pathsep.join([str(ROOT), str(OLDER)])
    command = [sys.executable, "-m", "tests.tools.aot.report", "--check", "--target", target]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


KNOWN = {"instructions": 5, "registers": 5, "spills": 5, "serialised": 5, "warnings": 5}


@pytest.mark.parametrize("key", KNOWN)
def test_a_figure_that_grew_is_named(key, monkeypatch, tmp_path):
    monkeypatch.setattr(report, "RECORDED", tmp_path / "figures.json")
    report.record({"a": KNOWN}, "sm_90", grow=False)
    worse, better = ({**KNOWN, key: KNOWN[key] + step} for step in (1, -1))
    assert report.grown({"a": better}, "sm_90") == []
    assert report.grown({"b": KNOWN}, "sm_90") == ["b: no record"] * len(KNOWN)
    assert report.grown({"a": worse}, "sm_90") == [f"a: {key} is 6, recorded 5"]
    for grow, expected in ((False, 5), (True, 6)):
        report.record({"a": worse}, "sm_90", grow=grow)
        assert report.read()[report.VERSION]["sm_90"]["a"][key] == expected


def test_the_main_kernels_have_a_record():
    """A new family without figures would have no check."""
    every = report.read()
    assert {compiler: set(every[compiler]) for compiler in every} == {
        version: {*report.TARGETS} for version in ("3.6", "3.7")
    }
    for by_target in every.values():
        assert all(set(known) == set(families.FAMILIES) for known in by_target.values())
