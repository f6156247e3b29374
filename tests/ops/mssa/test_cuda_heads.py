"""The kernels of whole heads on Hopper GPUs, under the emulator: against float64, and broken on purpose."""

import pytest
import torch

from crate_kernels.ops.mssa.call import MSSACall
from crate_kernels.ops.mssa.cuda import heads
from tests.ops.mssa.heads import CASES, FORWARD_CASES, Heads, often, often_both_ways
from tests.ops.mssa.heads_broken import BROKEN, BROKEN_FORWARD, HEAD_FILES

HOPPER = {"capability": 90, "shared_limit": 227 * 1024, "multiprocessors": 1}  # a block has several heads
EARLY = ["one-block", "causal-packed"]
LATE = ["197-tokens", "packed", "holes", "40-channels", "causal-padded", "causal-a-tail-of-48"]
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


def run_and_check(case):
    dw, left = case.run()
    assert not any(left)
    case.check(dw)


def run_and_check_forward(case):
    out, lse, left = case.run_forward()
    assert not any(left)
    case.check_forward(out, lse)


@pytest.mark.parametrize(
    ("case", "early"), often_both_ways({**CASES, **FORWARD_CASES}, [*LATE, "a-tail-of-32", "128-channels-long"], EARLY)
)
def test_the_forward_of_heads(case, early, device):
    device(**HOPPER, early=early)
    run_and_check_forward(Heads(case, torch.bfloat16))


@pytest.mark.parametrize(
    "case", often(["197-tokens", "packed", "padded", "holes", "causal-holes"], ["packed", "causal-holes"])
)
def test_the_forward_of_heads_in_fp16(case, device):
    device(**HOPPER)
    run_and_check_forward(Heads(case, torch.float16))


@pytest.mark.parametrize(("case", "early"), often_both_ways(CASES, [*LATE, "lse", "128-channels-padded"], EARLY))
def test_the_backward_of_heads(case, early, device):
    device(**HOPPER, early=early)
    run_and_check(Heads(case, torch.bfloat16))


@pytest.mark.parametrize(
    "case",
    often(["197-tokens", "lse", "packed", "padded", "holes", "causal", "causal-alike"], ["padded", "causal-alike"]),
)
def test_the_backward_of_heads_in_fp16(case, device):
    device(**HOPPER)
    run_and_check(Heads(case, torch.float16))


SPREADS = pytest.mark.parametrize(
    ("spread", "takes_bf16", "takes_fp16"),
    [(1.0, True, True), (1.2, True, True), (2.0, True, False), (3.0, True, False), (5.0, False, False)],
    ids=["equal", "within-fp16", "beyond-fp16", "within-bf16", "beyond-bf16"],
)


@DTYPES
@SPREADS
def test_a_head_whose_lse_spreads_too_far_is_left(spread, takes_bf16, takes_fp16, dtype, device):
    device(**HOPPER)
    case = Heads((64, 200, {}), dtype, spread=spread)
    dw, left = case.run()
    takes = takes_fp16 if dtype == torch.float16 else takes_bf16
    assert left == [0 if takes else case.seqlen] * 6
    if takes:
        case.check(dw)


@DTYPES
@SPREADS
def test_a_head_whose_norms_spread_too_far_is_left(spread, takes_bf16, takes_fp16, dtype, device):
    device(**HOPPER)
    case = Heads((64, 200, {}), dtype, spread=spread)
    out, lse, left = case.run_forward()
    takes = takes_fp16 if dtype == torch.float16 else takes_bf16
    assert left == [0 if takes else case.seqlen] * 6
    if takes:
        case.check_forward(out, lse)


@pytest.mark.parametrize(
    ("dtype", "times", "taken"),
    [(torch.bfloat16, 2, True), (torch.bfloat16, 6, False), (torch.float16, 3, False)],
    ids=["bf16", "beyond-bf16", "beyond-fp16"],
)
def test_a_query_that_is_no_key_may_be_out_of_range(dtype, times, taken, device):
    """Opposite to every key, it has no weight that bounds its sum from below."""
    device(**HOPPER)
    case = Heads((64, 50, {"kept": (49, 49, 49)}), dtype)
    case.w[:, :, 1:] = case.w[:, :, :1]
    case.w[:, :, 49] *= -times
    out, lse, left = case.run_forward()
    assert left == [0 if taken else case.seqlen] * 6
    if taken:
        case.check_forward(out, lse)


def test_a_prefix_does_not_depend_on_later_tokens(device):
    device(**HOPPER)
    case, results = Heads("causal", torch.bfloat16), []
    for times in (1, 1.5):
        case.w[:, :, 100:] *= times
        results.append(case.run_forward())
    (out, lse, left), (other, others_lse, _) = results
    assert not any(left)
    assert torch.equal(out[:, :, :100], other[:, :, :100])
    assert torch.equal(lse[..., :100], others_lse[..., :100])
    assert not torch.equal(out[:, :, 100:], other[:, :, 100:])


