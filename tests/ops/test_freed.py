"""Tensors whose storage was freed or cut: sizes stay, memory is gone, and a kernel that reads it ends the process."""

import re
from functools import partial

import pytest
import torch

import crate_kernels as ck
from crate_kernels._native import extension
from tests.ops import test_op_checks
from tests.ops.common import NEEDS_EXTENSION, seldom
from tests.ops.repeated import CALLS, NEEDS_PLANS, both, call_of, known

REFUSAL = "must have a storage of at least .* bytes, got one of"
HOW = {"freed": 0, "cut": 1}  # share of the bytes that are left, but for the last one
BACKENDS = sorted({*test_op_checks.NAMES, "reference"})
chosen = test_op_checks.chosen


def corrupt(t, how):
    """Free the storage of a tensor, or cut it within its last element."""
    storage = t.untyped_storage()
    reach = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    storage.resize_(HOW[how] * ((t.storage_offset() + reach) * t.itemsize - 1))


@pytest.mark.parametrize("chosen", BACKENDS, indirect=True)
@pytest.mark.parametrize("name", test_op_checks.CALLS)
@pytest.mark.parametrize("how", seldom(HOW.keys(), "cut"))
def test_a_call_refuses_each_input_by_name(name, chosen, how):
    function, inputs = test_op_checks.CALLS[name]
    for i in range(len(inputs)):
        tensors = [t.clone() for t in inputs]
        corrupt(tensors[i], how)
        with pytest.raises(ValueError, match=f"^{name.partition('-')[0]}: .*{REFUSAL}"):
            function(*tensors, backend=chosen)


def accepted(function, schema, values):
    """Return the tensors of a call that it does not refuse, by name, when they were freed."""
    found = []
    for argument in schema.arguments:
        if isinstance(values.get(argument.name), torch.Tensor):
            options = {name: v.clone() if isinstance(v, torch.Tensor) else v for name, v in values.items()}
            corrupt(options[argument.name], "freed")
            error = test_op_checks.refusal(function, (options.get(a.name) for a in schema.arguments))
            if not re.search(REFUSAL, str(error)):
                found.append(f"{argument.name}: {error!r}")
    return found


# A forward's inputs are checked by its public function.
@pytest.mark.parametrize("chosen", test_op_checks.NAMES, indirect=True)
@pytest.mark.parametrize("entry", [e for e in test_op_checks.ENTRIES if not e.partition("-")[0].endswith("_fwd")])
def test_an_op_refuses_each_tensor(entry, chosen):
    package, function, inputs, _ = test_op_checks.ENTRIES[entry]
    if (package == "mssa" and chosen == "composite" and "decode" not in entry) or (
        package in ("lse", "linear") and chosen != "composite"
    ):
        pytest.skip("needs a backend that has this op")
    schema = getattr(torch.ops.crate_kernels, entry.partition("-")[0]).default._schema
    assert accepted(function, schema, {**inputs(), "backend": chosen}) == []


@NEEDS_EXTENSION
@pytest.mark.parametrize("entry", test_op_checks.LIBRARY)
def test_an_op_of_the_extension_refuses_each_tensor(entry):
    extension.load()
    overload, schema, values, _ = test_op_checks.library_call(entry)
    assert accepted(overload, schema, values) == []


def layouts():
    """Return tensors of the same sizes that reach the last byte of their storage, by name."""
    base = torch.arange(2 * 3 * 5 * 16, dtype=torch.float32).view(2, 3, 5, 16).sin()
    cut = torch.zeros(2, 5, 3 * 3 * 16)[:, :, -48:].view(2, 5, 3, 16).transpose(1, 2)
    ends = torch.zeros(7 + base.numel())[7:].view_as(base)
    for t in (cut, ends):
        t.copy_(base)
    return {"whole": base, "part-of-a-projection": cut, "end": ends, "expanded": base[:1, :1].expand(2, 3, 5, 16)}


@pytest.mark.parametrize("chosen", BACKENDS, indirect=True)
@pytest.mark.parametrize("layout", layouts())
def test_what_reaches_the_last_byte_of_a_storage_is_taken(layout, chosen):
    w = layouts()[layout]
    temp = torch.ones(3)
    for _ in range(3):
        expected = ck.tssa(w.contiguous(), temp, backend="reference")
        torch.testing.assert_close(ck.tssa(w, temp, backend=chosen), expected)
    corrupt(w, "cut")
    with pytest.raises(ValueError, match=f"tssa: w {REFUSAL}"):
        ck.tssa(w, temp, backend=chosen)


def test_an_empty_tensor_needs_no_storage():
    for w in (torch.empty(0, 3, 5, 16), torch.randn(2, 3, 5, 16)[:, :, :0]):
        w.untyped_storage().resize_(0)
        assert ck.tssa(w, torch.ones(3)).shape == w.shape


@NEEDS_PLANS
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", CALLS)
def test_a_repeated_call_refuses_each_input_and_gradient(name, how):
    call, make = known(name)
    for i in range(len(make())):
        with torch.no_grad():
            inputs = list(make())
            corrupt(inputs[i], how)
            with pytest.raises(ValueError, match=REFUSAL):
                call(*inputs)
        for of in ("input", "gradient"):
            inputs = [t.requires_grad_() for t in make()]
            out = call(*inputs)
            out = out[0] if isinstance(out, tuple) else out
            dout = torch.ones_like(out)
            corrupt(inputs[i].detach() if of == "input" else dout, how)
            with pytest.raises(ValueError, match=REFUSAL):
                out.backward(dout)


@NEEDS_PLANS
@pytest.mark.parametrize("name", ["mssa", "tssa-members"])
def test_a_repeated_call_refuses_an_output_that_was_freed(name):
    call, make = call_of(name)
    for seed in range(3):
        both(call, make(seed=seed))
    inputs = [t.requires_grad_() for t in make()]
    found = call(*inputs)
    out, kept = (found, found) if name == "mssa" else found
    kept.detach().untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=REFUSAL):
        out.backward(torch.ones(out.shape))


@pytest.mark.parametrize("chosen", test_op_checks.NAMES, indirect=True)
@pytest.mark.parametrize("name", ["data", "energy", "weighted", "mass", "lengths"])
def test_a_step_refuses_a_cache_that_was_freed(name, chosen):
    w = torch.randn(2, 3, 1, 16)
    if name == "data":
        cache, call = ck.SubspaceCache(2, 3, 7, 16), partial(ck.mssa, w)
    else:
        cache, call = ck.TokenStatsCache(2, 3, 16), partial(ck.tssa, w, torch.ones(3))
    step = partial(call, causal=True, cache=cache, backend=chosen)
    for _ in range(3):
        step()
    getattr(cache, name).untyped_storage().resize_(0)
    with pytest.raises((ValueError, RuntimeError), match=rf"{name} {REFUSAL}"):
        step()
