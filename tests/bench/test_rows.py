"""Rows of results: their derived facts, their files, and what describes a machine."""

import json
import math
import subprocess
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from crate_kernels.bench import clock, rows
from crate_kernels.bench.rows import Results
from tests.bench.test_results import MACHINE, drawn, row


@pytest.fixture
def results():
    return Results(dict(MACHINE), [row("eager", drawn(4e-3)), row("cpp", drawn(1e-3)), row("sdpa", drawn(2e-3), 256)])


def test_rates_and_shares_of_a_row(results):
    one = replace(results.rows[1], unit="images", amount=8.0, error=1e-6, times_eager=0.5, share=0.25)
    facts = rows.facts(one, results)
    assert facts["images_per_s"] == pytest.approx(8 / 0.98e-3)
    assert facts["percent_of_copy"] == pytest.approx(100 * 1e6 / 0.98e-3 / 1e10)
    assert facts["peak_mib"] == pytest.approx(128**2 / 2**20)
    assert facts["median_us"] == pytest.approx(1000)
    assert facts["calls_us"] == pytest.approx(980)
    assert (facts["error"], facts["error_over_eager"], facts["error_over_tolerance"]) == (1e-6, 0.5, 0.25)
    many = rows.facts(replace(one, seconds=[float(n) for n in range(1, 102)]), results)
    assert (many["p20_us"], many["median_us"], many["p80_us"]) == (21e6, 51e6, 81e6)
    bare = rows.facts(replace(one, flops=None, bytes=None, unit="", peak_bytes=None), results)
    assert not bare.keys() & {"tflops", "percent_of_product", "gb_per_s", "percent_of_copy", "images_per_s"}
    assert bare["peak_mib"] is None


def test_a_row_without_times_has_no_number():
    empty = row("eager", [])
    numbers = [empty.time, empty.median, empty.percentile(20), *map(empty.on, rows.CLOCKS)]
    assert all(map(math.isnan, numbers))
    assert rows.facts(replace(empty, skipped="not here"), Results(dict(MACHINE), [empty])) == {"skipped": "not here"}


def test_the_row_of_the_default_choice(results):
    names = ["composite", "cpp", "triton", "default"]
    found = [row("eager", drawn(1.0))]
    for name in names:
        found.append(row(name, drawn(1.0)))
        best = Results(MACHINE, found).best(found[0])
        assert best is not None
        assert best.provider == name
    found[-1] = row("default", [], skipped="out of memory")
    assert Results(MACHINE, found).best(found[0]) is found[3]
    assert Results(MACHINE, found[:1]).best(found[0]) is None
    others = Results(MACHINE, [row("cpp", [2.0]), row("eager", [6.0]), row("sdpa", []), row("eager", [9.0], 256)])
    assert others.speedups(others.rows[0]) == {"eager": 3.0}
    assert others.rows[0].key == "mssa/mssa/n128/fp32/both/cpp"
    assert row("cpp", [], sweep="seqlen").key == "mssa/seqlen/mssa/n128/fp32/both/cpp"


def test_shards_of_one_device_are_read_as_one(results, tmp_path):
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    rows.write(paths[0], Results(MACHINE | {"git": "first"}, results.rows[:2]))
    rows.write(paths[1], Results(MACHINE | {"git": "second"}, results.rows[2:]))
    found = rows.read_all(paths)
    assert [each.key for each in found.rows] == [each.key for each in results.rows]
    assert found.machine["git"] == "first"
    rows.write(paths[1], Results(MACHINE | {"device": "another"}, []))
    with pytest.raises(ValueError, match=r"b.json is of another, .*a.json of a CPU"):
        rows.read_all(paths)
    with pytest.raises(ValueError, match="no file of benchmark results was given"):
        rows.read_all([])


def test_a_file_has_a_line_a_row_without_what_is_empty(results, tmp_path):
    path = tmp_path / "results.json"
    rows.write(path, Results({"device": "a", "git": None}, [row("cpp", [1 / 3]), row("eager", [])]))
    first, *lines = path.read_text().splitlines()
    assert (first, lines[0]) == ("{", ' "machine": {"device": "a"},')
    assert [json.loads(line.rstrip(",")).get("seconds") for line in lines[2:4]] == [[0.33333], None]
    assert "amount" in lines[2]
    assert "skipped" not in lines[2]


def test_what_describes_a_machine(monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.setattr(clock, "product_flops", lambda dtype, device: {"16": 2.0, "32": 1.0}[str(dtype)[-2:]])
    monkeypatch.setattr(clock, "copy_bytes", lambda device: 7.0)
    found = rows.machine(cpu, ["fp32", "bf16"])
    assert found["product_flops"] == {"fp32": 1.0, "bf16": 2.0}
    assert list(found) == [
        "device", "gpu", "processor", "torch", "triton", "cuda", "python", "crate_kernels", "git", "product_flops",
        "copy_bytes",
    ]  # fmt: skip
    assert (found["copy_bytes"], found["gpu"], found["torch"]) == (7.0, False, torch.__version__)
    assert found["device"].endswith(
        f" CPU, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    )
    assert rows.installed("no-such-package") is None
    assert rows.installed("pytest") == pytest.__version__
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU of {device}")
    gpu = torch.device("cuda", 1)
    assert rows.device_name(gpu) == "GPU of cuda:1"
    assert rows.machine(gpu, [])["gpu"] is True


@pytest.mark.parametrize(("changed", "commit"), [(0, "abc123"), (1, "abc123+")], ids=["clean", "changed"])
def test_the_commit_of_a_clone(changed, commit, monkeypatch):
    def git(command, **options):
        if "rev-parse" in command:
            return SimpleNamespace(stdout="abc123\n", returncode=0)
        return SimpleNamespace(returncode=changed)

    monkeypatch.setattr(rows.subprocess, "run", git)
    assert rows._revision() == commit


@pytest.mark.parametrize("error", [FileNotFoundError("git"), subprocess.CalledProcessError(128, "git")])
def test_outside_of_a_clone_there_is_no_commit(error, monkeypatch):
    def git(*args, **options):
        raise error

    monkeypatch.setattr(rows.subprocess, "run", git)
    assert rows._revision() is None
