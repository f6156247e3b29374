"""Tuning: the fastest right configuration of each workload becomes a row that comes before the shipped ones."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module

import pytest
import torch

from crate_kernels._triton import launch as _launch
from crate_kernels._triton import table as _table
from crate_kernels._triton import tune as _tune
from crate_kernels._triton.table import LaunchRow
from crate_kernels.cli import tune
from tests.launch.common import BROKEN, CANDIDATES, CUDA, SHIPPED, WRONG


def test_the_fastest_that_is_right_is_found(gpu, fake):
    table, make, clock = fake
    result = _tune.search(_tune.Workload(table, LaunchRow({}, 64, 256), make), SHIPPED, clock, tune.judge)
    assert (result.config, result.seconds, result.shipped) == (CANDIDATES[0], 2.0, 5.0)


def test_what_is_written_is_what_later_calls_get(gpu, fake):
    table, make, clock = fake
    for head_dim, seqlen in ((64, None), (64, 256)):
        workload = _tune.Workload(table, LaunchRow({}, head_dim, seqlen, half=True), make)
        found = _tune.search(workload, SHIPPED, clock, tune.judge)
        path = _table.write_user_rows(gpu, {"fake": [workload.tuned(found.config)]})
    assert path.name == "Fake-GPU-80-GB-.json"
    assert [(row.head_dim, row.seqlen) for row in _table.user_rows(gpu)["fake"]] == [(64, 256), (64, None)]

    def got(head_dim, dtype):
        return table.config(CUDA, head_dim, 197, False, dtype)["BLOCK"]

    assert (got(64, torch.float16), got(64, torch.float32), got(128, torch.float16)) == (2, 1, 1)


def test_a_table_that_was_committed_serves_until_the_user_tunes(gpu, fake, monkeypatch, tmp_path):
    """What tune wrote is copied as it is; a GPU of another name has the architecture's rows."""
    table, device = fake[0], torch.device("cuda", 0)
    monkeypatch.setattr(_table, "_TUNED", tmp_path / "tuned")
    path = _table.write_user_rows(gpu, {"fake": [LaunchRow(CANDIDATES[0], 64), LaunchRow(CANDIDATES[1], 128)]})
    (tmp_path / "tuned").mkdir()
    path.replace(tmp_path / "tuned" / path.name)

    def got(head_dim):
        for cached in (_table.user_rows, _table._shipped_rows, _table._find):
            cached.cache_clear()
        return table.config(device, head_dim, 197, False, torch.bfloat16)

    assert (got(64), got(128), got(256)) == (CANDIDATES[0], CANDIDATES[1], SHIPPED)
    _table.write_user_rows(gpu, {"fake": [LaunchRow(CANDIDATES[2], 64)]})
    assert (got(64), got(128)) == (CANDIDATES[2], CANDIDATES[1])
    assert table.shipped(device, 64, 197, False, torch.bfloat16) == SHIPPED
    monkeypatch.setattr(_launch, "gpu_name", lambda device: "Another GPU")
    assert got(64) == SHIPPED
    _table._shipped_rows.cache_clear()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"tables": {"fake": [{"unknown": 1}]}}', '{"tables": 3}'])
def test_a_file_of_another_version_is_ignored(gpu, fake, text):
    _table.user_table(gpu).parent.mkdir(parents=True)
    _table.user_table(gpu).write_text(text)
    assert fake[0].config(CUDA, 64, 197, False, torch.float16) == SHIPPED


@pytest.mark.parametrize("change", [{"WHOLE": 1}, {"maxnreg": 128}], ids=["another", "of-any-launch"])
def test_rows_for_a_kernel_with_other_arguments_are_ignored(gpu, fake, change):
    found = {**SHIPPED, **change}
    _table.write_user_rows(gpu, {"fake": [LaunchRow(found)]})
    taken = found if "maxnreg" in change else SHIPPED
    assert fake[0].config(CUDA, 64, 197, False, torch.float16) == taken


