"""The kernels of whole heads on Hopper GPUs, under the emulator, against float64."""

import pytest
import torch

from crate_kernels.ops.mssa.cuda import heads
from tests.ops.mssa.heads import CASES, FORWARD_CASES, Heads, often, often_both_ways
from tests.ops.mssa.hopper import HOPPER, run_and_check, run_and_check_forward

EARLY = ["one-block", "causal-packed"]
LATE = ["197-tokens", "packed", "holes", "40-channels", "causal-padded", "causal-a-tail-of-48"]


@pytest.mark.parametrize(
    ("case", "early"), often_both_ways({**CASES, **FORWARD_CASES}, [*LATE, "a-tail-of-32", "128-channels-long"], EARLY)
)
def test_the_forward_of_heads(case, early, device):
    device(**HOPPER, early=early)
    run_and_check_forward(Heads(case, torch.bfloat16))


@pytest.mark.parametrize(
    "case",
    often(
        ["197-tokens", "packed", "padded", "holes", "causal-holes", "48-channels", "104-channels", "128-channels"],
        ["packed", "causal-holes"],
    ),
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
    often(
        [
            *("197-tokens", "lse", "packed", "padded", "holes", "causal", "causal-alike"),
            *("48-channels", "104-channels", "128-channels", "causal-88-channels", "causal-128-channels"),
        ],
        ["padded", "causal-alike"],
    ),
)
def test_the_backward_of_heads_in_fp16(case, device):
    device(**HOPPER)
    run_and_check(Heads(case, torch.float16))


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


def test_results_do_not_depend_on_the_number_of_blocks(device):
    results = []
    for multiprocessors in (1, 4):
        device(**{**HOPPER, "multiprocessors": multiprocessors})
        case = Heads("padded", torch.bfloat16)
        results.append([case.run()[0], *case.run_forward()[:2]])
    assert all(map(torch.equal, *results))


def test_blocks_that_do_not_fit_are_not_launched():
    assert heads.shared_bytes(128, 256, masked=False) is None
    assert heads.shared_bytes(64, 256, masked=True) is not None
