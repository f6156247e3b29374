"""The command of tuning: what it times, writes, logs and resumes from, and what it says where it cannot."""

import argparse
import json
import threading
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from crate_kernels import cli
from crate_kernels._core import backends
from crate_kernels._cuda import launch as _cuda
from crate_kernels._triton import launch as _launch
from crate_kernels._triton import table as _table
from crate_kernels._triton import tune as _tune
from crate_kernels._triton.table import LaunchRow
from crate_kernels.cli import tune
from tests.gpu import tuning
from tests.gpu.tuning import MAX_CONFIGS
from tests.launch.common import CANDIDATES, CUDA, SHIPPED


@pytest.fixture
def command(gpu, fake, monkeypatch, tmp_path):
    """Pretend that there are workloads of 64, 32 and 16 channels and a GPU to time them on; return the workloads."""
    table, make, clock = fake
    every = [_tune.Workload(table, LaunchRow({}, head_dim), make) for head_dim in (64, 32, 16)]
    monkeypatch.setattr(tune, "workloads", lambda ops, only: every)
    monkeypatch.setattr(tune.backends, "unavailable_reason", lambda op, name, device: None)
    monkeypatch.setattr(tune, "_seconds", lambda device, call: clock(call))
    monkeypatch.setattr(tune.signal, "signal", lambda *args: None)  # what a process of tune's does runs here
    for name, value in {"is_available": True, "current_device": 0, "get_device_name": gpu, "synchronize": None}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *args, value=value: value)
    return every


class Sink(list):
    """The sending end of a pipe."""

    send = list.append


def test_the_command_writes_each_result_as_it_comes(command, gpu, monkeypatch, capsys):
    def in_process(target, *args):
        messages, (first, lost) = Sink(), args[-2:]
        target(messages, *args)
        if first == 0:  # ends after the first workload, whose row is there by then
            second = [at for at, message in enumerate(messages) if message == ("trying", 0)][1]
            yield from messages[: second + 1]
            assert [row.head_dim for row in _table.user_rows(gpu)["fake"]] == [64]
            return
        assert lost == {0}
        yield from messages

    monkeypatch.setattr(_tune, "in_process", in_process)
    _table.write_user_rows(gpu, {"other": [LaunchRow(SHIPPED)]})
    assert cli.main(["tune", "--op", "mssa"]) == 0
    assert set(_table.user_rows(gpu)) == {"fake", "other"}
    assert [(row.head_dim, row.config["BLOCK"]) for row in _table.user_rows(gpu)["fake"]] == [(16, 2), (32, 2), (64, 2)]
    printed = capsys.readouterr().out
    assert "fake head_dim 64 seqlen longer: 2000000 us, as shipped 5000000 us" in printed
    assert "fake head_dim 32 seqlen longer: 2000000 us, as shipped fails" in printed
    assert "fake head_dim 16 seqlen longer: 2000000 us, as shipped 5000000 us" in printed


def in_this_process(monkeypatch):
    """Let what tune starts run here; list the functions that were started, and the configurations that they tried."""
    started, tried = [], []

    def in_process(target, *args):
        messages = Sink()
        started.append(target.__name__)
        target(messages, *args)
        tried.extend(message[1] for message in messages if message[0] == "trying")
        yield from messages

    monkeypatch.setattr(_tune, "in_process", in_process)
    return started, tried


def test_the_command_continues_after_a_workload_that_fails(command, gpu, monkeypatch, capsys):
    def broken():
        raise RuntimeError("out of resource: shared memory")

    command[0] = replace(command[0], make=broken)
    in_this_process(monkeypatch)
    assert cli.main(["tune"]) == 1
    assert [row.head_dim for row in _table.user_rows(gpu)["fake"]] == [16, 32]
    assert "seqlen longer: left as shipped: RuntimeError: out of resource: shared memory" in capsys.readouterr().out


@pytest.fixture
def tried(command, monkeypatch):
    """List the numbers of the configurations that are tried, workload by workload; 0 is the shipped one."""
    return in_this_process(monkeypatch)[1]


EVERY = [0, 1, 2, 3] * 3


@pytest.mark.parametrize(
    ("arch", "options", "expected"),
    [("sm_90", [], [0, 1, *EVERY[:8]]), ("sm_90", ["--every"], EVERY), ("sm_100", [], EVERY)],
    ids=["ranked", "every", "another-architecture"],
)
def test_what_is_shipped_for_the_architecture_is_timed(
    arch, options, expected, command, tried, tmp_path, monkeypatch, capsys
):
    (tmp_path / "sm_90.json").write_text(json.dumps({str(command[0]): [CANDIDATES[0]]}))
    monkeypatch.setattr(tune, "_RANKED", tmp_path)
    monkeypatch.setattr(_launch, "arch", lambda device: arch)
    command[0].table.rows[arch] = command[0].table.rows["sm_90"]
    assert cli.main(["tune", *options]) == 0
    assert tried == expected
    assert ("ranked of sm_90.json" in capsys.readouterr().out) == (expected != EVERY)