def test_what_was_found_before_stays(gpu):
    """Of other tables, and of the same one but for the row with the same conditions; a row for all calls comes last."""
    old, new = {"BLOCK": 1}, {"BLOCK": 2}
    _table.write_user_rows(
        gpu, {"other": [LaunchRow(old, 64)], "fake": [LaunchRow(old, 64), LaunchRow(old, 64, causal=True)]}
    )
    _table.write_user_rows(
        gpu, {"fake": [LaunchRow(new), LaunchRow(new, 64), LaunchRow(new, 32, 256), LaunchRow(new, 32)]}
    )
    assert _table.user_rows(gpu) == {
        "other": (LaunchRow(old, 64),),
        "fake": (
            LaunchRow(new, 32, 256),
            LaunchRow(new, 32),
            LaunchRow(new, 64),
            LaunchRow(old, 64, causal=True),
            LaunchRow(new),
        ),
    }


def test_rows_of_a_table_of_another_version_are_lost_alone(gpu):
    _table.write_user_rows(gpu, {"other": [LaunchRow(SHIPPED, 64)], "fake": [LaunchRow(SHIPPED)]})
    path = _table.user_table(gpu)
    path.write_text(path.read_text().replace('"fake": [\n   {', '"fake": [\n   {\n    "unknown": 1,'))
    _table.user_rows.cache_clear()
    assert _table.user_rows(gpu) == {"other": (LaunchRow(SHIPPED, 64),)}
    _table.write_user_rows(gpu, {"third": [LaunchRow(SHIPPED)]})
    assert _table.user_rows(gpu) == {"other": (LaunchRow(SHIPPED, 64),), "third": (LaunchRow(SHIPPED),)}


def test_operators_may_be_tuned_side_by_side(gpu, monkeypatch):
    """Each writes the whole file: none may do so from what it read before another wrote."""
    put = _table.files.put

    def slowly(path, content):
        time.sleep(0.05)
        return put(path, content)

    monkeypatch.setattr(_table.files, "put", slowly)
    tables = [f"table-{n}" for n in range(4)]
    with ThreadPoolExecutor(len(tables)) as pool:
        list(pool.map(lambda name: _table.write_user_rows(gpu, {name: [LaunchRow(SHIPPED)]}), tables))
    _table.user_rows.cache_clear()
    assert set(_table.user_rows(gpu)) == set(tables)


@pytest.mark.parametrize("block", [WRONG, BROKEN])
def test_a_shipped_configuration_that_fails_gives_way(gpu, fake, block):
    table, make, clock = fake
    result = _tune.search(
        _tune.Workload(table, LaunchRow({}, 64, 256), make), {**SHIPPED, "BLOCK": block}, clock, tune.judge
    )
    assert (result.config, result.seconds, result.shipped) == (CANDIDATES[0], 2.0, None)


def test_nothing_that_runs_is_an_error(gpu, fake):
    table, make, clock = fake
    seen, lost = [], {0, 1}
    with pytest.raises(RuntimeError, match="no configuration runs and is right"):
        _tune.search(
            _tune.Workload(table, LaunchRow({}), make),
            SHIPPED,
            clock,
            tune.judge,
            lost,
            seen.append,
            lambda: seen.append("ok"),
        )
    assert seen == [2, 3, "ok"]  # the wrong one, then the broken one, after which the device is asked


def test_a_device_that_is_lost_ends_the_search(gpu, fake):
    def check_device():
        raise RuntimeError("an illegal memory access was encountered")

    table, make, clock = fake
    with pytest.raises(RuntimeError, match="illegal memory access"):
        _tune.search(_tune.Workload(table, LaunchRow({}), make), SHIPPED, clock, tune.judge, check_device=check_device)


FOUND = ("found", {"BLOCK": 2}, 1.0, 3.0)
RESULT = _tune.Result(*FOUND[1:])
ENDS = "the process ended as it prepared the call"
RUNS = {
    # What each start sends before it ends; what comes of it; what each was asked to do.
    "nothing-dies": ([[("trying", 0), FOUND, ("failed", "why")]], [RESULT, "why"], [(0, set())]),
    "candidates-die": (
        [[("trying", 0), ("trying", 1)], [("trying", 0), ("trying", 2)], [("trying", 0), FOUND, FOUND]],
        [RESULT, RESULT],
        [(0, set()), (0, {1}), (0, {1, 2})],
    ),
    "both-die": (
        [[("trying", 1)], [FOUND, ("trying", 2)], [FOUND]],
        [RESULT, RESULT],
        [(0, set()), (0, {1}), (1, {2})],
    ),
    "the-second-dies": ([[FOUND, ("trying", 0)], [("trying", 1), FOUND]], [RESULT, RESULT], [(0, set()), (1, {0})]),
    "dies-as-it-prepares": ([[], [FOUND]], [ENDS, RESULT], [(0, set()), (1, set())]),
    "dies-between": ([[("trying", 5), FOUND]], [RESULT, ENDS], [(0, set())]),
}


