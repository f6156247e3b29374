"""Launch tables: which row a call gets, and the settings that every launch shares."""

import pytest
import torch

from crate_kernels._triton import launch
from crate_kernels._triton.table import LaunchRow, Table, bucket, forced

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
TABLE = Table(
    "test",
    {
        "interpreter": (LaunchRow({"X": 0}),),
        "sm_80": (LaunchRow({"X": 80}),),
        "sm_90": (
            LaunchRow({"X": 1}, head_dim=64, seqlen=256, half=True),
            LaunchRow({"X": 2}, head_dim=64, causal=True),
            LaunchRow({"X": 3}, head_dim=128),
            LaunchRow({"X": 4}),
        ),
        "gfx942": (LaunchRow({"X": 942}),),
    },
)


def pretend(monkeypatch, key):
    monkeypatch.setattr(launch, "arch", lambda device: key)
    monkeypatch.setattr(launch, "gpu_name", lambda device: "")


@pytest.mark.parametrize(
    ("head_dim", "seqlen", "causal", "dtype", "expected"),
    [
        (64, 197, False, torch.bfloat16, 1),
        (48, 256, True, torch.float16, 1),
        (64, 257, True, torch.float16, 2),
        (64, 197, False, torch.float32, 3),
        (80, 197, True, torch.float16, 3),
        (256, 10**7, False, torch.float16, 4),
    ],
)
def test_the_first_row_that_fits_is_taken(head_dim, seqlen, causal, dtype, expected, monkeypatch):
    pretend(monkeypatch, "sm_90")
    assert TABLE.config(CUDA, head_dim, seqlen, causal, dtype)["X"] == expected


@pytest.mark.parametrize(
    ("key", "expected"),
    [("sm_75", 80), ("sm_86", 80), ("sm_89", 80), ("sm_90", 3), ("sm_100", 3), ("gfx90a", 942), ("gfx950", 942)],
)
def test_an_unknown_gpu_gets_the_nearest_older_one_of_its_vendor(key, expected, monkeypatch):
    pretend(monkeypatch, key)
    assert TABLE.config(CUDA, 128, 1000, False, torch.float16)["X"] == expected


def test_cpu_tensors_get_the_row_of_the_interpreter():
    assert TABLE.config(CPU, 64, 100, False, torch.float32) == {"X": 0}


def test_a_forced_configuration_is_taken_and_returned():
    with forced(TABLE, {"X": 7}):
        assert TABLE.config(CPU, 64, 100, False, torch.float32) == {"X": 7}
    assert TABLE.config(CPU, 64, 100, False, torch.float32) == {"X": 0}


@pytest.mark.parametrize(
    ("seqlen", "expected"), [(0, 1), (1, 1), (2, 2), (197, 256), (256, 256), (257, 512), (2**30, 2**20)]
)
def test_lengths_share_buckets(seqlen, expected):
    assert bucket(seqlen) == expected


@pytest.fixture
def precision():
    """Give torch's settings of fp32 products back; the newer interface comes last, as the older cannot read it."""
    yield
    torch.backends.cuda.matmul.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(("setting", "expected"), [("highest", "ieee"), ("high", "tf32x3"), ("medium", "tf32")])
def test_products_are_as_exact_as_torch_says(setting, expected, precision):
    torch.set_float32_matmul_precision(setting)
    assert launch.dot_precision(torch.float32) == expected
    assert launch.dot_precision(torch.bfloat16) == "ieee"


def test_the_newer_setting_allows_plain_tf32(precision):
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    assert launch.dot_precision(torch.float32) == "tf32"
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    assert launch.dot_precision(torch.float32) == "ieee"


@pytest.mark.parametrize("p", [1e-12, 0.3, 0.5, 1 - 1e-12])
def test_the_largest_dropped_word_is_an_int32(p):
    assert -(2**31) <= launch.drop_last(p) < 2**31
    assert launch.drop_last(p) + 2**31 < p * 2**32 <= launch.drop_last(p) + 2**31 + 1
