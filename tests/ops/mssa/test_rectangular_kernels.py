"""The kernels of rectangular attention: named cases are within tolerance, and so are ranges put together."""

import functools
import itertools

import pytest
import torch

from crate_kernels import testing
from crate_kernels._core import backends
from crate_kernels.ops.mssa import rectangular, reference
from crate_kernels.ops.mssa.call import MSSACall
from crate_kernels.ops.mssa.rectangular import PART, RangeTokens, RectangularCall
from tests.ops.common import DTYPES, KERNELS, LEVELS, home, interpreted, randn
from tests.ops.mssa import ranges, test_cancelling
from tests.ops.mssa.rectangles import CASES, drawn, in_dtype

# Triton's interpreter takes minutes for these; test_triton_rectangular.py has some of them for every run.
HERE = [
    pytest.param(name, marks=pytest.mark.exhaustive if interpreted(name, home(name)) else ())
    for name in ("triton", "cpp")
    if name in KERNELS
    and backends.unavailable_reason(PART, name, home(name)) is None
    and home(name) in (backends.for_device(name, home(name)).devices or ())
]
CPP = [
    pytest.param(
        "cpp",
        marks=() if any("cpp" in each.values for each in HERE) else pytest.mark.skip(reason="needs the C++ extension"),
    )
]


def results(rows, columns, call, backend):
    out, lse = rectangular.forward(rows, columns, call, backend)
    return {"out": out, "lse": lse, "dw": rectangular.backward(rows, columns, call, backend)}


@functools.cache
def judged(case, dtype, device):
    """Return the inputs of a case, and eager and exact results, once for all backends and levels."""
    rows, columns, call = drawn(case, dtype, device)
    eager = results(rows, columns, call, "composite")
    exact = results(*(in_dtype(side, torch.float64) for side in (rows, columns)), call, "composite")
    return (rows, columns, call), eager, exact


def failed(case, dtype, backend):
    inputs, eager, exact = judged(case, dtype, home(backend))
    actual = results(*inputs, backend)
    assert all(t.dtype == torch.float32 for t in actual.values())
    return [m for m in testing.measure(actual, eager, exact, dtype) if not m.passed]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", HERE)
def test_within_tolerance(backend, name, dtype):
    assert failed(CASES[name], dtype, backend) == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LEVELS)
@pytest.mark.parametrize("backend", CPP)
def test_every_level_is_within_tolerance(backend, name, dtype, level):
    level(name)
    for case in ("across", "whole", "causal-padded-dropout", "causal-saturated", "strided"):
        assert failed(CASES[case], dtype, backend) == [], case
    for case in ("saturated", "causal-saturated", "equal-norms"):
        assert ranges.over_tolerance(ranges.CASES[case], dtype, backend, "cpu") == [], case


@pytest.mark.parametrize("name", ["after", "whole", "causal-across", "causal-whole", "causal-padded-dropout"])
@pytest.mark.parametrize("backend", CPP)
def test_threads_share_a_head(backend, name, threads):
    """Parts of the rows have the same outputs; gradients are summed in another order, the same in each run."""
    rows, columns, call = drawn(CASES[name], torch.float32)
    rows, columns = (
        RangeTokens(t.start, *(x if x is None else x[:1, :1] if x.dim() > 2 else x[:1] for x in t[1:]))
        for t in (rows, columns)
    )
    alone = results(rows, columns, call, backend)
    threads(3)
    several = [results(rows, columns, call, backend) for _ in range(2)]
    for key, expected in alone.items():
        torch.testing.assert_close(several[0][key], expected)
        assert torch.equal(several[0][key], several[1][key])


@pytest.mark.parametrize("name", ["whole", "causal-whole", "dropout-whole", "padded-whole"])
@pytest.mark.parametrize("backend", CPP)
def test_a_range_meets_a_copy_of_itself(backend, name):
    """Columns that are the rows have separate forms; in other memory they are any columns."""
    rows, columns, call = drawn(CASES[name], torch.float32)
    itself = results(rows, columns, call, backend)
    for key, actual in results(rows, columns._replace(w=columns.w.clone()), call, backend).items():
        torch.testing.assert_close(actual, itself[key])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ranges.CASES)