@pytest.mark.parametrize(("starts", "results", "asked"), RUNS.values(), ids=RUNS)
def test_what_ends_its_process_loses_only_itself(starts, results, asked):
    waiting, seen = iter(starts), []

    def start(first, lost):
        seen.append((first, set(lost)))
        yield ("ready",)
        yield from next(waiting)

    assert list(_tune.supervise(2, start)) == results
    assert seen == asked


def test_a_process_that_never_begins_is_an_error():
    with pytest.raises(RuntimeError, match="tune: the process that times ended before it began"):
        list(_tune.supervise(1, lambda first, lost: iter(())))


def test_a_process_may_abort(capfd):
    from tests.launch.worker import dying

    results = list(_tune.supervise(2, partial(_tune.in_process, dying)))
    assert results == [_tune.Result({"BLOCK": 1}, 1.0, 2.0), "wrong"]


@pytest.mark.parametrize("op", ["mssa", "tssa", "ista"])
def test_workloads_are_rows_of_the_tables(op):
    pytest.importorskip("triton", reason="needs Triton: pip install triton")
    tables = import_module(f"crate_kernels.ops.{op}.triton.tables").TABLES
    workloads = import_module(f"crate_kernels.ops.{op}.triton.tune").workloads()
    assert {w.table for w in workloads} == set(tables)
    for workload in workloads:
        keys = _table._entries(workload.table.rows["sm_90"][0])
        assert all(_table._entries(LaunchRow(candidate)) == keys for candidate in workload.table.candidates)
        # A length that is no power of two would stand for shorter ones than its own.
        assert workload.row.seqlen in (None, _table.bucket(workload.row.seqlen or 1))
    assert len({str(w) for w in workloads}) == len(workloads)


def launched(call):
    """Return the names of what ``call`` launches on the pretended GPU."""
    from tests.tools.aot import harness

    return [launch.function.__name__ for launch in harness.launches(call, "sm_90")]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="looks at launches: needs TRITON_INTERPRET unset")
def test_launches_follow_what_was_tuned(gpu):
    """One program a sequence or chunks, whose product, which form: each is taken from the row that was written."""
    pytest.importorskip("triton", reason="needs Triton: pip install triton")
    from crate_kernels.ops.ista.triton import tables as ista_tables
    from crate_kernels.ops.tssa.triton import tables as tssa_tables
    from tests.ops.ista import aot as ista
    from tests.ops.tssa import aot as tssa

    image, step = tssa.full(197, 8, 48, backward=False), ista.step(1024, 768)
    assert launched(image) == ["_tssa_fwd_kernel"]
    assert launched(step) == ["_ista_product_kernel", "_ista_update_kernel", "_ista_product_kernel"]
    chunks = next(c for c in tssa_tables.FULL_FORWARD.candidates if not c["WHOLE"])
    library = next(c for c in ista_tables.PRODUCT.candidates if c["LIBRARY"])
    never = ista_tables.BACKWARD_FORM.candidates[-1]
    rows = {
        "tssa_full_forward": [LaunchRow(chunks, 384, 256, half=True)],
        "ista_product": [LaunchRow(library, 768, 1024, half=True)],
        "ista_backward_form": [LaunchRow(never, 768, 1024, half=True)],
    }
    _table.write_user_rows(gpu, rows)
    assert launched(image) == ["_tssa_fwd_kernel"] * 3
    # Forward still one product; back the masked gradient, dx and the residual, dr having no epilogue.
    assert launched(step) == ["_ista_update_kernel"] * 4
    longer = tssa.full(785, 8, 48, backward=False), ista.step(2048, 768)
    assert [launched(call) for call in longer] == [
        ["_tssa_fwd_kernel"],
        ["_ista_product_kernel", "_ista_update_kernel", "_ista_product_kernel"],
    ]
