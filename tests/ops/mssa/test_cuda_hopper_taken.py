"""The kernels for Hopper GPUs behind mssa, under the emulator: who takes them, what they leave, what tuning times."""

import pytest
import torch

from crate_kernels import mssa
from crate_kernels._triton import table, tune
from crate_kernels._triton.table import LaunchRow
from crate_kernels.cli.tune import judge
from crate_kernels.ops.mssa import timed
from crate_kernels.ops.mssa.cuda import heads, long_pairs, long_rows
from tests.ops import test_uncovered
from tests.ops.mssa.heads import CAUSAL as CAUSAL_TOKENS
from tests.ops.mssa.heads import Heads, LongPairs, LongRows
from tests.ops.mssa.hopper import both_ways, taking
from tests.tools.emulator import emulated

EXHAUSTIVE = pytest.mark.exhaustive
# Of long rows, a few tokens more than two tiles of 128 and a block of 192 rows.
PADDED, CAUSAL = (64, 290, {"kept": (290, 200)}), (64, 300, {**CAUSAL_TOKENS, "lse": True})


@pytest.mark.parametrize(
    ("kind", "case", "usual"),
    [(Heads, "197-tokens", "pairs"), (LongRows, "257-tokens", "forward")],
    ids=["heads", "long"],
)
def test_nothing_takes_them_by_default(kind, case, usual, hopper, backend):
    both_ways(kind(case, torch.bfloat16), backend)
    assert {*hopper()} == {f"mma_{usual}_kernel", "mma_shift_kernel", "mma_backward_kernel"}


@pytest.mark.parametrize(
    ("kind", "case"),
    [
        *((Heads, case) for case in ("lse", "packed", "causal-padded")),
        *(pytest.param(Heads, case, marks=EXHAUSTIVE) for case in ("197-tokens", "padded", "causal", "causal-packed")),
        (LongRows, "packed"),
        pytest.param(LongRows, CAUSAL, id="LongRows-causal"),
        *(pytest.param(LongRows, case, marks=EXHAUSTIVE) for case in ("257-tokens", "padded", "causal-packed")),
        *(pytest.param(LongPairs, case, marks=EXHAUSTIVE) for case in ("257-tokens", "packed", "causal-padded")),
    ],
)
def test_where_they_are_chosen_they_are_launched_and_repeated(kind, case, hopper, backend, repeated_calls):
    problem = kind(case, torch.bfloat16)
    with taking(kind):
        out, lse, dw = both_ways(problem, backend)
        assert (*dict.fromkeys(hopper()),) == kind.forward_kernels + kind.backward_kernels
        problem.check_forward(out, lse)
        problem.check(dw)
        if repeated_calls is None:
            pytest.skip("needs the C++ extension, which repeats calls: python -m crate_kernels build")
        assert (repeated_calls.repeated, repeated_calls.refused) == (2, [])
        again = both_ways(problem, backend)
    problem.check(again[2])
    if kind is not LongPairs:  # whose sums have any order
        assert all(map(torch.equal, (out, lse, dw), again))


def test_short_rows_are_those_of_whole_heads(hopper, backend):
    problem = Heads("197-tokens", torch.bfloat16)
    with taking(LongRows):
        both_ways(problem, backend)
        assert {*hopper()}.isdisjoint(LongRows.forward_kernels + LongRows.backward_kernels)
        with table.forced(heads.FORWARD, {"WHOLE": 1}):
            both_ways(problem, backend)
            assert "head_forward_kernel" in hopper()
            both_ways(LongRows("257-tokens", torch.bfloat16), backend)
    names = hopper()
    assert "long_forward_kernel" in names
    assert "head_forward_kernel" not in names


@EXHAUSTIVE
def test_a_backward_that_whole_heads_have_no_room_for_is_that_of_long_rows(hopper, backend):
    problem = LongRows("104-channels-padded", torch.bfloat16)
    with taking(Heads), taking(LongRows):
        out, lse, dw = both_ways(problem, backend)
    assert (*dict.fromkeys(hopper()),) == Heads.forward_kernels + LongRows.backward_kernels
    problem.check_forward(out, lse)
    problem.check(dw)


