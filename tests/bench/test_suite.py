"""The benchmark suite itself: what it collects, what it writes, how it resumes."""

import json
import os
import subprocess
import sys

import pytest
import torch

from benchmarks import worth
from benchmarks.tables import ROOT
from crate_kernels.bench import rows

pytest.importorskip("pytest_benchmark", reason="needs pytest-benchmark: pip install '.[bench]'")


def suite(*arguments, folder=ROOT):
    command = [sys.executable, "-m", "pytest", ROOT / "benchmarks", "--bench-device", "cpu", "-q", *map(str, arguments)]
    # Own process: under pytest-xdist, pytest-benchmark times nothing.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    environment["PYTHONPATH"] = str(ROOT)
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def collected(*arguments):
    lines = suite("--collect-only", "-k", "tssa", *arguments).stdout.splitlines()
    return {line for line in lines if "::" in line}


@pytest.mark.exhaustive
def test_each_tier_is_a_part_of_the_next():
    quick, brief, full = (collected("--tier", tier) for tier in ("quick", "brief", "full"))
    assert quick < brief < full
    assert collected() == quick


@pytest.mark.exhaustive
def test_the_default_run_is_short():
    """135 rows took 120 s of processor time; each name in its list is that of a benchmark."""
    rows = [line for line in suite("--collect-only").stdout.splitlines() if "::" in line]
    assert len(rows) <= 140
    assert not any("compile" in line or "flex" in line or "backward" in line for line in rows)
    assert [name for name in worth._QUICK if not any(f"[{name}-" in line for line in rows)] == []


@pytest.mark.exhaustive
def test_rows_are_kept_where_no_file_is_named(tmp_path):
    arguments = ["--benchmark-only", "-k", "overhead-mssa and public", "--rootdir", ROOT, "-c", ROOT / "pyproject.toml"]
    file = tmp_path / "bench-output" / "results.json"
    for _ in range(2):  # the second run begins anew
        done = suite(*arguments, folder=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "rows: bench-output/results.json; --results bench-output/results.json resumes" in done.stdout
        assert [row.provider for row in rows.read(file).rows] == ["public", "public with gradient"]
    assert "SKIPPED [2]" in suite(*arguments, "-rs", "--results", file, folder=tmp_path).stdout
    late = suite(*arguments, "-rs", "--minutes", "1e-9", folder=tmp_path).stdout
    assert "time is up: --results bench-output/results.json resumes" in late


@pytest.mark.exhaustive
def test_rows_are_kept_and_not_timed_again(tmp_path):
    arguments = ["--benchmark-only", "-rs", "-k", "overhead-mssa", "--results", tmp_path / "results.json"]
    first = suite(*arguments, "--benchmark-json", tmp_path / "benchmark.json")
    assert first.returncode == 0, first.stdout + first.stderr
    results = rows.read(tmp_path / "results.json")
    assert [row.provider for row in results.rows] == ["raw op", "public", "public with gradient"]
    info = json.loads((tmp_path / "benchmark.json").read_text())["benchmarks"][1]["extra_info"]
    assert info["median_us"] == pytest.approx(1e6 * results.rows[1].median, rel=1e-3)
    assert info["speedup_over_raw op"] > 0
    assert {"device", "torch", "git", "product_flops", "copy_bytes"} <= info["machine"].keys()
    again = suite(*arguments)
    assert "SKIPPED [3]" in again.stdout
    assert "in the file of results already" in again.stdout
    assert [row.key for row in rows.read(tmp_path / "results.json").rows] == [row.key for row in results.rows]


def test_inductors_advice_to_round_products_is_no_error(monkeypatch):
    """It warns once a process where a GPU has TF32 and fp32 products are exact, as everything here is measured."""
    from torch._inductor import compile_fx

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    compile_fx._warn_tf32_disabled.__wrapped__()
