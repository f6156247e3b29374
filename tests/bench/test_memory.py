"""The memory of a call, and the limit beyond which an allocation raises."""

import os
from pathlib import Path

import pytest
import torch

from crate_kernels.bench import memory

CPU = torch.device("cpu")
GIB = 1 << 30
NONE = -1  # resource.RLIM_INFINITY
LIMITS = {  # what the containers' files say, the limit before, the memory that counts or the limit during
    "machine": ((None, None), (NONE, NONE), 16 * GIB, None),
    "container": ((f"{4 * GIB}\n", None), (NONE, NONE), 4 * GIB, None),
    "container v1": ((None, f"{4 * GIB}\n"), (NONE, NONE), 4 * GIB, None),
    "container without a limit": (("max\n", f"{(1 << 63) - 4096}\n"), (NONE, NONE), 16 * GIB, None),
    "hard limit": ((None, None), (NONE, GIB), None, GIB),
    "soft limit": ((None, None), (GIB // 2, GIB), None, GIB // 2),
}


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc/self/statm: run on Linux")
@pytest.mark.parametrize("refused", [False, True], ids=["taken", "refused"])
@pytest.mark.parametrize(("files", "before", "available", "during"), LIMITS.values(), ids=LIMITS)
def test_memory_is_limited_to_what_this_process_may_use(
    files, before, available, during, refused, tmp_path, monkeypatch
):
    import resource

    paths, limits, used = (tmp_path / "v2", tmp_path / "v1"), [], []
    for path, text in zip(paths, files, strict=True):
        if text is not None:
            path.write_text(text)

    def get(kind):
        used.append(int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE"))
        return before

    def set_(kind, pair):
        limits.append(pair)
        if refused or (NONE not in pair and pair[0] > pair[1]):
            raise ValueError("not allowed to raise maximum limit")

    sysconf = os.sysconf
    monkeypatch.setattr(memory, "_CONTAINER", paths, raising=False)
    monkeypatch.setattr(
        os, "sysconf", lambda name: 16 * GIB // sysconf("SC_PAGE_SIZE") if name == "SC_PHYS_PAGES" else sysconf(name)
    )
    monkeypatch.setattr(resource, "getrlimit", get)
    monkeypatch.setattr(resource, "setrlimit", set_)
    ran = False
    with memory.limited(CPU):
        ran = True
    assert ran
    (soft, hard), after = limits
    assert (hard, after) == (before[1], before)
    assert soft == during or abs(soft - used[0] - 0.8 * available) < GIB / 16


def test_without_a_report_of_linux_there_is_no_resident_memory(monkeypatch):
    called = []
    monkeypatch.setattr(memory, "_status_bytes", lambda field: {}[field] if called else 1)
    with pytest.raises(KeyError):
        memory.resident_bytes(lambda: called.append(1))  # another fault is not hidden
    monkeypatch.setattr(memory.re, "search", lambda *_: None)
    monkeypatch.undo()
    monkeypatch.setattr(memory.Path, "write_text", lambda *_: (_ for _ in ()).throw(OSError("read-only")))
    assert memory.resident_bytes(lambda: None) is None


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs /proc/self/clear_refs: run on Linux")
def test_resident_memory_is_what_a_call_adds():
    size = 64 << 20
    found = memory.resident_bytes(lambda: torch.ones(size, dtype=torch.int8))
    if found is None:
        pytest.skip("needs a writable /proc/self/clear_refs")
    assert 0.9 * size < found < 2 * size  # the counters lag a little
    assert memory.resident_bytes(lambda: None) < size // 4


def test_memory_of_a_gpu_is_not_limited(monkeypatch):
    monkeypatch.setattr(memory, "_available", lambda machine: pytest.fail("asked"))
    with memory.limited(torch.device("cuda")):
        pass


@pytest.mark.parametrize(
    ("error", "exhausted"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("another"), False),
    ],
)
def test_what_means_that_memory_ran_out(error, exhausted):
    assert memory.is_exhaustion(error) is exhausted


def test_memory_of_a_gpu_is_the_peak_beyond_what_was_there(monkeypatch):
    done = []
    stand_ins = {
        "synchronize": None,
        "reset_peak_memory_stats": None,
        "memory_allocated": 5,
        "max_memory_allocated": 12,
    }
    for name, value in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, name=name, value=value: done.append(name) or value)
    assert memory.peak_bytes(lambda: done.append("call"), torch.device("cuda")) == 7
    assert done[1:] == ["reset_peak_memory_stats", "memory_allocated", "call", "synchronize", "max_memory_allocated"]
