"""Tuning: the fastest right configuration of each workload becomes a row that comes before the shipped ones."""

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


def test_the_workloads_of_mssa_are_rows_of_its_tables():
    pytest.importorskip("triton")
    from crate_kernels.ops.mssa import triton_tables, triton_tune

    workloads = triton_tune.workloads()
    assert {w.table for w in workloads} == set(triton_tables.TABLES)
    for workload in workloads:
        keys = set(workload.table.rows["sm_90"][0].config)
        assert all(set(candidate) == keys for candidate in workload.table.candidates)
    assert len({str(w) for w in workloads}) == len(workloads)