def hopper(monkeypatch):
    """Have tune list what it times of CUDA C++ on a GPU of sm_90a, too."""
    monkeypatch.setattr(_cuda, "serves", lambda *_: True)
    monkeypatch.setattr(_cuda, "gpu", lambda device: SimpleNamespace(capability=90, shared_limit=227 * 1024))


@pytest.mark.parametrize("path", sorted(tune._RANKED.glob("*.json")), ids=lambda path: path.stem)
def test_what_is_shipped_are_configurations_of_the_kernels_as_they_are(path, monkeypatch):
    pytest.importorskip("triton", reason="needs Triton: pip install triton")
    assert path.stem in _table._CUDA
    hopper(monkeypatch)
    known = {str(one): one.table.candidates for one in tune.workloads([*backends.OPS])}
    for name, configs in json.loads(path.read_text()).items():
        assert name in known
        assert 1 <= len(configs) <= MAX_CONFIGS
        assert len({str(config) for config in configs}) == len(configs)
        assert [config for config in configs if config not in known[name]] == []


@pytest.mark.parametrize("table", ["persistent", "walking"])
def test_a_gpu_times_clusters_of_4_and_8_and_blocks_of_192_and_384_threads(table, monkeypatch):
    """With as few configurations as ``make gpu`` times, wherever any of them fits."""
    hopper(monkeypatch)
    every = tune.workloads(["tssa"], [f"tssa_{table}"], packages=("cuda",))
    few = tune.narrowed(every, tune._RANKED / "sm_90.json", MAX_CONFIGS)
    assert every
    for all_of_it, some in zip(every, few, strict=True):
        fitting, timed = all_of_it.table.candidates, some.table.candidates
        assert 1 <= len(timed) == min(len(fitting), MAX_CONFIGS)
        assert [config for config in timed if config not in fitting] == []
        for name, values in {"CLUSTER": (4, 8), "THREADS": (192, 384)}.items():
            for value in values:
                assert any(c[name] == value for c in timed) == any(c[name] == value for c in fitting), (str(some), name)


def test_a_short_run_tunes_what_no_gpu_has_timed_first(monkeypatch):
    hopper(monkeypatch)
    monkeypatch.setattr(tuning.cli, "main", lambda words: chosen.append(parser.parse_args(words[1:])))
    parser, chosen = argparse.ArgumentParser(), []
    tune.add_arguments(parser)
    tuning.main(["--out", "folder", "--seconds", "60"])
    every = [str(one) for one in tune.workloads([*backends.OPS])]
    names = [str(one) for one in tune.workloads([*backends.OPS], chosen[0].only)]
    assert sorted(names) == sorted(every)
    first = [next(n for n, name in enumerate(names) if part in name) for part in tuning.ORDER[:-2]]
    assert first == sorted(first)
    timed = next(n for n, name in enumerate(names) if name.startswith("mssa_forward"))
    untimed = ("mssa_heads", "mssa_long", "tssa_persistent")
    assert max(n for n, name in enumerate(names) if name.startswith(untimed)) < timed


def test_the_ranking_of_the_first_gpu_is_in_the_package():
    assert (tune._RANKED / "sm_90.json").exists()
    assert '"_triton/ranked/*.json"' in (Path(__file__).parents[2] / "pyproject.toml").read_text()


def test_a_file_narrows_what_is_timed(command, gpu, tmp_path, tried):
    """Of the first workload one candidate is left, of the second none; the third is not named."""
    path = tmp_path / "candidates.json"
    path.write_text(json.dumps({str(command[0]): [CANDIDATES[0]], str(command[1]): []}))
    assert cli.main(["tune", "--candidates", str(path)]) == 0
    assert tried == [0, 1, 0, 0, 1, 2, 3]
    assert {row.head_dim: row.config for row in _table.user_rows(gpu)["fake"]} == {
        64: CANDIDATES[0],
        32: SHIPPED,
        16: CANDIDATES[0],
    }


def test_a_log_has_every_timing_and_is_gone_on_from(command, gpu, tmp_path, monkeypatch, capsys):
    started, _ = in_this_process(monkeypatch)
    files = ["--log", str(tmp_path / "log.jsonl"), "--table", str(tmp_path / "table.json")]
    assert cli.main(["tune", *files, "--minutes", "0"]) == tune._INCOMPLETE
    assert not (tmp_path / "log.jsonl").exists()
    assert cli.main(["tune", *files]) == 0
    entries = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    timings = [(e["config"], e["seconds"]) for e in entries if e["workload"] == str(command[0]) and "config" in e]
    assert timings == [("shipped", 5.0), (CANDIDATES[0], 2.0), (CANDIDATES[1], None), (CANDIDATES[2], None)]
    assert json.loads((tmp_path / "table.json").read_text())["gpu"] == gpu
    written = _table.user_table(gpu).read_text()
    _table.user_table(gpu).unlink()
    capsys.readouterr()
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"workload": "cut')
    started.clear()
    assert cli.main(["tune", *files]) == 0
    assert "us, as shipped" not in capsys.readouterr().out
    assert started == []
    assert _table.user_table(gpu).read_text() == written


