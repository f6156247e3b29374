"""What mssa's kernels for Hopper GPUs take and what they leave to others, emulated; and broken on purpose."""

import pytest
import torch

from crate_kernels.ops.mssa.call import MSSACall
from crate_kernels.ops.mssa.cuda import heads, hopper, long_pairs, long_rows
from tests.cuda.test_broken import TABLES
from tests.ops.mssa.heads import CAUSAL, Heads, LongPairs, LongRows
from tests.ops.mssa.hopper import DTYPES, HOPPER, run_and_check, run_and_check_forward

EXHAUSTIVE = pytest.mark.exhaustive


@DTYPES
@pytest.mark.parametrize(
    ("spread", "takes_bf16", "takes_fp16"),
    [(1.0, True, True), (1.2, True, True), (2.0, True, False), (3.0, True, False), (5.0, False, False)],
    ids=["equal", "within-fp16", "beyond-fp16", "within-bf16", "beyond-bf16"],
)
@pytest.mark.parametrize(
    ("kind", "seqlen", "forward"),
    [
        pytest.param(Heads, 200, True, id="heads-forward"),
        pytest.param(Heads, 200, False, id="heads-backward"),
        pytest.param(LongRows, 260, True, id="long-forward"),
        pytest.param(LongRows, 260, False, id="long-backward"),
        pytest.param(LongPairs, 260, False, id="pairs", marks=EXHAUSTIVE),
    ],
)
def test_a_head_whose_norms_or_lse_spread_too_far_is_left(
    kind, seqlen, forward, spread, takes_bf16, takes_fp16, dtype, device
):
    device(**HOPPER)
    case = kind((64, seqlen, {"batch": 1}), dtype, spread=spread)
    *results, left = case.run_forward() if forward else case.run()
    takes = takes_fp16 if dtype == torch.float16 else takes_bf16
    assert left == [0 if takes else seqlen] * 2
    if takes:
        (case.check_forward if forward else case.check)(*results)


@DTYPES
@pytest.mark.parametrize("far", [False, True], ids=["near", "far"])
@pytest.mark.parametrize(("kind", "seqlen"), [(Heads, 50), (LongRows, 260)], ids=["heads", "long"])
def test_a_head_whose_lse_is_too_large_is_left(kind, seqlen, far, dtype, device):
    """Tokens of one norm: lse is near their scores with themselves, and does not spread."""
    device(**HOPPER)
    case = kind((64, seqlen, {"drawn": "normed", "batch": 1}), dtype)
    case.w = case.w * ((30 if far else 20) if dtype == torch.bfloat16 else (12 if far else 8))
    (out, lse, left_forward), (dw, left) = case.run_forward(), case.run()
    assert left == left_forward == [seqlen if far else 0] * 2
    if not far:
        case.check_forward(out, lse)
        case.check(dw)


def test_the_only_token_of_a_head_is_its_output_or_left(device):
    """Its weight is off by the rounding of its norm, which its length multiplies: 45.5 in all channels gives 2^123."""
    device(**HOPPER)
    case = Heads((40, 1, {**CAUSAL, "kept": (1,) * 64}), torch.bfloat16)
    lengths = torch.linspace(0.5, 64, 128)
    case.w = lengths.view(64, 2, 1, 1).expand_as(case.w).bfloat16()
    out, _, left = case.run_forward()
    taken = torch.tensor(left).view(64, 2) == 0
    assert 0 < taken.sum() < len(left)
    torch.testing.assert_close(out[taken], case.w[taken])


def ones(case):
    """Upstream gradients of 1 for layer-normed tokens: their sums with out cancel."""
    case.dout = torch.ones_like(case.dout)


def long_token(case):
    """Make one token 30 times as long as the others."""
    case.w = (case.w * torch.tensor([3.0, 0.1, 0.1, 0.1]).view(-1, 1)).to(case.w.dtype)


def large(case):
    """Upstream gradients near the largest number."""
    case.dout = case.dout * (2.0**12 if case.w.dtype == torch.float16 else 2.0**100)


