"""The kernels of whole heads behind mssa, under the emulator: who takes them, what they leave, what tuning times."""

import re
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from crate_kernels import mssa
from crate_kernels._triton import table, tune
from crate_kernels._triton.table import LaunchRow
from crate_kernels.cli.tune import judge
from crate_kernels.ops.mssa import timed
from crate_kernels.ops.mssa.cuda import heads, long_pairs, long_rows
from crate_kernels.ops.mssa.cuda import tune as heads_tune
from tests.ops import test_uncovered
from tests.ops.mssa.heads import Heads, often
from tests.ops.mssa.test_cuda_heads import HOPPER
from tests.tools.emulator import emulated

WHOLE = {"WHOLE": 1}
FP16 = pytest.param(torch.float16, id="fp16", marks=pytest.mark.exhaustive)
DTYPES = pytest.mark.parametrize("dtype", [pytest.param(torch.bfloat16, id="bf16"), FP16])


@pytest.fixture
def hopper(device, library):
    """Emulate a Hopper GPU; return a function that says which kernels were launched since it was last called."""
    device(**HOPPER)

    def launched():
        return re.findall(r"(\w+_kernel)\b", library.emulated_launches())

    launched()
    return launched


@contextmanager
def taking():
    """Have whole heads taken in both directions, as tuning may find."""
    with table.forced(heads.FORWARD, WHOLE), table.forced(heads.BACKWARD, WHOLE):
        yield


@pytest.fixture
def taken(hopper):
    """Do so in a test."""
    with taking():
        yield hopper


def both_ways(case, backend):
    """Return out, lse and the gradient of a case."""
    w = case.w.detach().requires_grad_()
    out, lse = mssa(w, return_lse=True, backend=backend, **case.options)
    outputs, gradients = [out], [case.dout]
    if case.dlse is not None:
        outputs, gradients = [out, lse], [case.dout, case.dlse]
    (dw,) = torch.autograd.grad(outputs, w, gradients)
    return out.detach(), lse.detach(), dw


FORWARD = ["head_forward_kernel", "mma_left_forward_kernel"]
BACKWARD = ["head_backward_kernel", "mma_left_shift_kernel", "mma_left_backward_kernel"]


def test_nothing_takes_them_by_default(hopper, backend):
    both_ways(Heads("197-tokens", torch.bfloat16), backend)
    assert {*hopper()} == {"mma_pairs_kernel", "mma_shift_kernel", "mma_backward_kernel"}


CASES = ["197-tokens", "lse", "packed", "padded", "causal", "causal-packed", "causal-padded"]


@pytest.mark.parametrize("case", often(CASES, ["lse", "packed", "causal-padded"]))
def test_where_they_are_chosen_they_are_launched_and_repeated(case, taken, backend, repeated_calls):
    given = Heads(case, torch.bfloat16)
    out, lse, dw = both_ways(given, backend)
    assert [*dict.fromkeys(taken())] == FORWARD + BACKWARD
    given.check_forward(out, lse)
    given.check(dw)
    if repeated_calls is None:
        pytest.skip("needs the C++ extension, which repeats calls: python -m crate_kernels build")
    assert (repeated_calls.repeated, repeated_calls.refused) == (2, [])
    assert all(map(torch.equal, (out, lse, dw), both_ways(given, backend)))


@pytest.fixture
def tuned(monkeypatch):
    """Let tuning have found that whole heads are faster, forward, in full attention over 129 to 256 tokens."""
    rows = (LaunchRow({"WHOLE": 0}, 64, 128, False, True), LaunchRow(WHOLE, 64, 256, False, True))
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
        pytest.param("128-channels", False, marks=pytest.mark.exhaustive),
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
def test_what_they_do_not_serve_runs_as_before(name, taken, backend):
    case = Heads("one-block", torch.float16)
    case.options |= OTHERS[name]
    both_ways(case, backend)
    found = {*taken()}
    assert found.isdisjoint(BACKWARD)
    assert found.isdisjoint(FORWARD) == (name != "tiny-scale")


