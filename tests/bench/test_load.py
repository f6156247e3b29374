"""What is free of a machine, and that no command uses more of it."""

import os

import pytest
import torch

from crate_kernels.bench import load
from crate_kernels.bench.load import Load
from crate_kernels.cli import main
from crate_kernels.experiments.demo import job as demo_job
from crate_kernels.experiments.denoise import job as denoise_job

BEFORE = """cpu  1000 0 1000 8000 0 0 0 0 0 0
cpu0 100 0 100 800 0 0 0 0 0 0
cpu1 100 0 100 800 0 0 0 0 0 0
cpu2 100 0 100 800 0 0 0 0 0 0
cpu10 100 0 100 800 0 0 0 0 0 0
intr 123 4 5
"""


def after(*cores):
    """Return the same file 100 ticks later: of each core (user, nice, system, idle, waiting, irq, softirq, steal)."""
    lines = [
        f"cpu{index} " + " ".join(str(a + b) for a, b in zip((100, 0, 100, 800, 0, 0, 0, 0), ticks, strict=True))
        for index, ticks in zip((0, 1, 2, 10), cores, strict=True)
    ]
    return "\n".join(["cpu  9 9 9 9 9 9 9 9 9 9", *(f"{line} 0 0" for line in lines), "intr 123 4 5"])


IDLE, BUSY, MIXED = (0, 0, 0, 100, 0, 0, 0, 0), (100, 0, 0, 0, 0, 0, 0, 0), (5, 5, 5, 60, 10, 5, 5, 5)
LOOKS = {
    "all free": ((IDLE, IDLE, IDLE, IDLE), {0, 1, 2, 10}, "max 100000", Load(4, 4.0)),
    "one busy": ((IDLE, BUSY, IDLE, IDLE), {0, 1, 2, 10}, "max 100000", Load(4, 3.0)),
    "a core of ours": ((IDLE, BUSY, BUSY, IDLE), {0, 10}, "max 100000", Load(2, 2.0)),
    "the others'": ((IDLE, BUSY, BUSY, IDLE), {1, 2}, "max 100000", Load(2, 0.0)),
    "waiting for a disk is free, a hypervisor is not": ((MIXED, IDLE, IDLE, IDLE), {0}, "max 100000", Load(1, 0.7)),
    "a quota": ((IDLE, IDLE, IDLE, IDLE), {0, 1, 2, 10}, "150000 100000", Load(1.5, 1.5)),
    "a quota beside others": ((BUSY, BUSY, BUSY, IDLE), {0, 1, 2, 10}, "200000 100000", Load(2, 1.0)),
    "a quota of more": ((IDLE, BUSY, IDLE, IDLE), {0, 1}, "800000 100000", Load(2, 1.0)),
    "no quota file": ((IDLE, IDLE, IDLE, IDLE), {0, 1, 2, 10}, None, Load(4, 4.0)),
    "a core without ticks": ((IDLE, (0,) * 8, IDLE, IDLE), {0, 1}, "max 100000", Load(2, 2.0)),
}


@pytest.mark.parametrize(("ticks", "mine", "quota", "expected"), LOOKS.values(), ids=LOOKS)
def test_free_cores_are_those_that_nobody_used(ticks, mine, quota, expected, tmp_path, monkeypatch):
    (tmp_path / "stat").write_text(BEFORE)
    if quota is not None:
        (tmp_path / "quota").write_text(quota + "\n")
    monkeypatch.setattr(load, "_STAT", tmp_path / "stat")
    monkeypatch.setattr(load, "_QUOTA", tmp_path / "quota")
    monkeypatch.setattr(load.os, "sched_getaffinity", lambda _: mine, raising=False)
    monkeypatch.setattr(load.time, "sleep", lambda _: (tmp_path / "stat").write_text(after(*ticks)))
    found = load.measure()
    assert found.cores == expected.cores
    assert found.free == pytest.approx(expected.free)
    assert found.busy == expected.busy


def test_without_proc_the_load_average_has_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(load, "_STAT", tmp_path / "absent")
    monkeypatch.setattr(load, "_QUOTA", tmp_path / "absent")
    monkeypatch.setattr(load.os, "sched_getaffinity", lambda _: {0, 1, 2}, raising=False)
    for average, free in ((0.5, 2.5), (7.0, 0.0)):
        monkeypatch.setattr(load.os, "getloadavg", lambda average=average: (average, 0.0, 0.0), raising=False)
        assert load.measure() == Load(3, free)
    monkeypatch.delattr(load.os, "getloadavg")
    assert load.measure() == Load(3, 3.0)


@pytest.mark.skipif(not os.path.exists("/proc/stat"), reason="needs /proc/stat: run on Linux")
def test_this_machine_is_looked_at():
    found = load.measure(0.05)
    assert 0 <= found.free <= found.cores <= os.cpu_count()


THREADS = {
    "none free": (0.0, 1),
    "half a core": (0.5, 1),
    "one and a half": (1.5, 2),
    "nearly-all": (3.6, 4),
    "all": (4.0, 4),
}


@pytest.mark.parametrize(("free", "expected"), THREADS.values(), ids=THREADS)
def test_threads_are_as_many_as_free_cores(free, expected, threads):
    threads(4)
    said = []
    load.limit_threads(Load(4, free), said.append)
    assert torch.get_num_threads() == expected
    number = "1 thread" if expected == 1 else f"{expected} threads"
    line = f"{free} of 4 cores free, others are at work on this machine: {number} instead of 4, and all takes longer"
    assert said == ([line] if expected < 4 else [])


QUOTAS = {"idle": (2.0, "2 threads", "this process may use no more"), "busy": (1.0, "1 thread", "others are at work")}


@pytest.mark.parametrize(("free", "number", "reason"), QUOTAS.values(), ids=QUOTAS)
def test_a_quota_is_not_taken_for_others(free, number, reason, threads):
    threads(4)
    said = []
    load.limit_threads(Load(2.0, free), said.append)
    (line,) = said
    assert line.startswith(f"{free} of 2 cores free, {reason}")
    assert f": {number} instead of 4" in line


def test_what_the_user_set_is_not_raised(threads):
    threads(2)
    load.limit_threads(Load(8, 8.0), pytest.fail)
    assert torch.get_num_threads() == 2
    threads(1)
    load.share_cores(torch.device("cpu"), pytest.fail)


@pytest.mark.parametrize(("free", "busy"), [(4.0, False), (3.6, False), (3.5, True), (0.0, True)])
def test_a_machine_is_busy_from_half_a_core_on(free, busy):
    assert Load(4, free).busy == busy


@pytest.mark.parametrize(
    ("subcommand", "job"), [("demo", demo_job), ("denoise", denoise_job)], ids=["demo", "experiment"]
)
def test_what_takes_minutes_uses_free_cores_and_says_so(subcommand, job, tmp_path, monkeypatch, capsys, threads):
    used = []
    monkeypatch.setattr(load, "measure", lambda: Load(4, 1.0))
    monkeypatch.setattr(job, "run", lambda *args, **kwargs: used.append(torch.get_num_threads()) or 0)
    threads(4)
    assert main([subcommand, "--device", "cpu", "--output", str(tmp_path / "out")]) == 0
    assert used == [1]
    assert capsys.readouterr().out.startswith(
        "1.0 of 4 cores free, others are at work on this machine: 1 thread instead"
    )
