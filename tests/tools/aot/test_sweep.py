"""The sweep of small sizes: kernels of extreme sizes compile, it has every kernel, and no kernel ends it."""

import ast
import os
from pathlib import Path

import pytest
import torch

from tests.tools.aot import harness

harness.needs_compiler()

import crate_kernels  # noqa: E402  # only where Triton compiles
from tests.ops.ista import aot as ista  # noqa: E402
from tests.ops.mssa import aot as mssa  # noqa: E402
from tests.ops.tssa import aot as tssa  # noqa: E402
from tests.tools.aot import sizes, sweep  # noqa: E402

SINGLE, HALF = torch.float32, torch.bfloat16
# name: (call, target, the steps of it that are compiled, all by default)
EXTREMES = {
    "tssa.causal-1x2": (tssa.causal(33, 1, 2, SINGLE), "sm_90", ("DMEMBERS", "DW")),
    "tssa.causal-1x16-half": (tssa.causal(33, 1, 16, HALF), "sm_90", ("DMEMBERS",)),
    "tssa.causal-3x4-padded": (tssa.causal(17, 3, 4, SINGLE, padded=True), "sm_90", ("DMEMBERS",)),
    "tssa.causal-2x16": (tssa.causal(33, 2, 16, SINGLE), "gfx942", ("DMEMBERS",)),
    "tssa.causal-1x1": (tssa.causal(1, 1, 1, SINGLE), "sm_90", ()),
    "tssa.full-1x16-dropout": (tssa.full(2, 1, 16, HALF, dropout_p=0.1), "sm_90", ("DW",)),
    "tssa.full-1x128-dropout": (tssa.full(1, 1, 128, SINGLE, dropout_p=0.1), "sm_90", ("DW",)),
    "tssa.decode-64x256": (tssa.decode(3, 64, 256, SINGLE), "sm_90", ()),
    "tssa.full": (tssa.full(1, 1, 1, HALF), "sm_90", ()),
    "tssa.decode": (tssa.decode(1, 1, 1, HALF), "sm_90", ()),
    "mssa.forward": (mssa.forward(1, 1, HALF), "sm_90", ()),
    "mssa.backward": (mssa.backward(3, 1, HALF, causal=True), "sm_90", ()),
    "mssa.decode": (mssa.decode(1, 1, HALF), "sm_90", ()),
    "ista.step": (ista.step(1, 1, HALF), "sm_90", ()),
}


@pytest.mark.parametrize(("call", "target", "steps"), EXTREMES.values(), ids=EXTREMES)
def test_kernels_of_extreme_sizes_compile(call, target, steps):
    chosen = [k for k in sweep.kernels(target, [("", call)]) if not steps or set(steps) & k.steps]
    assert len(chosen) >= max(len(steps), 1)
    assert {str(kernel): reason for kernel in chosen if (reason := sweep.fault(kernel))} == {}


def test_the_sweep_has_every_kernel():
    """Kernels are the compiled functions that are named so; none is launched at no size of the sweep."""
    package = Path(crate_kernels.__file__).parent
    trees = [ast.parse(path.read_text()) for path in package.glob("ops/**/*.py") if "triton" in str(path)]
    written = {
        node.name
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel") and node.decorator_list
    }
    assert {kernel.launch.function.__name__ for kernel in sweep.kernels("sm_90", sizes.calls())} == written


def test_every_draw_has_all_pairs_of_sizes_and_calls_of_its_own():
    first, both = ([name for name, _ in sizes.calls(draws, "tssa.causal")] for draws in (1, 2))
    pairs = {name.partition("seqlen")[0] for name in first}
    assert len(pairs) == len(first) == len(sizes.HEADS) * len(sizes.CHANNELS)
    assert both[: len(first)] == first
    assert len(set(both)) > 1.9 * len(first)


def _one_kernel():
    call = tssa.decode(1, 2, 4, SINGLE)
    return sweep.kernels("sm_90", [("tssa.decode()", call), ("again()", call)])


def test_equal_kernels_are_one():
    (kernel,) = _one_kernel()
    assert kernel.call == "tssa.decode()"
    half, other = tssa.decode(1, 2, 4, HALF), tssa.decode(1, 2, 4, SINGLE, padded=True)
    assert len(sweep.kernels("sm_90", [("", half), ("", other)])) == 2


def test_what_the_compiler_says_is_the_fault(monkeypatch):
    def refuse(*args, **kwargs):
        os.write(2, b"a long module\nscan.py:36: error: operand #0 does not dominate this use\n")
        raise RuntimeError("PassManager::run failed")

    (kernel,) = _one_kernel()
    monkeypatch.setattr(sweep.triton, "compile", refuse)
    assert sweep.fault(kernel) == "RuntimeError: scan.py:36: error: operand #0 does not dominate this use"


def test_more_shared_memory_than_there_is_is_a_fault(monkeypatch):
    (kernel,) = _one_kernel()
    monkeypatch.setitem(harness.SHARED_LIMIT, "sm_90", -1)
    assert "bytes of shared memory, -1 there are" in sweep.fault(kernel)


def test_the_sweep_goes_on_where_it_was_stopped(tmp_path, monkeypatch):
    compiled = []
    monkeypatch.setattr(sweep, "fault", lambda kernel: compiled.append(kernel) or "")
    arguments = ("sm_90", 1, "tssa.decode", tmp_path / "record.jsonl")
    sweep.compile_all(*arguments, until=0.0)
    assert not compiled
    sweep.compile_all(*arguments, until=float("inf"))
    assert len(compiled) == len(sweep.Record(arguments[-1]).faults) > 50
    sweep.compile_all(*arguments, until=float("inf"))
    assert len(compiled) == len(sweep.Record(arguments[-1]).faults)


def _end_at_second(target, draws, part, path, until):
    """Compile three kernels as a child process does, of which the compiler does not survive the second."""
    record = sweep.Record(path)
    for key in ("first", "second", "third"):
        if key not in record.faults:
            record.begin(key)
            if key == "second":
                os.abort()
            record.end(key, "")


def test_a_compiler_that_ends_its_process_does_not_end_the_sweep(tmp_path):
    path = tmp_path / "record.jsonl"
    sweep.run("sm_90", 1, "", path, 0.0, work=_end_at_second)
    assert sweep.Record(path).faults == {"first": "", "second": "the compiler ended the process", "third": ""}


def _fail(target, draws, part, path, until):
    raise SystemExit(3)


def test_a_child_that_fails_by_itself_ends_the_sweep(tmp_path):
    with pytest.raises(RuntimeError, match="outside the compiler, exit code 3"):
        sweep.run("sm_90", 1, "", tmp_path / "record.jsonl", 0.0, work=_fail)