def large_dlse(case):
    """Gradients of lse far above those of out."""
    case.dlse, case.dout = 30 * case.dlse, 1e-3 * case.dout


ONES_PADDED = (64, 300, {**CAUSAL, "drawn": "normed", "kept": (300, 150)})


@pytest.mark.parametrize(
    ("kind", "shape", "change", "dtype"),
    [
        pytest.param(Heads, (64, 197, {"drawn": "normed"}), ones, torch.bfloat16, id="heads-ones-bf16"),
        pytest.param(Heads, (64, 197, {"drawn": "normed"}), ones, torch.float16, id="heads-ones-fp16"),
        pytest.param(Heads, (64, 4, {}), long_token, torch.bfloat16, id="heads-long-token"),
        pytest.param(Heads, (64, 197, {}), large, torch.bfloat16, id="heads-large-bf16"),
        pytest.param(Heads, (64, 197, {}), large, torch.float16, id="heads-large-fp16"),
        pytest.param(Heads, (64, 91, {**CAUSAL, "lse": True}), large_dlse, torch.float16, id="heads-large-dlse"),
        pytest.param(LongRows, (64, 260, {"lse": True}), large_dlse, torch.float16, id="long-large-dlse"),
        pytest.param(LongRows, ONES_PADDED, ones, torch.bfloat16, id="long-ones-causal-padded"),
        pytest.param(
            LongRows, (64, 300, {"drawn": "normed"}), ones, torch.float16, id="long-ones-fp16", marks=EXHAUSTIVE
        ),
        pytest.param(LongRows, (64, 260, {}), large, torch.bfloat16, id="long-large-bf16"),
        pytest.param(LongRows, (64, 260, {}), large, torch.float16, id="long-large-fp16"),
        pytest.param(LongPairs, ONES_PADDED, ones, torch.bfloat16, id="pairs-ones-causal-padded", marks=EXHAUSTIVE),
        pytest.param(
            LongPairs, (64, 300, {"drawn": "normed"}), ones, torch.float16, id="pairs-ones-fp16", marks=EXHAUSTIVE
        ),
        pytest.param(LongPairs, (64, 260, {}), large, torch.bfloat16, id="pairs-large-bf16", marks=EXHAUSTIVE),
        pytest.param(LongPairs, (64, 260, {}), large, torch.float16, id="pairs-large-fp16", marks=EXHAUSTIVE),
    ],
)
def test_gradients_that_rounding_would_spoil(kind, shape, change, dtype, device):
    device(**HOPPER)
    case = kind(shape, dtype)
    change(case)
    run_and_check(case)


LONG = (64, 260, {"kept": (260, 200)})