@DTYPES
@pytest.mark.parametrize(("name", "first"), [("padded", 0), ("causal", 151)])
def test_heads_out_of_range_are_those_of_the_other_kernels(name, first, dtype, hopper, backend):
    """Bit for bit, causal from the first row that is. Others have the bits that they have without them."""
    near = Heads(name, dtype)
    w = near.w.clone()
    w[:, 1, 150] *= 15
    mixed = near.with_tokens(w)
    others = both_ways(mixed, backend)
    with taking():
        found, alone = both_ways(mixed, backend), both_ways(near, backend)
    for result, own in zip(found, alone, strict=True):
        assert torch.equal(result[:, 0], own[:, 0])
    for result, other, own in zip(found[:2], others[:2], alone[:2], strict=True):
        assert torch.equal(result[:, 1, first:], other[:, 1, first:])
        assert torch.equal(result[:, 1, : min(first, 150)], own[:, 1, : min(first, 150)])
    mixed.check(found[2])
    if first == 0:
        assert torch.equal(found[2][0, 1], others[2][0, 1])


@pytest.mark.parametrize("times", [1.5, 12.0], ids=["within-range", "out-of-range"])
def test_a_prefix_does_not_depend_on_later_tokens(times, taken, backend):
    case = Heads("causal-holes", torch.bfloat16)
    later = case.w.clone()
    later[:, :, 100:] *= times
    (out, lse, _), (other, others_lse, _) = (both_ways(case.with_tokens(w), backend) for w in (case.w, later))
    assert torch.equal(out[:, :, :100], other[:, :, :100])
    assert torch.equal(lse[:, :, :100], others_lse[:, :, :100])


@pytest.mark.parametrize("offsets", test_uncovered.OFFSETS.values(), ids=test_uncovered.OFFSETS)
def test_rows_that_no_sequence_covers_are_zero(offsets, taken, backend):
    def attend(w, **packed):
        out, lse = mssa(w.bfloat16(), return_lse=True, **packed)
        return out.float(), lse

    test_uncovered.check(attend, offsets, backend, "cpu")
    assert "head_forward_kernel" in taken()


@pytest.mark.parametrize("name", often(["not a number", "infinite"], ["not a number"]))
def test_what_is_no_number_stays_in_its_sequence(name, taken, backend):
    case = Heads("packed", torch.bfloat16)
    w = case.w.clone()
    w[210, 0] = {"not a number": torch.nan, "infinite": torch.inf}[name]
    found, alone = both_ways(case.with_tokens(w), backend), both_ways(case, backend)
    of_sequence = torch.zeros(len(w), 2, dtype=torch.bool)
    of_sequence[209:226, 0] = True
    for result, own in zip(found, alone, strict=True):
        same = of_sequence.t() if result.dim() == 2 else of_sequence
        assert torch.equal(result[~same], own[~same])
        assert not result[same].isfinite().all()


@pytest.mark.parametrize(
    ("causal", "gradient"),
    [
        pytest.param(False, False, id="full-forward"),
        pytest.param(False, True, id="full-backward", marks=pytest.mark.exhaustive),
        pytest.param(True, False, id="causal-forward", marks=pytest.mark.exhaustive),
        pytest.param(True, True, id="causal-backward"),
    ],
)
def test_tuning_times_them(causal, gradient, hopper, monkeypatch):
    monkeypatch.setattr(timed, "_TOKENS", 12 * 20)
    native = emulated.on_cuda("mssa")
    table_of = heads.BACKWARD if gradient else heads.FORWARD
    make = timed.dense(native, 50, 64, causal, gradient, "cpu")
    kernels = []

    def clock(call):
        hopper()
        call()
        kernels.append(("head_backward_kernel" if gradient else "head_forward_kernel") in hopper())
        return 1.0 / len(kernels)

    workload = tune.Workload(table_of, LaunchRow({}, 64, 64, causal, half=True), make)
    found = tune.search(workload, table_of.shipped(torch.device("cpu"), 64, 64, causal, torch.float16), clock, judge)
    assert (found.config, kernels) == (WHOLE, [False, True])


def test_only_a_gpu_that_has_them_times_them(monkeypatch):
    assert heads_tune.workloads() == []
    monkeypatch.setattr(heads_tune.backends, "unavailable_reason", lambda *args: None)
    for capability, count in ((80, 0), (90, 32), (100, 0)):
        monkeypatch.setattr(heads_tune.launch, "gpu", lambda device, c=capability: SimpleNamespace(capability=c))
        every = heads_tune.workloads()
        assert len({str(one) for one in every}) == len(every) == count
        of = (heads.FORWARD, heads.BACKWARD, long_rows.FORWARD, long_rows.BACKWARD, long_pairs.BACKWARD)
        assert all(one.table in of for one in every)
