"""The kernels of long rows on Hopper GPUs, under the emulator, against float64."""

from types import SimpleNamespace

import pytest
import torch

from crate_kernels._core import plan
from crate_kernels._triton import table
from crate_kernels.ops.mssa.call import MSSACall
from crate_kernels.ops.mssa.cuda import long_pairs, long_rows
from tests.ops.mssa.heads import CAUSAL, LONG_BACKWARD_CASES, LONG_CASES, LongPairs, LongRows, often, often_both_ways
from tests.ops.mssa.hopper import HOPPER, run_and_check, run_and_check_forward

LATE = ["packed", "72-channels", "many-tiles", "causal-padded", "causal-128-channels"]
EARLY = ["257-tokens", "causal-holes"]


@pytest.mark.parametrize("check", [run_and_check_forward, run_and_check], ids=["forward", "backward"])
@pytest.mark.parametrize(("case", "early"), often_both_ways(LONG_CASES, LATE, EARLY))
def test_long_rows(case, early, check, device):
    device(**HOPPER, early=early)
    check(LongRows(case, torch.bfloat16))


@pytest.mark.parametrize("kind", [LongRows, pytest.param(LongPairs, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("case", often(LONG_BACKWARD_CASES, ["104-channels-padded"]))
def test_the_backward_of_what_whole_heads_have_no_room_for(kind, case, device):
    device(**HOPPER)
    run_and_check(kind(case, torch.bfloat16))


@pytest.mark.parametrize("case", often(["257-tokens", "holes", "128-channels", "causal-packed"], ["257-tokens"]))
def test_the_forward_of_long_rows_in_fp16(case, device):
    device(**HOPPER)
    run_and_check_forward(LongRows(case, torch.float16))


@pytest.mark.parametrize(
    "case", often(["causal-padded", "257-tokens", "packed", "128-channels", "88-channels-packed"], ["causal-padded"])
)
def test_the_backward_of_long_rows_in_fp16(case, device):
    device(**HOPPER)
    run_and_check(LongRows(case, torch.float16))


@pytest.mark.parametrize(("case", "early"), often_both_ways(LONG_CASES, ["packed"], ["causal-padded"]))
def test_the_backward_by_pairs(case, early, device):
    device(**HOPPER, early=early)
    run_and_check(LongPairs(case, torch.bfloat16))


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ["257-tokens", "packed", "padded", "causal-padded", "128-channels"])
def test_the_backward_by_pairs_in_fp16(case, device):
    device(**HOPPER)
    run_and_check(LongPairs(case, torch.float16))


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


def test_results_do_not_depend_on_the_order_of_blocks(device):
    results = []
    for descending in (False, True):
        device(**HOPPER, descending=descending)
        results.append(LongRows("causal-holes", torch.bfloat16).run()[0])
    assert torch.equal(*results)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ["257-tokens", "causal-holes"])
def test_blocks_of_pairs_may_come_in_any_order(case, device):
    device(**HOPPER, descending=True)
    run_and_check(LongPairs(case, torch.bfloat16))


@pytest.fixture
def deterministic():
    """Set what torch.use_deterministic_algorithms sets, which would import the compiler first."""
    yield lambda wanted: torch._C._set_deterministic_algorithms(wanted, warn_only=False)
    torch._C._set_deterministic_algorithms(False, warn_only=False)


def test_nothing_takes_pairs_where_sums_must_have_one_order(deterministic, device):
    device(**HOPPER)
    w = torch.zeros(1, 2, 300, 64, dtype=torch.bfloat16)
    with table.forced(long_pairs.BACKWARD, {"PAIRS": 1}):
        for wanted in (True, False):
            deterministic(wanted)
            assert long_rows.serves_backward(w, w, w, MSSACall())
            assert long_pairs.serves_backward(w, w, w, MSSACall()) != wanted


def test_a_call_is_not_repeated_where_sums_must_have_another_order(deterministic):
    """By a plan of before the setting changed."""
    on_gpu, found = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16), []
    for wanted in (True, False):
        deterministic(wanted)
        found.append(plan.settings(on_gpu))
    assert found[0] != found[1] == ()


def test_blocks_fit():
    widths = (64, 128)
    assert max(long_rows.backward_shared_bytes(dim) for dim in widths) <= HOPPER["shared_limit"]
    assert max(long_pairs.shared_bytes(dim, both) for dim in widths for both in (False, True)) <= HOPPER["shared_limit"]
