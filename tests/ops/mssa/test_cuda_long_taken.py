"""The kernels of long rows behind mssa, under the emulator: who takes them, what they leave, what tuning times."""

from contextlib import contextmanager

import pytest
import torch

from crate_kernels import mssa
from crate_kernels._triton import table, tune
from crate_kernels._triton.table import LaunchRow
from crate_kernels.cli.tune import judge
from crate_kernels.ops.mssa import timed
from crate_kernels.ops.mssa.cuda import heads, long_rows
from tests.ops import test_uncovered
from tests.ops.mssa.heads import Heads, LongRows, often
from tests.ops.mssa.test_cuda_heads_taken import DTYPES, both_ways, hopper  # noqa: F401  # a fixture
from tests.tools.emulator import emulated

FORWARD = ["long_measure_kernel", "long_forward_kernel", "mma_left_forward_kernel"]
BACKWARD = [
    *("long_range_kernel", "long_scale_kernel", "long_delta_kernel", "long_backward_kernel"),
    *("mma_left_shift_kernel", "mma_left_backward_kernel"),
]


@contextmanager
def taking():
    """Have long rows taken in both directions, as tuning may find."""
    with table.forced(long_rows.FORWARD, {"LONG": 1}), table.forced(long_rows.BACKWARD, {"LONG": 1}):
        yield


@pytest.fixture
def taken(hopper):  # noqa: F811
    """Do so in a test."""
    with taking():
        yield hopper


def test_nothing_takes_them_by_default(hopper, backend):  # noqa: F811
    both_ways(LongRows("257-tokens", torch.bfloat16), backend)
    assert {*hopper()} == {"mma_forward_kernel", "mma_shift_kernel", "mma_backward_kernel"}


@pytest.mark.parametrize(
    "case", often(["257-tokens", "packed", "padded", "causal", "causal-packed"], ["packed", "causal"])
)
def test_where_they_are_chosen_they_are_launched_and_repeated(case, taken, backend, repeated_calls):
    given = LongRows(case, torch.bfloat16)
    out, lse, dw = both_ways(given, backend)
    assert [*dict.fromkeys(taken())] == FORWARD + BACKWARD
    given.check_forward(out, lse)
    given.check(dw)
    if repeated_calls is None:
        pytest.skip("needs the C++ extension, which repeats calls: python -m crate_kernels build")
    assert (repeated_calls.repeated, repeated_calls.refused) == (2, [])
    assert all(map(torch.equal, (out, lse, dw), both_ways(given, backend)))


def test_short_rows_are_those_of_whole_heads(taken, backend):
    given = Heads("197-tokens", torch.bfloat16)
    both_ways(given, backend)
    assert {*taken()}.isdisjoint(FORWARD + BACKWARD)
    with table.forced(heads.FORWARD, {"WHOLE": 1}):
        both_ways(given, backend)
        assert "head_forward_kernel" in taken()
        both_ways(LongRows("257-tokens", torch.bfloat16), backend)
        names = taken()
        assert "long_forward_kernel" in names
        assert "head_forward_kernel" not in names


@DTYPES
@pytest.mark.parametrize(("name", "first"), [("padded", 0), ("causal", 301)])
def test_heads_out_of_range_are_those_of_the_other_kernels(name, first, dtype, hopper, backend):  # noqa: F811
    """Bit for bit, causal from the first row that is. Others have the bits that they have without them."""
    near = LongRows(name, dtype)
    w = near.w.clone()
    w[:, 1, 300] *= 15
    mixed = near.with_tokens(w)
    others = both_ways(mixed, backend)
    with taking():
        found, alone = both_ways(mixed, backend), both_ways(near, backend)
    for result, other, own in zip(found[:2], others[:2], alone[:2], strict=True):
        assert torch.equal(result[:, 0], own[:, 0])
        assert torch.equal(result[0, 1, first:], other[0, 1, first:])
        assert torch.equal(result[:, 1, : min(first, 300)], own[:, 1, : min(first, 300)])
    mixed.check_forward(*found[:2])
    mixed.check(found[2])
    if first == 0:
        assert torch.equal(found[2][0, 1], others[2][0, 1])


@pytest.mark.parametrize("offsets", test_uncovered.OFFSETS.values(), ids=test_uncovered.OFFSETS)
def test_rows_that_no_sequence_covers_are_zero(offsets, taken, backend):
    def attend(w, **packed):
        out, lse = mssa(w.bfloat16(), return_lse=True, **{**packed, "max_seqlen": 300})
        return out.float(), lse

    test_uncovered.check(attend, offsets, backend, "cpu")
    assert "long_forward_kernel" in taken()


def test_what_is_no_number_stays_in_its_sequence(taken, backend):
    case = LongRows("packed", torch.bfloat16)
    w = case.w.clone()
    w[310, 0] = torch.nan  # of the third sequence
    found, alone = both_ways(case.with_tokens(w), backend), both_ways(case, backend)
    of_sequence = torch.zeros(len(w), 2, dtype=torch.bool)
    of_sequence[301:430, 0] = True
    for result, own in zip(found, alone, strict=True):
        same = of_sequence.t() if result.dim() == 2 else of_sequence
        assert torch.equal(result[~same], own[~same])
        assert not result[same].isfinite().all()


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "backward"])
def test_tuning_times_them(gradient, hopper, monkeypatch):  # noqa: F811
    monkeypatch.setattr(timed, "_TOKENS", 12 * 20)
    causal, table_of = gradient, long_rows.BACKWARD if gradient else long_rows.FORWARD
    make = timed.dense(emulated.on_cuda("mssa"), 260, 64, causal, gradient, "cpu")
    kernels = []

    def clock(call):
        hopper()
        call()
        kernels.append(("long_backward_kernel" if gradient else "long_forward_kernel") in hopper())
        return 1.0 / len(kernels)

    workload = tune.Workload(table_of, LaunchRow({}, 64, 512, causal, half=True), make)
    shipped = table_of.shipped(torch.device("cpu"), 64, 512, causal, torch.float16)
    found = tune.search(workload, shipped, clock, judge)
    assert (found.config, kernels) == ({"LONG": 1}, [False, True])
