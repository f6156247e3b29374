"""The smoke test without a GPU: its items, and what they make of the driver and of compute-sanitizer."""

import subprocess
from types import SimpleNamespace

import pytest
import torch

from crate_kernels._core import measured
from tests.gpu import lines, processes, smoke
from tests.ops.tssa.persistent import MAX_SHARED, PAIRS
from tests.ops.tssa.walking import PAIRS as WALKS
from tests.tools import graphs, timed_gpu

pytest.importorskip("triton", reason="its items interpret Triton's kernels: pip install triton")


def test_the_smoke_test_has_every_operator_backend_and_kind_of_item():
    names = list(smoke.items(dry_run=False))
    firsts = {tuple(name.split()[:1]) for name in names}
    kinds = (
        "machine",
        "triton",
        "cpp",
        "occupancy",
        "generation",
        "stream",
        "lt",
        "heads",
        "rows",
        "pairs",
        "persistent",
        "walking",
        "warnings",
        "sanitizer",
    )
    assert firsts == {(kind,) for kind in kinds}
    first = {name.split()[0]: place for place, name in reversed([*enumerate(names)])}
    unseen = ("heads", "rows", "pairs", "persistent", "walking")  # which no GPU has run
    assert max(first[kind] for kind in unseen) < min(first[kind] for kind in ("triton", "cpp"))
    assert {case.op for case in smoke.forms()} == {"mssa", "tssa", "ista", "ista_overcomplete"}


CLASSES = {
    "mssa": ([16], True, (1, 1, 64, 16)),
    "tssa": ([16], False, (1, 1, 64, 16)),
    "ista": ([16], False, (1, 64, 16)),
    "ista_overcomplete": ([16, 32], False, (1, 64, 16, 32)),
}


@pytest.mark.parametrize(("op", "sizes", "causal", "shape"), [(op, *c) for op, c in CLASSES.items()], ids=CLASSES)
def test_the_calls_that_a_timed_gpu_takes_elsewhere_are_held_to_float64(op, sizes, causal, shape, tmp_path):
    row = {"op": op, "dtype": "float32", "sizes": sizes, "length": 64, "causal": causal}
    with timed_gpu.with_table([row | {"direction": "both", "backend": "composite"}], tmp_path):
        ((case, dtype),) = smoke.classes()
        assert (case.shape, dtype) == (shape, torch.float32)
        assert measured.fastest(op, tuple(sizes), 64, causal, (torch.ones(2, requires_grad=True),)) == "composite"
        assert 0 < smoke.check(case, None, dtype, "cpu")["share"] < 1
        assert [name for name in smoke.items(dry_run=False) if name.startswith("none ")] == [f"none {case}"]


def test_generation_by_a_captured_step_is_held_to_called_ones(monkeypatch):
    graphs.stand_in(monkeypatch)
    small = {"n_embd": 24, "n_head": 2, "vocab_size": 101}
    assert smoke.generation("crate_lm_base", "cpu", **small) == {"tokens": 180}
    assert [graph.replays for graph in graphs.Graph.made] == [56]
    monkeypatch.setattr(graphs.Graph, "replay", lambda graph: None)
    with pytest.raises(AssertionError, match="replayed tokens differ"):
        smoke.generation("crate_lm_base", "cpu", **small)


@pytest.mark.parametrize(("kind", "config"), [("persistent", PAIRS), ("walking", WALKS)], ids=["persistent", "walking"])
def test_the_clusters_that_a_gpu_holds_are_counted(kind, config, device, backend, monkeypatch):
    monkeypatch.setattr(smoke.backends, "unavailable_reason", lambda *args: None)
    sizes = (3, 32, 70) if kind == "walking" else (3, 16, 30)
    for multiprocessors in (8, 5):
        device(capability=90, shared_limit=MAX_SHARED, multiprocessors=multiprocessors)
        clusters = multiprocessors // config["CLUSTER"]
        expected = {"TssaForward": clusters, "TssaBackward": clusters}
        assert smoke.occupancy(kind, config, *sizes, "cpu") == {"clusters": expected}
    device(capability=90, shared_limit=MAX_SHARED, multiprocessors=1)
    with pytest.raises(AssertionError, match="the GPU holds no cluster"):
        smoke.occupancy(kind, config, *sizes, "cpu")
    device(capability=80)
    with pytest.raises(smoke.Skipped, match="these kernels are for sm_90a"):
        smoke.occupancy(kind, config, *sizes, "cpu")


