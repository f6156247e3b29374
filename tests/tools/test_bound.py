"""Commands that start processes and keep a log: their processes end with them, and one run at a time has a log."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from crate_kernels._core import files
from tests import fuzz
from tests.apart import cells
from tests.tools import owning

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere children live on: run on Linux")
# Starts a process that starts another, with all three alive until they are ended.
STARTS = {
    "tests.tools.bound": "import subprocess as s; from tests.tools import bound; s.Popen(bound.command('-c', CODE))",
    "tests.gpu.processes": "from tests.gpu import processes; processes.start(['-c', CODE], apart=True)",
}
TREE = """
import os, sys, time
DEPTH = {depth}
open({path!r}, "a").write(f"{{os.getpid()}} ")
if DEPTH:
    CODE = open({code!r}).read().format(depth=DEPTH - 1, path={path!r}, code={code!r})
    {start}
time.sleep(60)
"""


def alive(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def until(true, seconds=60):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_what_is_started_ends_with_what_started_it(start, tmp_path):
    path, code = tmp_path / "processes", tmp_path / "code.py"
    path.touch()
    code.write_text(TREE.replace("{start}", start))
    script = code.read_text().format(depth=2, path=str(path), code=str(code))
    first = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT)
    try:
        until(lambda: len(path.read_text().split()) == 3)
        others = path.read_text().split()[1:]
        first.send_signal(signal.SIGKILL)
        first.wait()
        try:
            until(lambda: not any(map(alive, others)), seconds=5)
        finally:
            for process in filter(alive, others):
                os.kill(int(process), signal.SIGKILL)
    finally:
        first.kill()
        first.wait()


def test_a_process_that_is_bound_is_this_python(tmp_path):
    from tests.tools import bound

    code = "import os, sys, pytest; print(os.getpid(), sys.executable, *sys.argv[1:])"
    child = subprocess.Popen(bound.command("-c", code, "one", 2), stdout=subprocess.PIPE, text=True)
    assert child.communicate()[0].split() == [str(child.pid), sys.executable, "one", "2"]


COMMANDS = {
    "cells": (cells.main, lambda folder: ["--log", folder / "log.jsonl"], "log.jsonl"),
    "fuzz": (fuzz.main, lambda folder: ["--out", folder, "--calls", "1"], ""),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_second_run_is_kept_from_a_log(name, tmp_path, monkeypatch, capsys, threads):
    threads(1)
    main, arguments, owned = COMMANDS[name]
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a process was started"))
    place = tmp_path / owned
    with owning.another(place) as other:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments(tmp_path))])
        assert main() == 1
        assert f"{place} is in use by process {other.pid}" in capsys.readouterr().out
    with files.owned(place):
        pass
