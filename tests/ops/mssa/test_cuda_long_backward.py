"""The backward of long rows on Hopper GPUs, under the emulator: against float64, and broken on purpose."""

import pytest
import torch

from crate_kernels.ops.mssa.call import MSSACall
from crate_kernels.ops.mssa.cuda import long_rows
from tests.ops.mssa.heads import CAUSAL, LONG_CASES, LongRows, often, often_both_ways
from tests.ops.mssa.heads_broken import BROKEN_LONG_BACKWARD, LONG_BACKWARD_FILES
from tests.ops.mssa.test_cuda_heads import (
    DTYPES,
    HOPPER,
    SPREADS,
    in_every_order,
    large,
    ones,
    run_and_check,
)

LATE = ["packed", "72-channels", "many-tiles", "causal-padded", "causal-128-channels"]
EARLY = ["257-tokens", "causal-holes"]
ELSEWHERE = pytest.mark.exhaustive


@pytest.mark.parametrize(("case", "early"), often_both_ways(LONG_CASES, LATE, EARLY))
def test_the_backward_of_long_rows(case, early, device):
    device(**HOPPER, early=early)
    run_and_check(LongRows(case, torch.bfloat16))


@pytest.mark.parametrize("case", often(["causal-padded", "257-tokens", "packed", "128-channels"], ["causal-padded"]))
def test_the_backward_of_long_rows_in_fp16(case, device):
    device(**HOPPER)
    run_and_check(LongRows(case, torch.float16))


@DTYPES
@SPREADS
def test_a_head_whose_lse_spreads_too_far_is_left(spread, takes_bf16, takes_fp16, dtype, device):
    device(**HOPPER)
    case = LongRows((64, 260, {}), dtype, spread=spread)
    dw, left = case.run()
    takes = takes_fp16 if dtype == torch.float16 else takes_bf16
    assert left == [0 if takes else case.seqlen] * 2
    if takes:
        case.check(dw)


@pytest.mark.parametrize(
    ("shape", "change", "dtype"),
    [
        ((64, 300, {**CAUSAL, "kept": (300, 150), "drawn": "normed"}), ones, torch.bfloat16),
        pytest.param((64, 300, {"drawn": "normed"}), ones, torch.float16, marks=ELSEWHERE),
        ((64, 260, {}), large, torch.bfloat16),
        ((64, 260, {}), large, torch.float16),
    ],
    ids=["ones-causal-padded", "ones-fp16", "large-bf16", "large-fp16"],
)
def test_gradients_that_rounding_would_spoil(shape, change, dtype, device):
    device(**HOPPER)
    case = LongRows(shape, dtype)
    change(case)
    run_and_check(case)


def test_results_do_not_depend_on_the_order_of_blocks(device):
    results = []
    for descending in (False, True):
        device(**HOPPER, descending=descending)
        results.append(LongRows("causal-holes", torch.bfloat16).run()[0])
    assert torch.equal(*results)


def test_numbers_that_are_not_finite_stay_in_their_head(device):
    device(**HOPPER)
    case = LongRows((64, 260, {"kept": (260, 200)}), torch.bfloat16)
    case.w[0, 0, 7] = torch.inf
    case.w[1, 1, 3, 5] = torch.nan
    dw, left = case.run()
    for index in range(4):
        finite = bool(dw[index // 2, index % 2].isfinite().all())
        assert finite != (index in (0, 3)) or left[index]
        assert index in (0, 3) or not left[index]


@pytest.mark.parametrize("change", ["no-dout", "strided-dout", "short", "dropout"])
def test_other_calls_are_left_to_other_kernels(change, device):
    device(**HOPPER)
    w = torch.zeros(1, 2, 256 if change == "short" else 300, 64, dtype=torch.bfloat16)
    dout = w.transpose(2, 3).contiguous().transpose(2, 3) if change == "strided-dout" else w
    call = MSSACall(seed=torch.tensor(3)) if change == "dropout" else MSSACall()
    assert not long_rows.serves_backward(w, None if change == "no-dout" else dout, w, call)
    assert long_rows.serves_forward(w, w, call) == ("dout" in change)


def test_blocks_fit():
    assert max(long_rows.backward_shared_bytes(dim) for dim in (64, 128)) <= 232448


@pytest.mark.exhaustive
@pytest.mark.parametrize("change", BROKEN_LONG_BACKWARD.values(), ids=BROKEN_LONG_BACKWARD)
def test_a_broken_kernel_is_found(change, broken, device):
    """The emulator stops it, or its numbers are wrong, in one order of threads and products or the other."""
    before, after, case = change
    broken(LONG_BACKWARD_FILES, before, after)
    with pytest.raises((RuntimeError, AssertionError), match=r"emulator: |Measurement|any\(|not close"):
        in_every_order(device, run_and_check, case, LongRows)