def test_persistent_products_are_held_to_float64_where_a_gpu_has_them(monkeypatch):
    monkeypatch.setattr(smoke.launch, "arch", lambda device: "sm_80")
    with pytest.raises(smoke.Skipped, match="persistent products are for sm_90 and sm_100"):
        smoke.stream("relu")


def test_a_smoke_item_that_fails_stops_nothing(tmp_path, monkeypatch):
    def wrong():
        raise AssertionError("beyond the tolerance")

    def missing():
        raise smoke.Skipped("not there")

    monkeypatch.setattr(smoke, "items", lambda dry_run: {"a": wrong, "b": missing, "c": lambda: {"share": 0.5}})
    assert smoke.main(["--out", str(tmp_path), "--seconds", "180"]) == processes.FAILED
    outcomes = {name: line["outcome"] for name, line in lines.results(tmp_path / "smoke.jsonl").items()}
    assert outcomes == {"a": "failed", "b": "skipped", "c": "passed"}
    count = len(lines.read(tmp_path / "smoke.jsonl"))
    smoke.main(["--out", str(tmp_path), "--seconds", "180"])
    assert [line["item"] for line in lines.read(tmp_path / "smoke.jsonl")[count:]] == ["b", "b"]


@pytest.mark.parametrize("status", [0, 9])
def test_small_calls_run_under_the_sanitizer_where_it_is(status, monkeypatch):
    commands = []

    def run(command, **options):
        commands.append(command)
        return SimpleNamespace(returncode=status, stdout="ERROR SUMMARY", stderr="")

    monkeypatch.setattr(smoke.subprocess, "run", run)
    monkeypatch.setattr(smoke.shutil, "which", lambda name: None)
    monkeypatch.setattr(smoke.backends, "unavailable_reason", lambda *args: None)
    with pytest.raises(smoke.Skipped, match="compute-sanitizer is not there"):
        smoke.sanitize("mssa", "cpp")
    monkeypatch.setattr(smoke.shutil, "which", lambda name: "/bin/compute-sanitizer")
    monkeypatch.setattr(smoke.launch, "arch", lambda device: "sm_80")
    with pytest.raises(smoke.Skipped, match="persistent kernels are for sm_90a"):
        smoke.sanitize("tssa", "cpp", "persistent")
    if status:
        with pytest.raises(AssertionError, match="ERROR SUMMARY"):
            smoke.sanitize("mssa", "cpp")
    else:
        assert smoke.sanitize("mssa", "cpp") == {"said": "ERROR SUMMARY"}
    assert commands[0][-1] == "from tests.gpu import smoke; smoke.call('mssa', 'cpp')"
    monkeypatch.setattr(smoke.launch, "arch", lambda device: "sm_90")
    if not status:
        smoke.sanitize("tssa", "cpp", "walking", "racecheck")
        assert commands[1][-1] == "from tests.gpu import smoke; smoke.call('walking', 'cpp')"
        assert [one[1:3] for one in commands] == [["--tool", "memcheck"], ["--tool", "racecheck"]]


def test_a_call_that_hangs_under_the_sanitizer_fails_with_words(monkeypatch):
    def run(command, timeout, **options):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(smoke.subprocess, "run", run)
    monkeypatch.setattr(smoke.shutil, "which", lambda name: "/bin/compute-sanitizer")
    monkeypatch.setattr(smoke.backends, "unavailable_reason", lambda *args: None)
    with pytest.raises(AssertionError, match="one small call did not end within 90 s under compute-sanitizer"):
        smoke.sanitize("mssa", "cpp")


def test_what_the_sanitizer_skips_goes_again(tmp_path, monkeypatch):
    """What was missing may be there then; what failed does not go again."""
    monkeypatch.setattr(smoke.shutil, "which", lambda name: "/bin/compute-sanitizer")
    monkeypatch.setattr(smoke, "items", lambda dry_run: {"sanitizer cpp mssa": lambda: smoke.sanitize("mssa", "cpp")})
    done = SimpleNamespace(returncode=0, stdout="ERROR SUMMARY", stderr="")
    missing = SimpleNamespace(returncode=1, stdout="", stderr="no kernel")
    for reason, found, outcome in (("no NVRTC", missing, "skipped"), (None, done, "passed")):
        monkeypatch.setattr(smoke.backends, "unavailable_reason", lambda *args, reason=reason: reason)
        monkeypatch.setattr(smoke.subprocess, "run", lambda *args, found=found, **options: found)
        assert smoke.main(["--out", str(tmp_path), "--seconds", "180"]) == processes.DONE
        assert lines.results(tmp_path / "smoke.jsonl")["sanitizer cpp mssa"]["outcome"] == outcome