@pytest.fixture
def tuned(monkeypatch):
    """Let tuning have found that whole heads are faster, forward, in full attention over 129 to 256 tokens."""
    rows = (LaunchRow({"WHOLE": 0}, 64, 128, False, True), LaunchRow({"WHOLE": 1}, 64, 256, False, True))
    monkeypatch.setattr(table, "user_rows", lambda gpu: {heads.FORWARD.name: rows})
    table._find.cache_clear()
    yield
    table._find.cache_clear()


@pytest.mark.parametrize(
    ("case", "chosen"),
    [
        ("197-tokens", True),
        ("causal", False),
        ("one-block", False),
        pytest.param("128-channels", False, marks=EXHAUSTIVE),
    ],
)
def test_a_tuned_row_has_them_taken(case, chosen, hopper, tuned, backend):
    both_ways(Heads(case, torch.bfloat16), backend)
    names = hopper()
    assert ("head_forward_kernel" in names) == chosen
    assert "head_backward_kernel" not in names


OTHERS = {
    "dropout": {"dropout_p": 0.5},
    "threshold": {"phi": "threshold", "threshold": 0.1},
    "negative": {"scale": -0.1},
    "tiny-scale": {"scale": 1e-4},
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_they_do_not_serve_runs_as_before(name, hopper, backend):
    case = Heads("one-block", torch.float16)
    case.options |= OTHERS[name]
    with taking(Heads):
        both_ways(case, backend)
    found = {*hopper()}
    assert found.isdisjoint(Heads.backward_kernels)
    assert found.isdisjoint(Heads.forward_kernels) == (name != "tiny-scale")


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.bfloat16, id="bf16"), pytest.param(torch.float16, id="fp16", marks=EXHAUSTIVE)]
)
@pytest.mark.parametrize(
    ("kind", "case", "token"),
    [
        pytest.param(Heads, "padded", 150, id="Heads-padded-150"),
        pytest.param(Heads, "causal", 150, id="Heads-causal-150"),
        pytest.param(LongRows, PADDED, 280, id="LongRows-padded-280"),
        pytest.param(LongRows, CAUSAL, 280, id="LongRows-causal-280"),
    ],
)
def test_heads_out_of_range_are_those_of_the_other_kernels(kind, case, token, dtype, hopper, backend):
    """Bit for bit, causal from the first row that is. Others have the bits that they have without them."""
    near = kind(case, dtype)
    first = token + 1 if near.options["causal"] else 0
    w = near.w.clone()
    w[:, 1, token] *= 15
    mixed = near.with_tokens(w)
    others = both_ways(mixed, backend)
    with taking(kind):
        found, alone = both_ways(mixed, backend), both_ways(near, backend)
    for result, own in zip(found, alone, strict=True):
        assert torch.equal(result[:, 0], own[:, 0])
    for result, other, own in zip(found[:2], others[:2], alone[:2], strict=True):
        assert torch.equal(result[:, 1, first:], other[:, 1, first:])
        assert torch.equal(result[:, 1, : min(first, token)], own[:, 1, : min(first, token)])
    mixed.check_forward(*found[:2])
    mixed.check(found[2])
    if first == 0:
        assert torch.equal(found[2][0, 1], others[2][0, 1])


@EXHAUSTIVE
@pytest.mark.parametrize("name", ["257-tokens", "causal"])
def test_heads_out_of_range_of_pairs_are_those_of_the_other_kernels(name, hopper, backend):
    """Bit for bit; others are taken."""
    near = LongPairs(name, torch.bfloat16)
    w = near.w.clone()
    w[:, 1, 250] *= 15
    mixed = near.with_tokens(w)
    with taking(LongPairs):
        found = both_ways(mixed, backend)
        with table.forced(long_pairs.BACKWARD, {"PAIRS": 0}), table.forced(long_rows.BACKWARD, {"LONG": 0}):
            others = both_ways(mixed, backend)
    assert torch.equal(found[2][0, 1], others[2][0, 1])
    assert not torch.equal(found[2][0, 0], others[2][0, 0])
    mixed.check(found[2])


