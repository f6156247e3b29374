"""The backward of long rows by pairs on Hopper GPUs, under the emulator: against float64, and broken on purpose."""

from types import SimpleNamespace

import pytest
import torch

from crate_kernels import mssa
from crate_kernels._core import plan
from crate_kernels._triton import table
from crate_kernels.ops.mssa.call import MSSACall
from crate_kernels.ops.mssa.cuda import long_pairs, long_rows
from tests.ops import test_uncovered
from tests.ops.mssa.heads import LONG_CASES, LongPairs, often_both_ways
from tests.ops.mssa.pairs_broken import BROKEN, FILES
from tests.ops.mssa.test_cuda_heads import DTYPES, HOPPER, SPREADS, in_every_order, large, ones, run_and_check
from tests.ops.mssa.test_cuda_heads_taken import both_ways, hopper  # noqa: F401  # a fixture
from tests.ops.mssa.test_cuda_long_taken import FORWARD, taking

KERNELS = ["long_range_kernel", "long_scale_kernel", "long_delta_kernel", "long_pairs_kernel", "long_round_kernel"]
BACKWARD = [*KERNELS, "mma_left_shift_kernel", "mma_left_backward_kernel"]
ELSEWHERE = pytest.mark.exhaustive


@pytest.mark.parametrize(("case", "early"), often_both_ways(LONG_CASES, ["packed"], ["causal-padded"]))
def test_the_backward_by_pairs(case, early, device):
    device(**HOPPER, early=early)
    run_and_check(LongPairs(case, torch.bfloat16))


@ELSEWHERE
@pytest.mark.parametrize("case", ["257-tokens", "packed", "padded", "causal-padded", "128-channels"])
def test_the_backward_by_pairs_in_fp16(case, device):
    device(**HOPPER)
    run_and_check(LongPairs(case, torch.float16))


@ELSEWHERE
@DTYPES
@SPREADS
def test_a_head_whose_lse_spreads_too_far_is_left(spread, takes_bf16, takes_fp16, dtype, device):
    device(**HOPPER)
    case = LongPairs((64, 260, {}), dtype, spread=spread)
    dw, left = case.run()
    takes = takes_fp16 if dtype == torch.float16 else takes_bf16
    assert left == [0 if takes else case.seqlen] * 2
    if takes:
        case.check(dw)


@ELSEWHERE
@pytest.mark.parametrize(
    ("shape", "change", "dtype"),
    [
        ((64, 300, {"causal": True, "drawn": "normed", "kept": (300, 150)}), ones, torch.bfloat16),
        ((64, 300, {"drawn": "normed"}), ones, torch.float16),
        ((64, 260, {}), large, torch.bfloat16),
        ((64, 260, {}), large, torch.float16),
    ],
    ids=["ones-causal-padded", "ones-fp16", "large-bf16", "large-fp16"],
)
def test_gradients_that_rounding_would_spoil(shape, change, dtype, device):
    device(**HOPPER)
    case = LongPairs(shape, dtype)
    change(case)
    run_and_check(case)


@ELSEWHERE
@pytest.mark.parametrize("case", ["257-tokens", "causal-holes"])
def test_blocks_may_come_in_any_order(case, device):
    device(**HOPPER, descending=True)
    run_and_check(LongPairs(case, torch.bfloat16))


