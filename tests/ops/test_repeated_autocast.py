"""Autocast on a call that a plan repeats: what it casts, and what it leaves, as on a call that is checked."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from crate_kernels._core import backends, plan
from tests.ops.common import outputs_and_gradients
from tests.ops.repeated import CALLS, EACH, NEEDS_PLANS, Wrapped, both, call_of, hits, known, repeated_calls  # noqa: F401

pytestmark = NEEDS_PLANS
each = pytest.mark.parametrize("name", EACH)
BF16, FP16 = torch.bfloat16, torch.float16
HALVES = pytest.mark.parametrize("half", [BF16, FP16], ids=["bf16", "fp16"])


def under(call, half=BF16, device="cpu"):
    """Return a call that autocast sees."""

    def cast(*tensors, **options):
        with torch.autocast(device, half):
            return call(*tensors, **options)

    return cast


def of_dtype(make, dtype):
    """Return what draws the same inputs, the tokens in a dtype."""

    def drawn(seed=0):
        tokens, *parameters = make(seed=seed)
        return tokens.to(dtype), *parameters

    return drawn


def checked(call, tensors):
    """Return outputs and gradients of a call that nothing repeats."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "is_off", lambda: True)
        return both(call, tensors)


def same(found, expected):
    assert [t.dtype for t in found] == [t.dtype for t in expected]
    assert [torch.equal(a, b) for a, b in zip(found, expected, strict=True)] == [True] * len(expected)


@HALVES
@pytest.mark.parametrize("tokens", [torch.float32, BF16, FP16], ids=["of-fp32", "of-bf16", "of-fp16"])
@pytest.mark.parametrize("name", CALLS)
def test_a_repeated_call_is_cast_as_a_checked_one(name, tokens, half, monkeypatch):
    call, make = call_of(name)
    call, make = under(call, half), of_dtype(make, tokens)
    for seed in range(3):
        both(call, make(seed))
    expected = checked(call, make(seed=3))
    monkeypatch.setattr(backends, "resolve", None)
    found, actual = hits(lambda: both(call, make(seed=3)))
    assert found == 2
    same(actual, expected)


@each
def test_a_repeated_call_without_a_gradient_is_cast_too(name, monkeypatch):
    call, make = call_of(name)
    call = under(call)
    with torch.no_grad():
        expected = [call(*make(seed=seed)) for seed in range(4)][-1]
        monkeypatch.setattr(backends, "resolve", None)
        found, actual = hits(lambda: call(*make(seed=3)))
    assert found == 1
    same([actual], [expected])


@each
def test_a_backward_under_autocast_is_repeated_and_casts_nothing(name):
    call, make = known(name)
    call = under(call)
    for _ in range(4):
        tensors = [t.requires_grad_() for t in make(seed=3)]
        out = call(*tensors)
        expected = torch.autograd.grad(out, tensors, torch.ones_like(out), retain_graph=True)
        with torch.autocast("cpu", FP16):
            found, actual = hits(lambda out=out, to=tensors: torch.autograd.grad(out, to, torch.ones_like(out)))
    assert found == 1
    same(actual, expected)


@each
def test_a_region_without_autocast_inside_one_casts_nothing(name):
    call, make = call_of(name)
    expected = both(call, make(seed=3))

    def inner(*tensors):
        with torch.autocast("cpu", enabled=False):
            return call(*tensors)

    for seed in range(3):
        both(under(call), make(seed=seed))
        both(under(inner), make(seed=seed))
    found, actual = hits(lambda: both(under(inner), make(seed=3)))
    assert found == 2
    same(actual, expected)


@each
def test_every_dtype_of_autocast_is_repeated_as_its_own(name):
    call, make = call_of(name)
    forms = {half: under(call, half) for half in (BF16, FP16)} | {None: call}
    expected = {half: checked(form, make(seed=3)) for half, form in forms.items()}
    for _ in range(4):
        for half, form in forms.items():
            found, actual = hits(lambda form=form: both(form, make(seed=3)))
            same(actual, expected[half])
    assert found == 2


@each
def test_autocast_of_another_device_leaves_a_repeated_call_alone(name):
    call, make = known(name)
    expected = both(call, make(seed=3))
    torch.set_autocast_enabled("cuda", True)
    try:
        found, actual = hits(lambda: both(call, make(seed=3)))
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert found == 2
    same(actual, expected)


WRONG = {
    "integers": (torch.Tensor.long, ValueError, "floating dtype"),
    "bytes": (lambda t: t.to(torch.float8_e4m3fn), ValueError, "16 bits or more"),
    "freed": (lambda t: (t.untyped_storage().resize_(0), t)[1], ValueError, "was freed or cut"),
    "sparse": (torch.Tensor.to_sparse, ValueError, "dense"),
}


@pytest.mark.parametrize("kind", WRONG)
@each
def test_tokens_of_a_wrong_kind_are_refused_under_autocast(name, kind):
    call, make = known(name)
    call = under(call)
    for _ in range(3):
        call(*make())
    tokens, *parameters = make()
    change, error, message = WRONG[kind]
    with pytest.raises(error, match=message):
        call(change(tokens.clone()), *parameters)


@HALVES
@pytest.mark.parametrize("tokens", [torch.float32, BF16], ids=["of-fp32", "of-bf16"])
@pytest.mark.parametrize("name", ["ista", "ista-overcomplete"])
def test_a_half_dictionary_is_taken_as_float32_on_a_repeated_call(name, tokens, half):
    call, make = call_of(name)
    x, weight = make(seed=3)
    operands = x.to(tokens), weight.to(half)
    others = [(x.to(dtype), weight.to(dtype)) for dtype in (tokens, half)]
    expected = [checked(under(call), tensors) for tensors in (operands, *others)]
    for _ in range(4):
        for tensors, results in zip((operands, *others), expected, strict=True):
            same(both(under(call), tensors), results)


@each
def test_compile_export_and_fakes_after_repeated_calls_under_autocast(name):
    torch._dynamo.reset()
    call, make = call_of(name)
    for seed in range(3):
        both(under(call), make(seed=seed))
    expected = both(under(call), make())
    compiled = torch.compile(under(call), fullgraph=True, backend="aot_eager")
    found = both(compiled, make())
    assert [t.dtype for t in found] == [t.dtype for t in expected]
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    with FakeTensorMode() as mode:
        fake = under(call)(*map(mode.from_tensor, make()))
    assert (fake.shape, fake.dtype, fake.stride()) == (expected[0].shape, expected[0].dtype, expected[0].stride())
    with torch.autocast("cpu", BF16):
        exported = torch.export.export(Wrapped(call), make()).module()
        assert exported(*make()).dtype == expected[0].dtype


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@each
def test_transforms_work_under_autocast_on_a_repeated_call(name):
    call, make = known(name)
    call = under(call)
    w, *others = make()
    for _ in range(3):
        expected = outputs_and_gradients(call, w, *others)[:2]
    grad = torch.func.grad(lambda t: call(t, *others).float().square().sum())(w)
    leaf = w.clone().requires_grad_()
    torch.testing.assert_close(grad, torch.autograd.grad(call(leaf, *others).float().square().sum(), leaf)[0])
    torch.testing.assert_close(torch.vmap(lambda t: call(t, *others))(w[None]), expected[0][None])