@pytest.mark.parametrize("times", [1.5, 12.0], ids=["within-range", "out-of-range"])
def test_a_prefix_does_not_depend_on_later_tokens(times, hopper, backend):
    case = Heads("causal-holes", torch.bfloat16)
    later = case.w.clone()
    later[:, :, 100:] *= times
    with taking(Heads):
        (out, lse, _), (other, others_lse, _) = (both_ways(case.with_tokens(w), backend) for w in (case.w, later))
    assert torch.equal(out[:, :, :100], other[:, :, :100])
    assert torch.equal(lse[:, :, :100], others_lse[:, :, :100])


@pytest.mark.parametrize("offsets", test_uncovered.OFFSETS.values(), ids=test_uncovered.OFFSETS)
@pytest.mark.parametrize(
    ("kind", "longest"), [(Heads, 5), (LongRows, 300), pytest.param(LongPairs, 300, marks=EXHAUSTIVE)]
)
def test_rows_that_no_sequence_covers_are_zero(kind, longest, offsets, hopper, backend):
    def attend(w, **packed):
        out, lse = mssa(w.bfloat16(), return_lse=True, **{**packed, "max_seqlen": longest})
        return out.float(), lse

    with taking(kind):
        test_uncovered.check(attend, offsets, backend, "cpu")
    assert {*kind.forward_kernels, *kind.backward_kernels} <= {*hopper()}


@pytest.mark.parametrize(
    ("kind", "value", "token", "sequence"),
    [
        (Heads, torch.nan, 210, slice(209, 226)),
        pytest.param(Heads, torch.inf, 210, slice(209, 226), marks=EXHAUSTIVE),
        (LongRows, torch.nan, 310, slice(301, 430)),
    ],
)
def test_what_is_no_number_stays_in_its_sequence(kind, value, token, sequence, hopper, backend):
    case = kind("packed", torch.bfloat16)
    w = case.w.clone()
    w[token, 0] = value
    with taking(kind):
        found, alone = both_ways(case.with_tokens(w), backend), both_ways(case, backend)
    of_sequence = torch.zeros(len(w), 2, dtype=torch.bool)
    of_sequence[sequence, 0] = True
    for result, own in zip(found, alone, strict=True):
        same = of_sequence.t() if result.dim() == 2 else of_sequence
        assert torch.equal(result[~same], own[~same])
        assert not result[same].isfinite().all()


@pytest.mark.parametrize(
    ("kind", "causal", "gradient"),
    [
        pytest.param(Heads, False, False, id="full-heads-forward"),
        pytest.param(Heads, False, True, id="full-heads-backward", marks=EXHAUSTIVE),
        pytest.param(Heads, True, False, id="causal-heads-forward", marks=EXHAUSTIVE),
        pytest.param(Heads, True, True, id="causal-heads-backward"),
        pytest.param(LongRows, False, False, id="full-long-forward"),
        pytest.param(LongRows, True, True, id="causal-long-backward"),
    ],
)
def test_tuning_times_them(kind, causal, gradient, hopper, monkeypatch):
    monkeypatch.setattr(timed, "_TOKENS", 12 * 20)
    forward, backward = kind.forced.items()
    launch_table, config = backward if gradient else forward
    names = kind.backward_kernels if gradient else kind.forward_kernels
    seqlen, bucket = (50, 64) if kind is Heads else (260, 512)
    make = timed.dense(emulated.on_cuda("mssa"), seqlen, 64, causal, gradient, "cpu")
    kernels = []

    def clock(call):
        hopper()
        call()
        kernels.append({*names} <= {*hopper()})
        return 1.0 / len(kernels)

    workload = tune.Workload(launch_table, LaunchRow({}, 64, bucket, causal, half=True), make)
    shipped = launch_table.shipped(torch.device("cpu"), 64, bucket, causal, torch.float16)
    found = tune.search(workload, shipped, clock, judge)
    assert (found.config, kernels) == (config, [False, True])