@pytest.mark.parametrize("backend", ["composite", *CPP])
def test_ranges_together_are_within_tolerance(backend, name, dtype):
    if (backend, name, dtype) == ("composite", "causal-saturated", torch.float32):
        pytest.skip("needs a BLAS that sums products of two rows, all that a range has there, as it does those of 64")
    assert ranges.over_tolerance(ranges.CASES[name], dtype, backend, "cpu") == []


@test_cancelling.HALF
@pytest.mark.parametrize("name", test_cancelling.CASES)
@pytest.mark.parametrize("backend", ["composite", *CPP])
def test_a_delta_that_cancels(backend, name, dtype):
    assert test_cancelling.worst(test_cancelling.CASES[name], dtype, backend, gradient_of=ranges.gradient) < 1


CUTS = {
    "even": [(0, 100), (100, 200)],
    "uneven": [(0, 7), (7, 130), (130, 131), (131, 200)],
    "head-tail": [(0, 50), (150, 200), (50, 150)],
}


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"dropout_p": 0.3}, {"dropout_p": 0.3, "causal": True}])
@pytest.mark.parametrize("backend", HERE)
def test_ranges_together_are_the_whole_operator(options, cuts, backend):
    """Outputs and gradients, with the dropout masks of one process."""
    device = home(backend)
    seed = torch.tensor(9) if "dropout_p" in options else None
    w, dout = (randn(2, 2, 200, 16, seed=s).to(torch.float32) for s in (0, 1))
    leaf = w.double().requires_grad_()
    expected, expected_lse = reference.forward(leaf, MSSACall(scale=0.25, seed=seed, **options), None)
    expected.backward(dout.double())
    w, dout = w.to(device), dout.to(device)
    call = RectangularCall(scale=0.25, seed=None if seed is None else seed.to(device), **options)
    out, lse = torch.zeros_like(w), torch.full(w.shape[:3], -torch.inf, device=device)
    every = RangeTokens(0, w)
    parts = [every.part(slice(*cut)) for cut in cuts]
    for rows, columns in itertools.product(parts, parts):
        place = slice(rows.start, rows.stop)
        rectangular.merge_(out[:, :, place], lse[:, :, place], *rectangular.forward(rows, columns, call, backend))
    torch.testing.assert_close(out.cpu().double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.cpu().double(), expected_lse, rtol=1e-5, atol=1e-5)
    every = RangeTokens(
        0, w, None, dout, lse, rectangular.delta(w, dout, out, lse, call, backend), torch.zeros_like(lse)
    )
    parts, dw = [every.part(slice(*cut)) for cut in cuts], torch.zeros_like(w)
    for rows, columns in itertools.product(parts, parts):
        dw[:, :, rows.start : rows.stop] += rectangular.backward(rows, columns, call, backend)
    torch.testing.assert_close(dw.cpu().double(), leaf.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", CPP)
def test_rows_do_not_depend_on_columns_that_they_do_not_see(backend):
    rows, columns, call = drawn(CASES["causal-across"], torch.float32)
    out, lse = rectangular.forward(rows, columns, call, backend)
    changed = columns._replace(w=columns.w.clone())
    changed.w[:, :, 20:] = 3e4  # from place 120 on
    new_out, new_lse = rectangular.forward(rows, changed, call, backend)
    assert torch.equal(out[:, :, :80], new_out[:, :, :80])
    assert torch.equal(lse[:, :, :80], new_lse[:, :, :80])


@pytest.mark.parametrize("backend", CPP)
def test_a_name_is_obeyed_or_refused(backend):
    wide = RangeTokens(0, torch.randn(1, 1, 3, 257))
    with pytest.raises(
        NotImplementedError, match=r"^mssa: backend='cpp' takes head_dim from 1 to 256, got 257; use back"
    ):
        rectangular.forward(wide, wide, RectangularCall(), backend)
    out, _ = rectangular.forward(wide, wide, RectangularCall(), backends.AUTO)
    assert torch.equal(out, rectangular.forward(wide, wide, RectangularCall(), "composite")[0])
    with pytest.raises(RuntimeError, match=r"^mssa: backend='reference' is unavailable: .*; use backend='composite'"):
        backends.resolve(PART, "reference", wide.w.device, wide.w.dtype, "mssa")
