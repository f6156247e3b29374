"""The unattended run without a GPU: its parts and minutes, what dies in it, and a dry run of the whole command."""

import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import bench_overhead, worth
from crate_kernels import cli
from crate_kernels._native import extension
from crate_kernels.bench import rows
from tests.gpu import __main__ as gpu
from tests.gpu import lines, processes, smoke, suite

triton = pytest.importorskip("triton", reason="its dry run interprets Triton's kernels: pip install triton")

from tests.gpu import timing  # noqa: E402

SECONDS = {part.name: 60 * part.minutes for part in gpu.PARTS}
DONE, FAILED, INCOMPLETE, BROKEN = processes.DONE, processes.FAILED, processes.INCOMPLETE, processes.BROKEN


class Clock:
    """Time that passes only while a part runs."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now


@pytest.fixture
def watch(monkeypatch):
    found = Clock()
    monkeypatch.setattr(gpu, "time", found)
    return found


def called(folder, watch, minutes, needs):
    """Make one call of a run whose parts need so many seconds; return the seconds of each part."""
    allotted, state = [], gpu.State(folder)

    def run(part, seconds):
        allotted.append((part.name, round(seconds)))
        taken = min(needs[part.name], seconds)
        watch.now += taken
        needs[part.name] -= taken
        return DONE if needs[part.name] <= 0 else INCOMPLETE

    gpu.turns(state, watch.now + 60 * minutes, run)
    return allotted


def test_each_part_has_its_minutes_and_the_rest_goes_to_the_last(tmp_path, watch):
    needs = {"smoke": 80, "suite": 10_000, "probes": 40, "host": 50, "tuning": 10_000, "ncu": 45, "timing": 10_000}
    expected = [
        ("smoke", 90),
        ("suite", 240),
        ("probes", 45),
        ("host", 30),
        ("tuning", 135),
        ("ncu", 45),
        ("timing", 930),
    ]
    assert called(tmp_path, watch, 25, needs) == expected


def test_a_shorter_call_resumes_where_the_last_one_ended(tmp_path, watch):
    needs = {"smoke": 80, "suite": 10_000, "probes": 20, "host": 10, "tuning": 120, "ncu": 10, "timing": 300}
    calls = [called(tmp_path, watch, 5, needs) for _ in range(3)]
    assert calls == [
        [("smoke", 90), ("suite", 220)],
        [("suite", 20), ("probes", 45), ("host", 30), ("tuning", 135), ("ncu", 45), ("timing", 120)],
        [("timing", 300), ("suite", 120)],  # all had their minutes: what is left goes to the first that needs it
    ]


def test_a_part_that_failed_is_complete(tmp_path, watch):
    started = []
    gpu.turns(gpu.State(tmp_path), watch.now + 600, lambda part, seconds: started.append(part.name) or FAILED)
    assert started == list(SECONDS)
    assert {own["status"] for own in gpu.State(tmp_path).parts.values()} == {"failed"}


def test_a_part_that_could_not_begin_goes_again_and_fails_the_run(tmp_path, monkeypatch):
    turns = []

    def side_by_side(commands, deadline, start, grace):
        turns.append(commands[0](100.0)[1])
        return BROKEN if "suite" in turns[-1] else DONE

    monkeypatch.setattr(processes, "side_by_side", side_by_side)
    for count in (2, 4):
        assert gpu.main(["--minutes", "25", "--out", str(tmp_path), "--dry-run"]) == 1
        assert turns.count("tests.gpu.suite") == count
    assert turns.count("tests.gpu.smoke") == 1


def process(code):
    return lambda left: ["-c", code.replace("LEFT", str(left))]


ENDS = {"aborts": "os.abort()", "raises": "1 / 0", "hangs": "dump_traceback_later(0.01, exit=True) or time.sleep(60)"}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_a_process_that_dies_is_started_again(end, tmp_path):
    path = tmp_path / "starts"
    dying = (
        "import os, time; from faulthandler import dump_traceback_later; "
        f"open({str(path)!r}, 'a').write('x'); len(open({str(path)!r}).read()) < 3 and ({end})"
    )
    deadline = time.monotonic() + 60
    commands = [process(dying), process("raise SystemExit(3)")]
    assert processes.side_by_side(commands, deadline, processes.start) == INCOMPLETE
    assert path.read_text() == "xxx"


def test_what_does_not_end_is_ended_with_all_that_it_started(tmp_path):
    path = tmp_path / "child"
    code = (
        "import subprocess, sys, time; "
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
        f"open({str(path)!r}, 'w').write(str(p.pid)); time.sleep(60)"
    )

    def start(arguments):
        process = processes.start(arguments, apart=True)
        while not (path.exists() and path.read_text()):
            time.sleep(0.01)
        return process

    assert processes.side_by_side([process(code)], time.monotonic(), start, grace=0.0) == INCOMPLETE
    child = int(path.read_text())
    for _ in range(100):  # until its new parent has taken notice
        state = subprocess.run(["ps", "-o", "stat=", "-p", str(child)], capture_output=True, text=True).stdout
        if not state.strip() or state.startswith("Z"):
            return
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    pytest.fail("what it started is still there")


def test_an_item_that_ends_its_process_twice_is_lost(tmp_path):
    path = tmp_path / "results.jsonl"
    for item, outcome in itertools.product("ab", ("started",)):
        lines.append(path, item=item, outcome=outcome)
    lines.append(path, item="b", outcome="passed")
    assert {name: line["outcome"] for name, line in lines.results(path).items()} == {"b": "passed"}
    lines.append(path, item="a", outcome="started")
    with path.open("a") as file:
        file.write('{"item": "c", "outc')  # cut off
    assert {name: line["outcome"] for name, line in lines.results(path).items()} == {"a": "lost", "b": "passed"}


def item(name, drawn=False):
    return SimpleNamespace(nodeid=name, obj=SimpleNamespace(is_hypothesis_test=drawn))


NAMES = (
    "tests/ops/test_strides.py::test_a[bf16-triton]",
    "tests/ops/mssa/test_public.py::test_b[fp32-cpp-cuda]",
    "tests/ops/mssa/test_public.py::test_b[bf16-cpp-cuda]",
    "tests/ops/tssa/test_gpu.py::test_c[torch.float32-triton]",
    "tests/ops/tssa/test_gpu.py::test_c[torch.bfloat16-triton]",
)
CONFIG = SimpleNamespace(hook=SimpleNamespace(pytest_deselected=lambda items: None))


def chosen(worker):
    items = [*map(item, NAMES), item("tests/ops/test_fuzz.py::test_d[triton]", drawn=True)]
    worker.pytest_collection_modifyitems(CONFIG, items)
    return [one.nodeid for one in items]


def test_the_most_telling_tests_come_first_and_drawn_ones_not_at_all(tmp_path):
    assert chosen(suite.Worker(tmp_path / "suite.jsonl", 1, 1, 60)) == [NAMES[n] for n in (4, 3, 2, 1, 0)]
    parts = [chosen(suite.Worker(tmp_path / "suite.jsonl", n, 2, 60)) for n in (1, 2)]
    assert parts == [[NAMES[n] for n in (4, 2, 0)], [NAMES[n] for n in (3, 1)]]


def test_a_test_that_lacked_memory_runs_again_alone(tmp_path, monkeypatch):
    path, died = tmp_path / "suite.jsonl", []
    worker = suite.Worker(path, 1, 2, 60)
    monkeypatch.setattr(suite, "usable", lambda: False)
    monkeypatch.setattr(suite.os, "_exit", died.append)
    worker.save(NAMES[0], {"outcome": "failed", "error": "torch.OutOfMemoryError: CUDA out of memory"})
    worker.save(NAMES[1], {"outcome": "passed"})
    assert NAMES[0] not in chosen(worker)
    alone = suite.Worker(path, 1, 1, 60, alone=True)
    assert chosen(alone) == [NAMES[0]]
    alone.save(NAMES[0], {"outcome": "failed", "error": "torch.OutOfMemoryError: CUDA out of memory"})
    assert lines.results(path)[NAMES[0]]["outcome"] == "failed"
    assert died == [70, 70]  # a process whose device is lost ends


@pytest.mark.parametrize("broken", [True, False], ids=["broken", "whole"])
def test_a_file_that_cannot_be_imported_stops_no_other(broken, tmp_path, monkeypatch):
    (tmp_path / f"test_{broken}.py").write_text("import there_is_no_such_module\n" if broken else "")
    (tmp_path / f"test_beside_{broken}.py").write_text("def test_good():\n    pass\n")
    monkeypatch.setattr(suite, "DRY", (str(tmp_path), "good"))
    monkeypatch.chdir(processes.ROOT)
    path = tmp_path / "suite.jsonl"
    for _ in range(2):
        assert suite.work(path, 1, 1, 60, True, False) == (BROKEN if broken else DONE)
        assert [line["outcome"] for line in lines.results(path).values()] == ["passed"]


def test_the_benchmarks_in_order_exist():
    jobs = timing.jobs(worth.ORDER)
    found = list(dict.fromkeys((what.name, dtype, direction) for _, (what, dtype, direction, _) in jobs))
    assert found == list(worth.ORDER)
    assert len(found) in range(70, 91)


def test_rows_are_kept_and_one_that_does_not_end_is_tried_twice(tmp_path):
    path = tmp_path / "bench.json"

    def opened():
        return timing.File(path, torch.device("cpu"), lambda: {"device": "none"})

    def row(provider):
        return rows.BenchRow("overhead", "op", "case", "fp32", "forward", provider)

    def dies(row, device, timer):
        raise KeyboardInterrupt

    def refused(row, device, timer):
        raise RuntimeError("no kernel image")

    for reason in (timing.ONCE, timing.TWICE):
        with pytest.raises(KeyboardInterrupt):
            opened().timed(row("a"), dies)
        assert [one.skipped for one in rows.read(path).rows] == [reason]
    file = opened()
    file.timed(row("a"), dies)  # not again
    file.timed(row("b"), refused)
    file.timed(row("c"), lambda row, device, timer: row.seconds.append(1.0))
    assert [(one.provider, one.skipped) for one in rows.read(path).rows] == [
        ("a", timing.TWICE),
        ("b", "RuntimeError: no kernel image"),
        ("c", ""),
    ]


def test_no_row_begins_after_the_deadline(tmp_path):
    file = timing.File(tmp_path / "bench.json", torch.device("cpu"), lambda: {"device": "none"})
    assert timing.run(file, timing.jobs(timing.DRY), time.monotonic() - 1) == INCOMPLETE
    assert file.results.rows == []
    assert {benchmark for benchmark, _ in timing.jobs(timing.DRY)} == {bench_overhead.test_overhead}


def test_the_extension_is_compiled_beside_the_first_part_and_the_others_wait(tmp_path, monkeypatch):
    """Without it their later calls would be no repetitions. A process compiles: it is ended in the end."""
    happened, ended, turns = [], [], []
    compiling = SimpleNamespace(wait=lambda seconds: happened.append("ready") if "ready" not in happened else None)
    monkeypatch.setattr(processes, "start", lambda arguments, **options: happened.append(arguments) or compiling)
    monkeypatch.setattr(processes, "end", ended.append)

    def side_by_side(commands, deadline, start, grace):
        turns.append([str(word) for word in commands[0](100.0)])
        happened.append(turns[-1][1].removeprefix("tests.gpu."))
        return DONE

    monkeypatch.setattr(processes, "side_by_side", side_by_side)
    arguments = ["--minutes", "25", "--out", str(tmp_path), "--workers", "3", "--candidates", "some.json"]
    assert gpu.main(arguments) == DONE
    first, *others = SECONDS
    assert happened == [["-c", gpu.BUILD], first, "ready", *others]
    assert ended == [compiling]
    assert turns[1][-2:] == ["--workers", "3"]
    assert turns[others.index("tuning") + 1][-1].endswith("some.json")


def test_what_does_not_compile_in_time_ends_the_call(tmp_path, monkeypatch):
    def wait(seconds):
        raise subprocess.TimeoutExpired("build", seconds)

    ended, clock = [], itertools.chain([0.0] * 5, itertools.repeat(1e6))
    monkeypatch.setattr(processes, "start", lambda arguments, **options: SimpleNamespace(wait=wait))
    monkeypatch.setattr(processes, "end", ended.append)
    monkeypatch.setattr(processes, "side_by_side", lambda *arguments, **options: DONE)
    monkeypatch.setattr(gpu.time, "monotonic", lambda: next(clock))
    assert gpu.main(["--minutes", "25", "--out", str(tmp_path)]) == INCOMPLETE
    assert [own["status"] for own in gpu.State(tmp_path).parts.values()] == ["done", "", "", "", "", "", ""]
    assert len(ended) == 1


@pytest.mark.parametrize("part", [smoke, suite], ids=["smoke", "suite"])
def test_processes_side_by_side_share_a_part(part, tmp_path, monkeypatch):
    commands = []
    monkeypatch.setattr(processes, "side_by_side", lambda every, *_: commands.extend(one(7.0) for one in every) or DONE)
    assert part.main(["--out", str(tmp_path), "--seconds", "9", "--workers", "2", "--dry-run"]) == DONE
    for number, words in enumerate(commands, 1):
        words_passed = [str(word) for word in words]
        assert words_passed[:2] == ["-m", part.__name__]
        assert "--dry-run" in words_passed
        for name, value in {"--worker": number, "--workers": 2, "--seconds": 7.0, "--out": tmp_path}.items():
            assert words_passed[words_passed.index(name) + 1] == str(value)
    assert len(commands) == 2


class Device:
    """Stands for torch.cuda."""

    def __init__(self, lost):
        self.lost = lost

    def is_available(self):
        return True

    def synchronize(self):
        if self.lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize("lost", [True, False])
def test_a_lost_device_is_noticed(lost, monkeypatch):
    monkeypatch.setattr(torch, "cuda", Device(lost))
    assert suite.usable() is not lost


@pytest.mark.parametrize("arguments", [["--minutes", "0"], ["--minutes", "-3"]])
def test_minutes_that_are_none_are_refused(arguments, tmp_path, capsys):
    with pytest.raises(SystemExit):
        gpu.parse(["--out", str(tmp_path), *arguments])
    assert "--minutes must be positive, got" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_the_whole_command_runs_dry(tmp_path):
    command = [sys.executable, "-m", "tests.gpu", "--dry-run", "--minutes", "3", "--out", str(tmp_path)]
    for _ in range(2):  # the second time nothing is left
        done = subprocess.run(command, cwd=processes.ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == DONE, done.stdout + done.stderr
    assert done.stdout.count("minutes at most") == 0
    state = json.loads((tmp_path / "progress.json").read_text())
    assert {own["status"] for own in state.values()} == {"done"}
    assert len(list(tmp_path.iterdir())) <= 9
    assert "suite: done" in done.stdout
    assert {row.provider for row in rows.read(tmp_path / "bench.json").rows} == set(bench_overhead.overhead.PROVIDERS)
    assert math.isfinite(json.loads((tmp_path / "tuning-log.jsonl").read_text().splitlines()[-1])["seconds"])


def test_only_the_parts_that_are_asked_for_run(tmp_path, monkeypatch):
    happened = []
    monkeypatch.setattr(processes, "start", lambda *_, **__: SimpleNamespace(wait=lambda seconds: None))
    monkeypatch.setattr(processes, "end", lambda process: None)
    monkeypatch.setattr(processes, "side_by_side", lambda every, *_, **__: happened.append(every[0](1.0)[1]) or DONE)
    assert gpu.main(["--out", str(tmp_path), "--only", "timing", "--only", "suite"]) == DONE
    assert happened == ["tests.gpu.suite", "tests.gpu.timing"]


@pytest.mark.parametrize("carried", [True, False])
def test_an_extension_that_was_carried_along_is_not_compiled_again(carried, monkeypatch):
    built = []
    monkeypatch.setattr(extension, "PATH", Path("_cpu.so") if carried else None)
    monkeypatch.setattr(cli, "main", lambda arguments: built.append(arguments) or 0)
    exec(gpu.BUILD, {})
    assert built == ([] if carried else [["build"]])


WITHOUT = """import sys, pytest
class Missing:
    @pytest.hookimpl(tryfirst=True)
    def pytest_load_initial_conftests(self):
        sys.modules["hypothesis"] = None
sys.exit(pytest.main(sys.argv[1:], plugins=[Missing()]))
"""


def test_operator_tests_are_collected_without_hypothesis():
    folder = processes.ROOT / "tests" / "ops"
    drawn = [str(path) for path in folder.rglob("*.py") if "hypothesis" in path.read_text()]
    assert drawn
    named = [f"tests/ops/{op}/test_native.py" for op in ("mssa", "tssa")]
    # Assertions are left as they are: rewriting them takes a third of the time, and none is met.
    options = ("--collect-only", "--assert=plain", *suite.OPTIONS, "-p", "no:hypothesispytest", *named, *drawn)
    command = [sys.executable, "-c", WITHOUT, *options]
    done = subprocess.run(command, cwd=processes.ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    for op in ("mssa", "tssa"):
        assert f"tests/ops/{op}/test_native.py::" in done.stdout
    assert "tests/ops/test_fuzz.py::" not in done.stdout