def test_what_ends_a_process_that_compiles_is_not_timed(command, monkeypatch):
    """Three processes compile a workload each. Each ends as it compiles configurations 1 and 2, whoever starts it."""
    tried = []

    def in_process(target, *args):
        messages, lost = Sink(), args[-1]
        target(messages, *args)
        ends = next((number for number in (1, 2) if target is tune._compile and number not in lost), None)
        if ends is not None:
            messages = messages[: messages.index(("trying", ends)) + 1]
        if target is tune._time:
            tried.extend(message[1] for message in messages if message[0] == "trying")
        yield from messages

    monkeypatch.setattr(_tune, "in_process", in_process)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(_tune, "forced", one_at_a_time(_tune.forced))
    assert cli.main(["tune", "--jobs", "3"]) == 0
    assert tried == 3 * [0, 3]


def one_at_a_time(forced):
    """Serialise: one process has one configuration at a time, and the threads of this test share a process."""
    lock = threading.Lock()

    @contextmanager
    def alone(*args):
        with lock, forced(*args):
            yield

    return alone


def test_few_candidates_are_chosen_evenly(command):
    assert tune.narrowed(command, None, 2)[0].table.candidates == (CANDIDATES[0], CANDIDATES[2])
    assert tune.narrowed(command, None, 9)[0].table.candidates == CANDIDATES


@pytest.mark.parametrize("text", [None, "", "[]", '{"a": 3}'])
def test_a_file_without_candidates_is_refused(command, tmp_path, capsys, text):
    path = tmp_path / "candidates.json"
    if text is not None:
        path.write_text(text)
    assert cli.main(["tune", "--candidates", str(path)]) == 1
    assert f"tune: --candidates must map workloads to configurations, got {path}" in capsys.readouterr().out


def test_what_was_tuned_before_is_not_what_is_shipped(command, gpu):
    _table.write_user_rows(gpu, {"fake": [LaunchRow(CANDIDATES[0])]})
    assert command[0].table.config(CUDA, 64, 100, False, torch.bfloat16) == CANDIDATES[0]
    assert tune._shipped(command[0], CUDA) == SHIPPED


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_tuning_says_so(capsys):
    assert cli.main(["tune"]) == 1
    assert "tune: needs a CUDA or HIP GPU, and PyTorch sees none" in capsys.readouterr().out


def test_without_a_usable_home_tuning_ends_before_it_times_anything(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setattr(_table.Path, "home", lambda: tmp_path / "file")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    assert cli.main(["tune"]) == 1
    assert "tune: the user's cache cannot be written: [Errno 20] Not a directory" in capsys.readouterr().out


def test_the_best_ranked_candidates_are_timed(command, tmp_path):
    path = tmp_path / "candidates.json"
    path.write_text(json.dumps({str(command[0]): [dict(c) for c in reversed(CANDIDATES)]}))
    assert tune.narrowed(command, path, 1)[0].table.candidates == (CANDIDATES[-1],)
    assert tune.narrowed(command, path)[0].table.candidates == tuple(reversed(CANDIDATES))


def test_what_was_found_is_forgotten(command, gpu, capsys, monkeypatch):
    monkeypatch.setattr(tune, "_tune", lambda *args: pytest.fail("timed"))
    _table.write_user_rows(gpu, {"fake": [LaunchRow(CANDIDATES[0])]})
    for _ in range(2):  # there is nothing to forget the second time
        assert cli.main(["tune", "--forget"]) == 0
        assert not _table.user_table(gpu).exists()
    assert f"tune: the shipped configurations serve {gpu} again" in capsys.readouterr().out


def test_an_operator_without_kernels_here_is_not_tuned(command, monkeypatch, capsys):
    monkeypatch.setattr(tune.backends, "unavailable_reason", lambda op, name, device: f"no {name} for {op}")
    monkeypatch.setattr(tune, "_tune", lambda *args: 7)
    assert cli.main(["tune", "--op", "tssa"]) == 1
    assert "tune: no triton for tssa" in capsys.readouterr().out
    assert cli.main(["tune"]) == 7  # of all operators, those that are here are tuned


def test_an_interrupted_tuning_says_what_serves(command, gpu, monkeypatch, capsys):
    def in_process(target, *args):
        messages = Sink()
        target(messages, *args)
        for message in messages:
            yield message
            if message[0] == "found":
                raise KeyboardInterrupt

    monkeypatch.setattr(_tune, "in_process", in_process)
    assert cli.main(["tune"]) == 0
    printed = capsys.readouterr().out
    assert "tune: interrupted; what follows is written and serves" in printed
    assert f"tune: written to {_table.user_table(gpu)}" in printed
