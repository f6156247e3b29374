"""Calls on a pretended GPU that was timed: which backend computes, at the first call and at a repeated one."""

from functools import partial

import pytest
import torch

import crate_kernels as ck
from crate_kernels._core import backends, measured, plan
from crate_kernels.ops.mssa import composite
from tests.ops.common import outputs_and_gradients
from tests.ops.repeated import NEEDS_PLANS, hits, inputs
from tests.tools import timed_gpu

pytestmark = NEEDS_PLANS
SEQLEN = 9  # of a class that goes from 9 to 16
# operator: options, sizes and length of its class
CALLS = {
    "mssa": ("mssa", {}, [16], SEQLEN),
    "mssa-causal": ("mssa", {"causal": True}, [16], SEQLEN),
    "tssa": ("tssa", {}, [16], SEQLEN),
    "tssa-causal": ("tssa", {"causal": True}, [16], SEQLEN),
    "ista": ("ista", {}, [32], 2 * SEQLEN),
    "ista-overcomplete": ("ista_overcomplete", {}, [32], 2 * SEQLEN),
}


@pytest.fixture(params=CALLS.values(), ids=CALLS)
def known(request, tmp_path):
    """Return a call whose class takes composite forward and backward, and a function that draws its inputs."""
    op, options, sizes, length = request.param
    row = {"op": op, "dtype": "float32", "sizes": sizes, "length": measured.bucket(length), "direction": "both"}
    row |= {"causal": options.get("causal", False), "backend": "composite"}
    with timed_gpu.with_table([row], tmp_path):
        yield partial(getattr(ck, op), **options), partial(inputs, op)


@pytest.fixture
def ran(monkeypatch):
    """Return the backends that computed, in order, where no plan did."""
    names, attempt, attend = [], backends.attempt, composite.mssa

    def noted(op, function, name, *rest):
        names.append(name)
        return attempt(op, function, name, *rest)

    monkeypatch.setattr(backends, "attempt", noted)
    monkeypatch.setattr(composite, "mssa", lambda *args: (names.append("composite"), attend(*args))[1])
    return names


def test_none_takes_what_was_the_fastest_of_its_class(known, ran, unrepeated):
    call, make = known
    outputs_and_gradients(call, *make(seqlen=SEQLEN))
    assert {*ran} == {"composite"}
    ran.clear()
    with torch.no_grad():
        call(*make(seqlen=SEQLEN))
    outputs_and_gradients(call, *make(seqlen=40))
    assert {*ran} == {"cpp"}


FURTHER = {
    "tssa": {},
    "tssa-causal": {"denom_bias": torch.linspace(0.1, 1, 36).view(3, 12, 1)},
    "ista": {},
    "ista-overcomplete": {"decoder": torch.eye(32)},
}


@pytest.mark.parametrize(
    ("known", "further"), [(CALLS[name], more) for name, more in FURTHER.items()], ids=FURTHER, indirect=["known"]
)
def test_a_backward_counts_whichever_input_wants_a_gradient(further, known, ran, unrepeated):
    call, make = known
    tensors = [*make(seqlen=SEQLEN), *further.values()]
    for leaf in tensors:
        inputs = [t.detach().requires_grad_(t is leaf) for t in tensors]
        call(*inputs[:2], **dict(zip(further, inputs[2:], strict=True))).sum().backward()
    assert {*ran} == {"composite"}


def test_tokens_that_autocast_casts_are_of_the_class_that_they_are_cast_to(ran, unrepeated, tmp_path):
    row = {"op": "mssa", "dtype": "bfloat16", "sizes": [16], "length": measured.bucket(SEQLEN), "causal": False}
    with timed_gpu.with_table([row | {"direction": "forward", "backend": "composite"}], tmp_path):
        (w,) = inputs("mssa", seqlen=SEQLEN)
        ck.mssa(w)
        with torch.autocast("cpu", torch.bfloat16):
            ck.mssa(w)
    assert ran == ["cpp", "composite"]


def test_a_named_backend_is_obeyed(known, ran, unrepeated):
    call, make = known
    outputs_and_gradients(partial(call, backend="cpp"), *make(seqlen=SEQLEN))
    assert {*ran} == {"cpp"}


def test_repeated_calls_take_the_same(known, ran):
    """A plan of the usual backend serves the same sizes without a gradient, and its options are the same."""
    call, make = known
    for seed in range(3):
        with torch.no_grad():
            call(*make(seed, seqlen=SEQLEN))
    expected = outputs_and_gradients(partial(call, backend="composite"), *make(seqlen=SEQLEN))
    for seed in (1, 2, 0):
        found = outputs_and_gradients(call, *make(seed, seqlen=SEQLEN))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    with torch.no_grad():
        usual = call(*make(seqlen=SEQLEN), backend="cpp")
        repeats, again = hits(lambda: call(*make(seqlen=SEQLEN)))
    assert repeats == 1
    assert torch.equal(again, usual)


def test_a_plan_of_the_usual_backend_serves_no_call_that_takes_another(known, ran):
    plan.forget()
    call, make = known
    for seed in range(3):
        with torch.no_grad():
            call(*make(seed, seqlen=SEQLEN))
    ran.clear()
    outputs_and_gradients(call, *make(seqlen=SEQLEN))
    assert "composite" in ran
    assert "cpp" not in ran


MASKED = {
    "mask": {"key_padding_mask": torch.ones(2, SEQLEN, dtype=torch.bool)},
    "second-result": {"return_lse": True},
    "dropout": {"dropout_p": 0.1},
    "threshold": {"phi": "threshold", "threshold": 0.3},
    "named": {"backend": "cpp"},
}


@pytest.mark.parametrize("options", MASKED.values(), ids=MASKED)
@pytest.mark.parametrize("known", [CALLS["mssa"]], ids=["mssa"], indirect=True)
def test_other_calls_of_these_sizes_take_the_usual_backend(options, known, ran, unrepeated):
    call, make = known
    outputs_and_gradients(partial(call, **options), *make(seqlen=SEQLEN))
    assert {*ran} == {"cpp"}


def test_what_is_traced_takes_the_usual_backend(known, ran):
    call, make = known
    traced = torch.compile(call, backend="aot_eager", fullgraph=True)
    outputs_and_gradients(traced, *make(seqlen=SEQLEN))
    assert ran[0] == "cpp"


@pytest.mark.parametrize("wrong", [1, torch.ones(2), []], ids=["integer", "tensor", "list"])
@pytest.mark.parametrize("known", [CALLS["mssa-causal"], CALLS["tssa-causal"]], ids=["mssa", "tssa"], indirect=True)
def test_a_wrong_option_is_refused_as_ever(wrong, known):
    call, make = known
    with pytest.raises(TypeError, match="causal must be"):
        call(*make(seqlen=SEQLEN), causal=wrong)