def test_the_shift_of_a_row_has_the_longest_token_before_it(device):
    """Tokens of one direction: the first is twice as long."""
    device(**HOPPER)
    case = Heads("causal", torch.float16)
    case.w[:, :, 1:] = case.w[:, :, :1] / 2
    run_and_check_forward(case)


def test_scores_of_hundreds_whose_norms_are_alike_are_taken(device):
    device(**HOPPER)
    case = Heads((64, 101, {}), torch.bfloat16)
    case.w = (40 * torch.nn.functional.normalize(case.w.float(), dim=-1)).to(case.w.dtype)
    run_and_check_forward(case)


def ones(case):
    """Upstream gradients of 1 for layer-normed tokens: their sums with out cancel."""
    case.dout = torch.ones_like(case.dout)


def long_token(case):
    """Make one token 30 times as long as the others."""
    case.w = (case.w * torch.tensor([3.0, 0.1, 0.1, 0.1]).view(-1, 1)).to(case.w.dtype)


def large(case):
    """Upstream gradients near the largest number."""
    case.dout = case.dout * (2.0**12 if case.w.dtype == torch.float16 else 2.0**100)


@pytest.mark.parametrize(
    ("shape", "change", "dtype"),
    [
        ((64, 197, {"drawn": "normed"}), ones, torch.bfloat16),
        ((64, 197, {"drawn": "normed"}), ones, torch.float16),
        ((64, 4, {}), long_token, torch.bfloat16),
        ((64, 197, {}), large, torch.bfloat16),
        ((64, 197, {}), large, torch.float16),
    ],
    ids=["ones-bf16", "ones-fp16", "long-token", "large-bf16", "large-fp16"],
)
def test_gradients_that_rounding_would_spoil(shape, change, dtype, device):
    device(**HOPPER)
    case = Heads(shape, dtype)
    change(case)
    run_and_check(case)


@pytest.mark.parametrize("forward", [True, False], ids=["forward", "backward"])
def test_numbers_that_are_not_finite_stay_in_their_head(forward, device):
    device(**HOPPER)
    case = Heads("one-block", torch.bfloat16)
    case.w[0, 0, 7] = torch.inf
    case.w[1, 1, 3, 5] = torch.nan
    result, *_, left = case.run_forward() if forward else case.run()
    for index in range(6):
        finite = bool(result[index // 2, index % 2].isfinite().all())
        assert finite != (index in (0, 3)) or left[index]
        assert index in (0, 3) or not left[index]


def test_results_do_not_depend_on_the_number_of_blocks(device):
    results = []
    for multiprocessors in (1, 4):
        device(**{**HOPPER, "multiprocessors": multiprocessors})
        case = Heads("padded", torch.bfloat16)
        results.append([case.run()[0], *case.run_forward()[:2]])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize(
    "change",
    [
        "another-gpu",
        "dropout",
        "threshold",
        "float32",
        "long",
        "wide",
        "odd-rows",
        "strided",
        "no-dout",
        "negative",
    ],
)
def test_other_calls_are_left_to_other_kernels(change, device):
    device(**{**HOPPER, "capability": 100 if change == "another-gpu" else 90})
    head_dim, seqlen = 136 if change == "wide" else 64, 257 if change == "long" else 50
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
    call = MSSACall(**given.get(change, {}))
    assert not heads.serves_backward(w, None if change == "no-dout" else w, w, call)
    assert heads.serves_forward(w, w, call) == (change == "no-dout")


def test_blocks_that_do_not_fit_are_not_launched():
    assert heads.shared_bytes(128, 256, masked=False) is None
    assert heads.shared_bytes(64, 256, masked=True) is not None


def in_every_order(device, check, case, kind=Heads):
    for early in (False, True):
        for descending in (False, True):
            device(**HOPPER, early=early, descending=descending)
            check(kind(case, torch.bfloat16))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("check", "change"),
    [
        *(pytest.param(run_and_check, change, id=f"backward-{name}") for name, change in BROKEN.items()),
        *(pytest.param(run_and_check_forward, change, id=f"forward-{name}") for name, change in BROKEN_FORWARD.items()),
    ],
)
def test_a_broken_kernel_is_found(check, change, broken, device):
    """The emulator stops it, or its numbers are wrong, in one order of threads and products or the other."""
    before, after, case = change
    broken(HEAD_FILES, before, after)
    with pytest.raises((RuntimeError, AssertionError), match=r"emulator: |Measurement|any\(|not close"):
        in_every_order(device, check, case)
