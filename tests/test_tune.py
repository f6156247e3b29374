"""Tuning: the fastest right configuration of each workload becomes a row that comes before the shipped ones."""

import os
from importlib import import_module

import pytest
import torch

from crate_kernels import _launch, _tune, cli
from crate_kernels._launch import Row, Table

SHIPPED = {"BLOCK": 1, "num_warps": 4}
CANDIDATES = ({"BLOCK": 2, "num_warps": 4}, {"BLOCK": 3, "num_warps": 4}, {"BLOCK": 4, "num_warps": 8})
# What each takes, by BLOCK: 3 is wrong and 4 does not run, though they would be the fastest.
SECONDS, WRONG, BROKEN = {1: 5.0, 2: 2.0, 3: 1.0, 4: 0.5}, 3, 4
CUDA = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """Pretend that there is a GPU, and an empty home."""
    monkeypatch.setattr(_launch.Path, "home", lambda: tmp_path)
    monkeypatch.setattr(_launch, "arch", lambda device: "sm_90")
    monkeypatch.setattr(_launch, "_gpu_name", lambda device: "Fake GPU (80 GB)")
    _launch.user_rows.cache_clear()
    _launch._find.cache_clear()
    yield "Fake GPU (80 GB)"
    _launch.user_rows.cache_clear()
    _launch._find.cache_clear()


@pytest.fixture
def fake():
    table = Table("fake", {"sm_90": (Row(SHIPPED),)}, CANDIDATES)

    def block():
        return table.config(CUDA, 64, 100, False, torch.bfloat16)["BLOCK"]

    def make():
        return block, lambda: block() != WRONG

    def clock(call):
        if call() == BROKEN:
            raise RuntimeError("out of resource: shared memory")
        return SECONDS[call()]

    return table, make, clock


def test_the_fastest_that_is_right_is_found(gpu, fake):
    table, make, clock = fake
    result = _tune.search(_tune.Workload(table, Row({}, 64, 256), make), SHIPPED, clock)
    assert (result.config, result.seconds, result.shipped) == (CANDIDATES[0], 2.0, 5.0)


def test_what_is_written_is_what_later_calls_get(gpu, fake):
    table, make, clock = fake
    results = [
        _tune.search(_tune.Workload(table, Row({}, head_dim, seqlen, half=True), make), SHIPPED, clock)
        for head_dim, seqlen in ((64, None), (64, 256))
    ]
    path = _launch.write_user_rows(gpu, _tune.rows(results))
    assert path.name == "Fake-GPU-80-GB-.json"
    assert [(row.head_dim, row.seqlen) for row in _launch.user_rows(gpu)["fake"]] == [(64, 256), (64, None)]

    def got(head_dim, dtype):
        return table.config(CUDA, head_dim, 197, False, dtype)["BLOCK"]

    assert (got(64, torch.float16), got(64, torch.float32), got(128, torch.float16)) == (2, 1, 1)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"tables": {"fake": [{"unknown": 1}]}}', '{"tables": 3}'])
def test_a_file_of_another_version_is_ignored(gpu, fake, text):
    _launch.user_table(gpu).parent.mkdir(parents=True)
    _launch.user_table(gpu).write_text(text)
    assert fake[0].config(CUDA, 64, 197, False, torch.float16) == SHIPPED


@pytest.mark.parametrize(("block", "message"), [(WRONG, "gives a wrong result"), (BROKEN, "does not run")])
def test_a_shipped_configuration_that_fails_is_an_error(gpu, fake, block, message):
    table, make, clock = fake
    with pytest.raises(
        RuntimeError, match=f"^tune: the shipped configuration of fake head_dim 64 seqlen 256 {message}"
    ):
        _tune.search(_tune.Workload(table, Row({}, 64, 256), make), {**SHIPPED, "BLOCK": block}, clock)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_tuning_says_so(capsys):
    assert cli.main(["tune"]) == 1
    assert "tune: needs a CUDA or HIP GPU, and PyTorch sees none" in capsys.readouterr().out


def test_without_a_usable_home_tuning_ends_before_it_times_anything(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setattr(_launch.Path, "home", lambda: tmp_path / "file")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    assert cli.main(["tune"]) == 1
    assert "tune: the user's cache cannot be written: [Errno 20] Not a directory" in capsys.readouterr().out


@pytest.mark.parametrize("op", ["mssa", "tssa", "ista"])
def test_workloads_are_rows_of_the_tables(op):
    pytest.importorskip("triton", reason="needs Triton: pip install triton")
    tables = import_module(f"crate_kernels.ops.{op}.triton_tables").TABLES
    workloads = import_module(f"crate_kernels.ops.{op}.triton_tune").workloads()
    assert {w.table for w in workloads} == set(tables)
    for workload in workloads:
        keys = set(workload.table.rows["sm_90"][0].config)
        assert all(set(candidate) == keys for candidate in workload.table.candidates)
        # A length that is no power of two would stand for shorter ones than its own.
        assert workload.row.seqlen in (None, _launch.bucket(workload.row.seqlen or 1))
    assert len({str(w) for w in workloads}) == len(workloads)


def launched(call):
    """Return the names of what ``call`` launches on the pretended GPU."""
    from tests.aot import harness

    return [launch.function.__name__ for launch in harness.launches(call, "sm_90")]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="looks at launches: needs TRITON_INTERPRET unset")
def test_launches_follow_what_was_tuned(gpu):
    """One program a sequence or chunks, whose product, which form: each is taken from the row that was written."""
    pytest.importorskip("triton", reason="needs Triton: pip install triton")
    from crate_kernels.ops.ista import triton_tables as ista_tables
    from crate_kernels.ops.tssa import triton_tables as tssa_tables
    from tests.aot import ista, tssa

    image, step = tssa.full(197, 8, 48, backward=False), ista.step(1024, 768)
    assert launched(image) == ["_tssa_fwd_kernel"]
    assert launched(step) == ["_ista_product_kernel", "_ista_update_kernel", "_ista_product_kernel"]
    chunks = next(c for c in tssa_tables.FULL_FORWARD.candidates if not c["WHOLE"])
    library = next(c for c in ista_tables.PRODUCT.candidates if c["LIBRARY"])
    never = ista_tables.BACKWARD_FORM.candidates[-1]
    rows = {
        "tssa_full_fwd": [Row(chunks, 384, 256, half=True)],
        "ista_product": [Row(library, 768, 1024, half=True)],
        "ista_backward_form": [Row(never, 768, 1024, half=True)],
    }
    _launch.write_user_rows(gpu, rows)
    assert launched(image) == ["_tssa_fwd_kernel"] * 3
    # Forward still one product; back the masked gradient, dx and the residual, dr having no epilogue.
    assert launched(step) == ["_ista_update_kernel"] * 4
    longer = tssa.full(785, 8, 48, backward=False), ista.step(2048, 768)
    assert [launched(call) for call in longer] == [
        ["_tssa_fwd_kernel"],
        ["_ista_product_kernel", "_ista_update_kernel", "_ista_product_kernel"],
    ]
