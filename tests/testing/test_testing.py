"""The error tolerance and the inputs that every other test relies on."""

import math

import pytest
import torch

from crate_kernels import testing

EPS = torch.finfo(torch.float32).eps
EXACT = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
EAGER_ERROR = 2.0**-20


def measure(error, name="out", at=0, eager=EAGER_ERROR):
    """Compare a result that is off by ``error`` in one place with eager's, which is off in another."""
    actual, published = EXACT.clone(), EXACT.clone()
    actual[at] += error
    published[2] += eager
    (result,) = testing.measure({name: actual}, {name: published}, {name: EXACT}, torch.float32)
    return result


@pytest.mark.parametrize(("name", "factor"), [("out", 2), ("lse", 2), ("membership", 2), ("dw", 3), ("dtemp", 3)])
def test_the_tolerance_is_the_documented_one(name, factor):
    tolerance = factor * (EAGER_ERROR + EPS * 2.0)
    assert measure(0.0, name).tolerance == pytest.approx(tolerance, rel=1e-12)
    for at in range(3):
        assert measure(0.99 * tolerance, name, at).passed
        assert not measure(1.01 * tolerance, name, at).passed


@pytest.mark.parametrize("eager", [math.inf, math.nan])
def test_eager_that_overflows_only_tightens_the_tolerance(eager):
    assert measure(0.0, eager=eager).tolerance == pytest.approx(2 * EPS * 2.0, rel=1e-12)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_not_finite_where_float64_is_fails(bad):
    assert not measure(bad).passed


def test_infinity_where_float64_has_it_passes():
    lse = torch.tensor([1.0, -torch.inf])
    (result,) = testing.measure({"lse": lse}, {"lse": lse}, {"lse": lse.double()}, torch.float32)
    assert result.passed
    (result,) = testing.measure({"lse": lse[:1].repeat(2)}, {"lse": lse}, {"lse": lse.double()}, torch.float32)
    assert not result.passed


def test_only_what_pytorch_does_otherwise_is_excluded():
    left = {
        (str(case), backend)
        for case in testing.CASES
        for backend in ("composite", "triton", "cpp", "plain")
        if testing.excluded(case, backend, torch.bfloat16, "cuda") is not None
    }
    names = [case.name for case in testing.cases("mssa") if case.options.get("dropout_p")]
    assert names
    assert left == {(f"mssa-{name}", "composite") for name in names}
    in_float32 = {c.name for c in testing.CASES if testing.excluded(c, "composite", torch.float32) is not None}
    assert in_float32 == {*names, "saturated", "causal-saturated", "d112", "d128"}


@pytest.mark.parametrize("case", testing.CASES, ids=str)
def test_what_triton_interprets_is_not_in_bfloat16(case):
    reasons = {d: testing.excluded(case, "triton", d, "cpu") for d in (torch.float32, torch.float16, torch.bfloat16)}
    assert [d for d, reason in reasons.items() if reason] == [torch.bfloat16]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", testing.CASES, ids=str)
def test_promotion_changes_no_value(case, dtype):
    inputs = testing.make_inputs(case, dtype)
    for name, tensor in inputs.to(torch.float64).differentiable.items():
        assert (tensor.dtype, inputs.differentiable[name].dtype) == (torch.float64, dtype)
        assert torch.equal(tensor, inputs.differentiable[name].double())


@pytest.mark.parametrize("case", [c for c in testing.cases("ista") if c.op == "ista"], ids=str)
def test_no_activation_is_within_rounding_of_its_threshold(case):
    x, weight = (t.double() for t in testing.make_inputs(case, torch.bfloat16).differentiable.values())
    step_size, lambd = case.options.get("step_size", 0.1), case.options.get("lambd", 0.1)
    update = x + step_size * (x @ weight - x @ weight.T @ weight)
    size = update if case.options.get("nonnegative", True) else update.abs()
    assert ((size - step_size * lambd).abs() > 0.99 * torch.finfo(torch.bfloat16).eps).all()


def tokens(op, name):
    case = next(c for c in testing.CASES if (c.op, c.name) == (op, name))
    return testing.make_inputs(case, torch.float32)


def test_cases_are_what_they_are_named_after():
    dead = tokens("tssa", "dead-channel").differentiable["w"]
    assert not dead[..., 0].any()
    assert dead[..., 1:].all()
    faint = tokens("tssa", "faint-channel").differentiable["w"][..., 0].square().sum(-1)
    assert ((faint > 1e-24) & (faint.square() < torch.finfo(torch.float32).smallest_normal)).all()
    zero = tokens("mssa", "zero-tokens").differentiable["w"]
    assert not zero[:, :, ::7].any()
    norms = tokens("mssa", "mixed-norms").differentiable["w"].norm(dim=-1).mean((0, 1))
    assert norms[-1] > 32 * norms[0]
    assert tokens("mssa", "common-mean").differentiable["w"].mean() > 3
    opposed = tokens("mssa", "pad-opposed")
    keys = opposed.others["key_padding_mask"][:, None, :, None]
    scores = 0.25 * opposed.differentiable["w"].double() @ opposed.differentiable["w"].double().mT
    pairs = (~keys & keys.mT).expand(scores.shape)
    assert scores[pairs].min() > -100
    assert scores[pairs].max() < -75
    padded = tokens("mssa", "pad-row").others["key_padding_mask"]
    assert padded.any(1).tolist() == [True, True, False]
    for op, name in (("mssa", "strided"), ("tssa", "strided"), ("ista", "strided")):
        tensor = next(iter(tokens(op, name).differentiable.values()))
        assert not any(tensor.transpose(*pair).is_contiguous() for pair in ((0, 0), (0, 1), (-3, -2)))
    assert tokens("mssa", "contiguous").differentiable["w"].is_contiguous()
    projected = tokens("mssa", "n65").differentiable["w"]
    assert projected.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("name", ["msa", "ista_overcomplete", "", None])
def test_there_are_no_cases_of_what_is_no_operator(name):
    with pytest.raises(ValueError, match=f"cases: package must be one of mssa, tssa, ista, got {name!r}"):
        testing.cases(name)