@pytest.mark.parametrize(
    ("kind", "shape", "forward"),
    [
        pytest.param(Heads, "one-block", True, id="heads-forward"),
        pytest.param(Heads, "one-block", False, id="heads-backward"),
        pytest.param(LongRows, LONG, False, id="long-backward"),
        pytest.param(LongPairs, LONG, False, id="pairs", marks=EXHAUSTIVE),
    ],
)
def test_numbers_that_are_not_finite_stay_in_their_head(kind, shape, forward, device):
    device(**HOPPER)
    case = kind(shape, torch.bfloat16)
    case.w[0, 0, 7] = torch.inf
    case.w[1, 1, 3, 5] = torch.nan
    result, *_, left = case.run_forward() if forward else case.run()
    for index in range(len(left)):
        finite = bool(result[index // 2, index % 2].isfinite().all())
        assert finite != (index in (0, 3)) or left[index]
        assert index in (0, 3) or not left[index]


OTHERS = ["another-gpu", "dropout", "threshold", "float32", "other-length", "wide", "odd-rows", "strided", "negative"]


@pytest.mark.parametrize(
    ("kernels", "change"), [*((heads, one) for one in (*OTHERS, "no-dout")), *((long_rows, one) for one in OTHERS)]
)
def test_other_calls_are_left_to_other_kernels(kernels, change, device):
    device(**{**HOPPER, "capability": 100 if change == "another-gpu" else 90})
    served, other = (50, 257) if kernels is heads else (300, 256)
    shape = (1, 2, other if change == "other-length" else served, 136 if change == "wide" else 64)
    w = torch.zeros(shape, dtype=torch.float32 if change == "float32" else torch.bfloat16)
    options = {"negative": {"scale": -1.0}, "dropout": {"seed": torch.tensor(3)}, "threshold": {"threshold": 0.1}}
    if change == "odd-rows":
        w = w[..., :60]
    if change == "strided":
        w = w.transpose(2, 3).contiguous().transpose(2, 3)
    call = MSSACall(**options.get(change, {}))
    assert not kernels.serves_backward(w, None if change == "no-dout" else w, w, call)
    assert kernels.serves_forward(w, w, call) == (change == "no-dout")


@pytest.mark.parametrize("masked", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("head_dim", [8, 64, 72, 104, 128])
def test_each_length_is_served_once(head_dim, masked, device):
    """By whole heads up to what a block's shared memory takes, by long rows beyond."""
    device(**HOPPER)
    longest = 256 if head_dim <= 64 else 208 if masked else 224
    for seqlen in (1, 208, 209, 224, 225, 256, 257):
        w = torch.zeros(1, 1, seqlen, head_dim, dtype=torch.bfloat16)
        call = MSSACall(key_padding_mask=torch.ones(1, seqlen, dtype=torch.bool) if masked else None)
        assert heads.serves_forward(w, w, call) == (seqlen <= 256) != long_rows.serves_forward(w, w, call)
        assert heads.serves_backward(w, w, w, call) == (seqlen <= longest), seqlen
        assert (
            long_rows.serves_backward(w, w, w, call) == long_pairs.serves_backward(w, w, w, call) == (seqlen > longest)
        )


@pytest.mark.parametrize("change", ["by-default", "no-dout", "strided-dout", "short", "dropout"])
def test_gradients_of_other_calls_are_left_to_other_kernels(change, device):
    """By default pairs are not taken where they could be."""
    device(**HOPPER)
    w = torch.zeros(1, 2, 256 if change == "short" else 300, 64, dtype=torch.bfloat16)
    dout = w.transpose(2, 3).contiguous().transpose(2, 3) if change == "strided-dout" else w
    call = MSSACall(seed=torch.tensor(3)) if change == "dropout" else MSSACall()
    inputs = (w, None if change == "no-dout" else dout, w, call)
    assert long_rows.serves_backward(*inputs) == long_pairs.serves_backward(*inputs) == (change == "by-default")
    assert not hopper.chosen(long_pairs.BACKWARD, w, call)
    assert long_rows.serves_forward(w, w, call) == (change not in ("short", "dropout"))


CHECKS = {
    "head-backward": (Heads, run_and_check),
    "head-forward": (Heads, run_and_check_forward),
    "long-forward": (LongRows, run_and_check_forward),
    "long-backward": (LongRows, run_and_check),
    "pairs": (LongPairs, run_and_check),
}


def in_every_order(kind, check, name, device):
    for early in (False, True):
        for descending in (False, True):
            device(**HOPPER, early=early, descending=descending)
            check(kind(name, torch.bfloat16))


@EXHAUSTIVE
@pytest.mark.parametrize(("kernel", "name"), [(kernel, name) for kernel in CHECKS for name in TABLES[kernel][0]])
def test_a_broken_kernel_is_found(kernel, name, broken, device):
    """The emulator stops it, or its numbers are wrong, in one order of threads and products or the other."""
    (kind, check), (changes, files) = CHECKS[kernel], TABLES[kernel]
    before, after, case = changes[name]
    broken(files, before, after)
    with pytest.raises((RuntimeError, AssertionError), match=r"emulator: |Measurement|heads left|not close"):
        in_every_order(kind, check, case, device)
