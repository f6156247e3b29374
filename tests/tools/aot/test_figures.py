"""The bounds of the main kernels from their machine code: what is recorded may only fall."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.aot import harness

harness.needs_compiler()

from tests.cuda import compilers  # noqa: E402
from tests.tools.aot import cuda, families, figures, page, report  # noqa: E402  # only where Triton compiles

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
    report.VERSION not in figures.read(), reason=f"needs figures of Triton {report.VERSION}: report --record"
)
@pytest.mark.parametrize(("name", "target"), CASES)
def test_no_figure_grows(name, target):
    found = report.summaries({name: [each for each, _ in report.family(name, target)]})
    assert figures.grown(found, figures.recorded(report.VERSION, target)) == []


@pytest.mark.exhaustive
@pytest.mark.skipif(not OLDER.exists(), reason="needs Triton 3.6 beside .venv: make aot-report")
@pytest.mark.parametrize("target", report.TARGETS)
def test_no_figure_grows_with_the_older_triton(target):
    path = os.pathsep.join([str(ROOT), str(OLDER)])
    command = [sys.executable, "-m", "tests.tools.aot.report", "--check", "--target", target]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_no_figure_of_cuda_grows(target):
    compilers.needed()
    found = report.summaries(report.of_cuda("", target)[0])
    assert set(found) == set(cuda.FAMILIES)
    assert figures.grown(found, figures.recorded("cuda", target)) == []


KNOWN = {**dict.fromkeys(figures.HELD, 5), "issue": 7}


@pytest.mark.parametrize("key", figures.HELD)
def test_a_held_figure_that_grew_is_named(key, monkeypatch, tmp_path):
    monkeypatch.setattr(figures, "RECORDED", tmp_path / "figures.json")
    figures.record({"a": KNOWN}, "3.7", "sm_90", grow=False)
    worse, better = ({**KNOWN, key: KNOWN[key] + step, "issue": 8} for step in (1, -1))
    assert figures.grown({"a": better}, figures.recorded("3.7", "sm_90")) == []
    assert figures.grown({"b": KNOWN}, figures.recorded("3.7", "sm_90")) == ["b: no record"] * len(figures.HELD)
    assert figures.grown({"a": worse}, figures.recorded("3.7", "sm_90")) == [f"a: {key} is 6, recorded 5"]
    for grow, expected in ((False, 5), (True, 6)):
        figures.record({"a": worse}, "3.7", "sm_90", grow=grow)
        found = figures.recorded("3.7", "sm_90")["a"]
        assert (found[key], found["issue"], found["first"]) == (expected, 8, 5)


def test_the_main_kernels_have_a_record():
    """A new family without figures would be held to nothing."""
    targets = {"3.6": report.TARGETS, "3.7": report.TARGETS, "cuda": ("sm_80", "sm_90")}
    every = figures.read()
    assert {compiler: set(every[compiler]) for compiler in every} == {key: set(value) for key, value in targets.items()}
    for compiler, by_target in every.items():
        expected = set(cuda.FAMILIES if compiler == "cuda" else families.FAMILIES)
        assert all(set(known) == expected for known in by_target.values())


def test_the_page_says_what_is_recorded():
    text = page.PAGE.read_text()
    assert text == page.rewritten(text), "run python -m tests.tools.aot.page"
