"""The forward of long rows on Hopper GPUs, under the emulator: against float64, and broken on purpose."""

import pytest
import torch

from crate_kernels.ops.mssa.call import MSSACall
from crate_kernels.ops.mssa.cuda import long_rows
from tests.ops.mssa.heads import CAUSAL, LONG_CASES, LongRows, often, often_both_ways
from tests.ops.mssa.heads_broken import BROKEN_LONG_FORWARD, LONG_FORWARD_FILES
from tests.ops.mssa.test_cuda_heads import (
    DTYPES,
    HOPPER,
    SPREADS,
    in_every_order,
    run_and_check_forward,
)

LATE = ["packed", "72-channels", "many-tiles", "causal-padded", "causal-128-channels"]
EARLY = ["257-tokens", "causal-holes"]


@pytest.mark.parametrize(("case", "early"), often_both_ways(LONG_CASES, LATE, EARLY))
def test_the_forward_of_long_rows(case, early, device):
    device(**HOPPER, early=early)
    run_and_check_forward(LongRows(case, torch.bfloat16))


@pytest.mark.parametrize("case", often(["257-tokens", "holes", "128-channels", "causal-packed"], ["257-tokens"]))
def test_the_forward_of_long_rows_in_fp16(case, device):
    device(**HOPPER)
    run_and_check_forward(LongRows(case, torch.float16))


@DTYPES
@SPREADS
def test_a_head_whose_norms_spread_too_far_is_left(spread, takes_bf16, takes_fp16, dtype, device):
    device(**HOPPER)
    case = LongRows((64, 260, {}), dtype, spread=spread)
    out, lse, left = case.run_forward()
    takes = takes_fp16 if dtype == torch.float16 else takes_bf16
    assert left == [0 if takes else case.seqlen] * 2
    if takes:
        case.check_forward(out, lse)


def test_causal_what_is_before_a_row_out_of_range_is_taken(device):
    device(**HOPPER)
    near, far = (LongRows((64, 300, CAUSAL), torch.bfloat16) for _ in range(2))
    far.w = far.w.clone()
    far.w[:, 1, 270] *= 40
    far.w[:, 1, 270:] = far.w[:, 1, 270:271] * torch.linspace(1, -1, 30).view(-1, 1)
    (out, lse, left), (other, others_lse, others_left) = near.run_forward(), far.run_forward()
    assert left == [0, 0]
    assert others_left[0] == 0
    assert 0 < others_left[1] < 30
    assert torch.equal(out[:, :, :270], other[:, :, :270])
    assert torch.equal(lse[..., :270], others_lse[..., :270])


def test_a_prefix_does_not_depend_on_later_tokens(device):
    """Nor on how many there are."""
    device(**HOPPER)
    case = LongRows("causal", torch.bfloat16)
    out, lse, left = case.run_forward()
    assert not any(left)
    case.w[:, :, 290:] *= 1.5
    other, others_lse, _ = case.run_forward()
    assert torch.equal(out[:, :, :290], other[:, :, :290])
    assert torch.equal(lse[..., :290], others_lse[..., :290])
    assert not torch.equal(out[:, :, 290:], other[:, :, 290:])
    case.w, case.dout, case.dlse = case.w[:, :, :290], case.dout[:, :, :290], None
    shorter, shorter_lse, _ = case.run_forward()
    assert torch.equal(out[:, :, :290], shorter)
    assert torch.equal(lse[..., :290], shorter_lse)


@pytest.mark.parametrize(("seqlen", "times", "taken"), [(300, -2.292, True), (600, -2.33, False)], ids=["300", "600"])
def test_the_more_keys_the_larger_a_sum_of_fp16_must_be(seqlen, times, taken, device):
    """Equal tokens and one opposite to them, so long that the others' sums are 0.2."""
    device(**HOPPER)
    case = LongRows((64, seqlen, {}), torch.float16)
    case.w.fill_(1.0)
    case.w[:, 1, 7] *= times
    out, lse, left = case.run_forward()
    assert left == [0, 0 if taken else seqlen]
    if taken:
        case.check_forward(out, lse)


def test_numbers_that_are_not_finite_stay_in_their_head(device):
    device(**HOPPER)
    case = LongRows((64, 260, {"kept": (260, 259)}), torch.bfloat16)
    case.w[0, 0, 7] = torch.inf
    case.w[1, 1, 3, 5] = torch.nan
    case.w[1, 0, 259] = torch.nan  # no key
    result, _, left = case.run_forward()
    assert [count != 0 for count in left] == [True, False, True, True]
    assert result[0, 1].isfinite().all()
    assert result[1, 0, :259].isfinite().all()


@pytest.mark.parametrize(
    "change", ["another-gpu", "dropout", "threshold", "float32", "short", "wide", "odd-rows", "strided", "negative"]
)
def test_other_calls_are_left_to_other_kernels(change, device):
    device(**{**HOPPER, "capability": 100 if change == "another-gpu" else 90})
    head_dim, seqlen = 136 if change == "wide" else 64, 256 if change == "short" else 300
    w = torch.zeros(1, 2, seqlen, head_dim, dtype=torch.float32 if change == "float32" else torch.bfloat16)
    given = {
        "negative": {"scale": -1.0},
        "dropout": {"seed": torch.tensor(3)},
        "threshold": {"threshold": 0.1},
    }
    if change == "odd-rows":
        w = w[..., :60]
    if change == "strided":
        w = w.transpose(2, 3).contiguous().transpose(2, 3)
    assert not long_rows.serves_forward(w, w, MSSACall(**given.get(change, {})))


@pytest.mark.exhaustive
@pytest.mark.parametrize("change", BROKEN_LONG_FORWARD.values(), ids=BROKEN_LONG_FORWARD)
def test_a_broken_kernel_is_found(change, broken, device):
    """The emulator stops it, or its numbers are wrong, in one order of threads and products or the other."""
    before, after, case = change
    broken(LONG_FORWARD_FILES, before, after)
    with pytest.raises((RuntimeError, AssertionError), match=r"emulator: |Measurement|any\(|not close"):
        in_every_order(device, run_and_check_forward, case, LongRows)
