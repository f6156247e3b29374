"""The tables of what ``None`` takes say what the committed results say."""

import pytest

from benchmarks import choices, tables
from crate_kernels._core import measured
from crate_kernels.bench.rows import BenchRow, Results


def test_the_shipped_tables_are_those_of_the_results():
    found = {path: path.read_text(encoding="utf-8") for path in measured.FOLDER.glob("*.json")}
    assert found == choices.files(tables.load()), "run python -m benchmarks.tables"


def row(provider, seconds, op="mssa", direction="both", shape=(4, 2, 100, 64), **more):
    timed = {"device_seconds": [seconds], "seconds": [9.0], "shape": [*shape], **more}
    return BenchRow(timed.pop("bench", op), op, str(shape), "bf16", direction, provider, **timed)


# What a GPU's rows say: the backend and how often as long the usual one takes; nothing where that stays.
ROWS = {
    "sdpa": ([row("triton", 1.2), row("sdpa", 1.0), row("default", 1.2)], [("composite", 1.2)]),
    "cpp": ([row("triton", 1.2), row("cpp", 1.0), row("sdpa", 1.1)], [("cpp", 1.2)]),
    "by-too-little": ([row("triton", 1.04), row("sdpa", 1.0)], []),
    "slower": ([row("triton", 1.0), row("sdpa", 1.2), row("cpp", 1.3)], []),
    "composite-itself": ([row("triton", 1.2), row("composite", 1.2), row("sdpa", 1.0)], []),
    "taken-already": ([row("triton", 1.2), row("sdpa", 1.0), row("default", 1.01)], [("composite", 1.2)]),
    "two-in-one-call": ([row("triton", 1.2), row("cpp", 1.1), row("default", 1.0)], []),
    "no-device-time": ([row("triton", 1.2), row("sdpa", 1.0, device_seconds=[])], []),
    "backward-alone": ([row("triton", 1.2, direction="backward"), row("sdpa", 1.0, direction="backward")], []),
    "another-baseline": ([row("triton", 1.2), row("sdpa-cudnn", 1.0), row("compile", 0.5)], []),
    "decoding": ([row("triton", 1.2, bench="decode"), row("sdpa", 1.0, bench="decode")], []),
    "cases-agree": (
        [row(p, s, shape=(4, 2, n, 64)) for n in (100, 128) for p, s in (("triton", n / 50), ("sdpa", 1.0))],
        [("composite", 2.0)],
    ),
    "cases-disagree": (
        [row(p, s, shape=(4, 2, n, 64)) for n in (100, 128) for p, s in (("triton", n / 110), ("sdpa", 1.0))],
        [],
    ),
}


def machine(gpu=True):
    return {"gpu": gpu, "device": "NVIDIA None", "git": "0", "torch": "2"}


@pytest.mark.parametrize(("found", "expected"), ROWS.values(), ids=ROWS)
def test_a_class_takes_another_backend_where_it_was_faster(found, expected):
    assert [(c["backend"], c["times"]) for c in choices.classes(Results(machine(), found))] == expected


CLASSES = {
    "mssa": ((4, 2, 100, 64), {"causal": True}, ([64], 128, True)),
    "tssa": ((4, 2, 128, 48), {}, ([48], 128, False)),
    "ista": ((2, 65, 32), {}, ([32], 256, False)),
    "ista_overcomplete": ((2, 64, 32, 128), {}, ([32, 128], 128, False)),
}


@pytest.mark.parametrize(("op", "shape", "options", "expected"), [(op, *c) for op, c in CLASSES.items()], ids=CLASSES)
def test_a_class_has_the_sizes_of_its_calls(op, shape, options, expected):
    bench = "ista" if "ista" in op else op
    found = [row(p, s, op, "forward", shape, bench=bench, options=options) for p, s in (("triton", 2.0), ("cpp", 1.0))]
    (one,) = choices.classes(Results(machine(), found))
    assert (one["sizes"], one["length"], one["causal"]) == expected
    assert (one["op"], one["direction"], one["dtype"]) == (op, "forward", "bfloat16")


def test_only_a_gpu_has_a_table():
    found = [row("triton", 1.2), row("sdpa", 1.0)]
    every = {"gpu": Results(machine(), found), "cpu": Results(machine(gpu=False), found)}
    assert list(choices.files(every)) == [measured.path_of("NVIDIA None")]
    assert choices.table(every).count("NVIDIA None") == 1
