"""The command that fuzzes: it resumes, blames what a process died in, and says what came of all."""

import json
import subprocess
from types import SimpleNamespace

import pytest

from tests import fuzz


@pytest.fixture
def judged(monkeypatch):
    """Let every seed pass but 4, at which the process dies the first time; return those that were judged."""
    seen = []

    class Judging:
        def __enter__(self):
            return self.judge

        def __exit__(self, *error):
            return False

        def judge(self, seed):
            seen.append(seed)
            if seed == 4:
                raise KeyboardInterrupt
            return {"kind": "k", "status": "passed", "why": "", "ratio": seed / 10}, "text"

    def run(command, **options):
        words = command[command.index("tests.fuzz") + 1 :]
        try:
            return SimpleNamespace(returncode=fuzz.main(words))
        except KeyboardInterrupt:
            return SimpleNamespace(returncode=-9)

    monkeypatch.setattr(fuzz, "judging", lambda backend: Judging())
    monkeypatch.setattr(subprocess, "run", run)
    return seen


def test_what_a_process_dies_in_failed_and_the_same_command_resumes(judged, tmp_path, capsys):
    arguments = ["--backend", "any", "--jobs", "1", "--out", str(tmp_path)]
    assert fuzz.main([*arguments, "--calls", "3"]) == 0
    assert fuzz.main([*arguments, "--calls", "7"]) == 1
    assert judged == [0, 1, 2, 3, 4, 5, 6]
    said = capsys.readouterr().out
    assert "all on any, seed 4 (-): the process ended in it" in said
    assert "7 seeds, 1 failed, 0 left" in said
    assert "0.6             6" in said


def test_processes_share_the_seeds_of_every_cell(judged, tmp_path):
    assert fuzz.main(["--op", "ista", "--backend", "cpp", "--jobs", "2", "--calls", "3", "--out", str(tmp_path)]) == 0
    logs = [fuzz.read(fuzz.log_of(tmp_path, "ista", "cpp", job, 2)) for job in (1, 2)]
    assert [len(log) for log in logs] == [2, 1]
    assert list(logs[0] | logs[1]) == [*fuzz.seeds("ista", 0, 3)][::2] + [*fuzz.seeds("ista", 0, 3)][1::2]


def test_time_that_is_up_is_no_failure(judged, tmp_path):
    arguments = ["--backend", "any", "--jobs", "1", "--out", str(tmp_path), "--calls", "3"]
    assert fuzz.main([*arguments, "--minutes", "1e-9"]) == fuzz.INCOMPLETE


def test_a_run_that_was_stopped_blames_no_seed(judged, tmp_path, monkeypatch):
    log = fuzz.log_of(tmp_path, "", "any", 1, 1)
    fuzz.running(log).write_text("2")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=1))
    assert fuzz.main(["--backend", "any", "--jobs", "1", "--out", str(tmp_path), "--calls", "3"]) == fuzz.INCOMPLETE
    assert not log.exists()


def test_a_backend_that_is_not_here_is_a_failure(tmp_path):
    log = fuzz.log_of(tmp_path, "ista", "emulated", 1, 1)
    record = {"seed": 1, "kind": "k", "status": "refused", "why": "unavailable: g++", "ratio": 0.0, "ms": 1.0}
    log.write_text(json.dumps(record) + "\n")
    assert fuzz.table({("ista", "emulated"): fuzz.read(log)}, 1, tmp_path) == 1
    assert fuzz.table({("", fuzz.ANY): fuzz.read(log)}, 1, tmp_path) == 0


def test_the_folders_and_the_calls_are_judged(capsys, threads):
    threads(1)
    with fuzz.judging(fuzz.LOADERS) as judge:
        assert judge(1)[0]["status"] in ("loaded", "refused")
    assert fuzz.main(["--seed", "9", "--backend", "composite"]) == 0
    assert "seed 9: passed" in capsys.readouterr().out
