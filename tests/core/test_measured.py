"""Which class a call is of on a GPU that was timed, and which backend that class takes."""

import json
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode

import crate_kernels
from crate_kernels._core import backends, measured
from crate_kernels.ops.mssa import order
from tests.tools import timed_gpu

ROOT = Path(__file__).parents[2]
CLASS = {"op": "mssa", "dtype": "bfloat16", "sizes": [16], "length": 64, "causal": True}
ROWS = [CLASS | {"direction": "both", "backend": "composite"}, CLASS | {"direction": "forward", "backend": "cpp"}]


@pytest.fixture
def table(tmp_path):
    with timed_gpu.with_table(ROWS, tmp_path):
        yield


def fastest(op="mssa", sizes=(16,), length=64, causal=True, dtype=torch.bfloat16, tracked=True):
    return measured.fastest(op, sizes, length, causal, (torch.ones(2, dtype=dtype, requires_grad=tracked),))


CALLS = {
    "both": ({}, "composite"),
    "forward": ({"tracked": False}, "cpp"),
    "shortest": ({"length": 33}, "composite"),
    "too-short": ({"length": 32}, None),
    "too-long": ({"length": 65}, None),
    "full": ({"causal": False}, None),
    "other-width": ({"sizes": (32,)}, None),
    "more-sizes": ({"sizes": (16, 16)}, None),
    "other-dtype": ({"dtype": torch.float16}, None),
    "other-op": ({"op": "tssa"}, None),
}


@pytest.mark.parametrize(("call", "expected"), CALLS.values(), ids=CALLS)
def test_a_call_takes_what_its_class_has(call, expected, table):
    assert fastest(**call) == expected


def test_without_gradients_it_is_forward_alone(table):
    with torch.no_grad():
        assert fastest() == "cpp"


def test_a_call_that_autocast_changes_is_of_no_class(table):
    with torch.autocast("cpu", dtype=torch.float16):
        assert fastest() is None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fastest() == "composite"


def test_what_a_transform_makes_of_a_call_is_of_no_class(table):
    seen = []
    torch.func.grad(lambda x: (seen.append(fastest()), x.sum())[1])(torch.ones(2))
    assert seen == [None]


def test_a_device_that_was_not_timed_has_an_empty_table(monkeypatch):
    assert measured.table(torch.ones(2)) == {}
    with timed_gpu.named("NVIDIA GeForce None"):
        assert measured.table(torch.ones(2)) == {}
        assert fastest() is None
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA None")
    assert [measured.gpu_name(torch.device(*d)) for d in (("cuda", 0), ("cuda", 1), ("cuda",), ("cpu",))] == [
        "NVIDIA None",
        "",
        "NVIDIA None",
        "",
    ]


def test_another_kind_of_device_leaves_no_table(monkeypatch):
    monkeypatch.setattr(measured, "_tables", {})
    assert measured.table(torch.ones(2, device="meta")) == {}
    assert measured._tables == {}
    measured.table(torch.ones(2))
    assert measured._tables == {-1: {}}


def test_what_is_no_plain_tensor_has_an_empty_table(table):
    class Own(torch.Tensor):
        pass

    assert measured.table(torch.nn.Parameter(torch.ones(2))) != {}
    assert measured.table(torch.ones(2).as_subclass(Own)) == {}
    with FakeTensorMode():
        assert measured.table(torch.empty(2)) == {}


FILES = sorted(measured.FOLDER.glob("*.json"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_shipped_table_is_found_by_its_gpu(path):
    body = json.loads(path.read_text())
    assert measured.path_of(body["gpu"]) == path
    assert sum(map(len, measured.read(body["gpu"]).values())) == len(body["classes"])
    for row in body["classes"]:
        assert row["backend"] in backends.names()
        assert callable(getattr(crate_kernels, row["op"]))


H200 = {
    "causal-both": ((True, True, 16384, 128), "composite"),
    "causal-forward": ((True, False, 16384, 128), None),
    "full": ((False, True, 16384, 128), None),
    "longer": ((True, True, 16385, 128), None),
    "narrower": ((True, True, 16384, 64), None),
}


@pytest.mark.parametrize(("call", "expected"), H200.values(), ids=H200)
def test_an_h200_takes_cudnn_where_that_was_faster(call, expected):
    causal, tracked, seqlen, head_dim = call
    w = torch.empty(1, dtype=torch.bfloat16).expand(1, 1, seqlen, head_dim).requires_grad_(tracked)
    with timed_gpu.named("NVIDIA H200"):
        assert order.fastest(w, causal) == expected


@pytest.fixture(params=["deterministic", "no-cudnn"])
def excluded(request):
    if request.param == "deterministic":
        torch.use_deterministic_algorithms(True)
    else:
        torch.backends.cuda.enable_cudnn_sdp(False)
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cuda.enable_cudnn_sdp(True)


def test_cudnn_is_not_taken_where_the_user_excludes_it(excluded):
    w = torch.empty(1, dtype=torch.bfloat16).expand(1, 1, 16384, 128).requires_grad_()
    with timed_gpu.named("NVIDIA H200"):
        assert order.fastest(w, True) is None


def test_a_wheel_has_the_tables():
    assert f'"_core/{measured.FOLDER.name}/*.json"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize(("length", "rounded"), [(-1, 1), (0, 1), (1, 1), (2, 2), (3, 4), (64, 64), (65, 128)])
def test_lengths_are_rounded_up_to_powers_of_two(length, rounded):
    assert measured.bucket(length) == rounded


def test_no_gpu_has_no_table():
    assert measured.read("") == {}