@ELSEWHERE
def test_numbers_that_are_not_finite_stay_in_their_head(device):
    device(**HOPPER)
    case = LongPairs((64, 260, {"kept": (260, 200)}), torch.bfloat16)
    case.w[0, 0, 7] = torch.inf
    case.w[1, 1, 3, 5] = torch.nan
    dw, left = case.run()
    for index in range(4):
        finite = bool(dw[index // 2, index % 2].isfinite().all())
        assert finite != (index in (0, 3)) or left[index]
        assert index in (0, 3) or not left[index]


@pytest.fixture
def taken(hopper):  # noqa: F811
    """Have pairs taken, as tuning may find."""
    with taking(), table.forced(long_pairs.BACKWARD, {"PAIRS": 1}):
        yield hopper


@ELSEWHERE
@pytest.mark.parametrize("case", ["257-tokens", "packed", "causal-padded"])
def test_where_they_are_chosen_they_are_launched_and_repeated(case, taken, backend, repeated_calls):
    given = LongPairs(case, torch.bfloat16)
    out, lse, dw = both_ways(given, backend)
    assert [*dict.fromkeys(taken())] == FORWARD + BACKWARD
    given.check_forward(out, lse)
    given.check(dw)
    if repeated_calls is None:
        pytest.skip("needs the C++ extension, which repeats calls: python -m crate_kernels build")
    assert (repeated_calls.repeated, repeated_calls.refused) == (2, [])
    given.check(both_ways(given, backend)[2])


@ELSEWHERE
@pytest.mark.parametrize("name", ["257-tokens", "causal"])
def test_heads_out_of_range_are_those_of_the_other_kernels(name, taken, backend):
    """Bit for bit; others are taken."""
    near = LongPairs(name, torch.bfloat16)
    w = near.w.clone()
    w[:, 1, 250] *= 15
    mixed = near.with_tokens(w)
    found = both_ways(mixed, backend)
    with table.forced(long_pairs.BACKWARD, {"PAIRS": 0}), table.forced(long_rows.BACKWARD, {"LONG": 0}):
        others = both_ways(mixed, backend)
    assert torch.equal(found[2][0, 1], others[2][0, 1])
    assert not torch.equal(found[2][0, 0], others[2][0, 0])
    mixed.check(found[2])


@ELSEWHERE
@pytest.mark.parametrize("offsets", test_uncovered.OFFSETS.values(), ids=test_uncovered.OFFSETS)
def test_rows_that_no_sequence_covers_are_zero(offsets, taken, backend):
    def attend(w, **packed):
        out, lse = mssa(w.bfloat16(), return_lse=True, **{**packed, "max_seqlen": 300})
        return out.float(), lse

    test_uncovered.check(attend, offsets, backend, "cpu")
    assert "long_pairs_kernel" in taken()


@pytest.fixture
def deterministic():
    """Set what torch.use_deterministic_algorithms sets, which would import the compiler first."""
    yield lambda wanted: torch._C._set_deterministic_algorithms(wanted, warn_only=False)
    torch._C._set_deterministic_algorithms(False, warn_only=False)


def test_nothing_takes_them_where_sums_must_have_one_order(deterministic, device):
    device(**HOPPER)
    w = torch.zeros(1, 2, 300, 64, dtype=torch.bfloat16)
    with table.forced(long_pairs.BACKWARD, {"PAIRS": 1}):
        for wanted in (True, False):
            deterministic(wanted)
            assert long_rows.serves_backward(w, w, w, MSSACall())
            assert long_pairs.take_backward(w, w, w, MSSACall()) != wanted


def test_a_call_is_not_repeated_where_sums_must_have_another_order(deterministic):
    """By a plan of before the setting changed."""
    on_gpu, found = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16), []
    for wanted in (True, False):
        deterministic(wanted)
        found.append(plan.settings(on_gpu))
    assert found[0] != found[1] == ()


@pytest.mark.parametrize("change", ["by-default", "no-dout", "strided-dout", "short", "dropout"])
def test_other_calls_are_left_to_other_kernels(change, device):
    device(**HOPPER)
    w = torch.zeros(1, 2, 256 if change == "short" else 300, 64, dtype=torch.bfloat16)
    dout = w.transpose(2, 3).contiguous().transpose(2, 3) if change == "strided-dout" else w
    call = MSSACall(seed=torch.tensor(3)) if change == "dropout" else MSSACall()
    given = (w, None if change == "no-dout" else dout, w, call)
    assert long_pairs.serves_backward(*given) == (change == "by-default")
    assert not long_pairs.take_backward(*given)


def test_blocks_fit():
    assert max(long_pairs.shared_bytes(dim, both) for dim in (64, 128) for both in (False, True)) <= 232448


@ELSEWHERE
@pytest.mark.parametrize("change", BROKEN.values(), ids=BROKEN)
def test_a_broken_kernel_is_found(change, broken, device):
    """The emulator stops it, or its numbers are wrong, in one order of threads and products or the other."""
    before, after, case = change
    broken(FILES, before, after)
    with pytest.raises((RuntimeError, AssertionError), match=r"emulator: |Measurement|any\(|not close"):
        in_every_order(device, run_and_check, case, LongPairs)
