"""A backend that is named computes every op and direction itself; only where none is named may another step in."""

import pytest
import torch

import crate_kernels
from crate_kernels._core import backends as _backend
from crate_kernels._core import plan, products
from tests.ops.common import backends, outputs_and_gradients, randn, seldom
from tests.ops.decoding import attend, new_cache, tokens

FULL = {"mssa": {}, "tssa": {}, "tssa-causal": {"causal": True}}
PASSES = {
    "mssa": ["forward", "backward"],
    "tssa": ["forward", "backward"],
    "tssa-causal": ["forward_causal", "backward_causal"],
    "ista": ["forward", "backward"],
    "ista_overcomplete": ["forward_overcomplete", "backward_overcomplete"],
}
PACKAGE = {"tssa-causal": "tssa", "ista_overcomplete": "ista"}
PUBLIC = {form: form.partition("-")[0] for form in PASSES}  # the function that a user calls
# bf16 for ista's backward and many tokens for decoding: composite is as fast there as cpp, and is taken for None.
CALLS = [
    pytest.param(form, *p.values, id=f"{form}-{p.id}", marks=p.marks)
    for form in PASSES
    for p in backends(PACKAGE.get(form, form), reference=False)
    if (form, p.values[0]) != ("mssa", "composite")  # composite's mssa stays outside the op
]
DECODERS = [
    pytest.param(op, *p.values, id=f"{op}-{p.id}", marks=p.marks)
    for op in ("mssa", "tssa")
    for p in backends(op, reference=False)
]


def call(form, backend):
    """Return a function of tokens (2, 3, 12, 8) that calls the form's public function."""
    if form in FULL:
        function, own = getattr(crate_kernels, PACKAGE.get(form, form)), FULL[form]
        return lambda w: function(w, *([torch.ones(3).to(w)] if form != "mssa" else []), **own, backend=backend)
    width = 8 if form == "ista" else 16
    function = getattr(crate_kernels, form)
    weight = randn(8, width, dtype=torch.float64, seed=3) * 8**-0.5
    return lambda w: function(w, weight.to(w), backend=backend)


@pytest.fixture
def ran(monkeypatch):
    """List (module, function) of every kernel that an op's body runs, at every call: a plan runs no body."""
    monkeypatch.setattr(plan, "is_off", lambda: True)
    calls, kernel = [], _backend.kernel

    class Recorder:
        def __init__(self, module):
            self.module = module

        def __getattr__(self, name):
            found = getattr(self.module, name)
            if name == "sums_every":  # what a forward is to save, which no kernel computes
                return found
            return lambda *args: (calls.append((self.module.__name__, name)), found(*args))[1]

    monkeypatch.setattr(_backend, "kernel", lambda *args: Recorder(kernel(*args)))
    return calls


def module(op, backend, device):
    return _backend.kernel(op, backend, device).module.__name__


@pytest.fixture
def preferred(monkeypatch):
    """Return a function that makes a backend the one that None chooses, as it is on its machines."""
    return lambda backend, device: monkeypatch.setitem(_backend._PREFERENCE, device, (backend,))


WAYS = {"fp32": (torch.float32, False), "bf16": (torch.bfloat16, False), "bf16-compiled": (torch.bfloat16, True)}


@pytest.mark.parametrize(("form", "backend", "device"), CALLS)
@pytest.mark.parametrize(("dtype", "compiled"), seldom(WAYS, "bf16"))
def test_a_named_backend_runs_forward_and_backward(form, backend, device, dtype, compiled, ran):
    torch._dynamo.reset()
    function = torch.compile(call(form, backend), backend="aot_eager") if compiled else call(form, backend)
    w = randn(2, 3, 12, 8, dtype=dtype, device=device)
    outputs_and_gradients(function, w)
    outputs_and_gradients(lambda w: function(w) + function(w.detach()), w)  # again without a graph
    here = module(PACKAGE.get(form, form), backend, device)
    forward, backward = PASSES[form]
    assert [entry for entry in ran if entry[0] != here] == []
    assert [name for _, name in ran] == [forward, backward, forward, forward, backward]


@pytest.mark.parametrize(("op", "backend", "device"), DECODERS)
@pytest.mark.parametrize("dtype", seldom({"fp32": torch.float32, "fp16": torch.float16}, "fp32"))
def test_a_named_backend_decodes(op, backend, device, dtype, ran):
    cache = new_cache(op, dtype, device)
    for seqlen in (1, 10):  # composite is faster for ten
        attend(op, tokens(seqlen, dtype, device), backend, cache)
    assert ran == [(module(op, backend, device), "decode")] * 2


@pytest.mark.skipif(
    _backend.unavailable_reason("mssa", "cpp") is not None, reason="needs python -m crate_kernels build"
)
def test_where_none_is_named_composite_takes_what_it_is_faster_at(ran, monkeypatch):
    monkeypatch.setattr("crate_kernels.ops.ista.op._SMALL", 9 * 16 * 16)
    w = randn(2, 3, 12, 8, dtype=torch.bfloat16)
    outputs_and_gradients(call("ista", None), w)
    few = randn(9, 16, dtype=torch.bfloat16), randn(16, 16, dtype=torch.bfloat16, seed=1)
    outputs_and_gradients(crate_kernels.ista, *few)
    cache = new_cache("mssa")
    for seqlen in (1, 10):
        attend("mssa", tokens(seqlen), None, cache)
    names = [(name.rpartition(".")[2], function) for name, function in ran]
    converted = products.fast_dtype(torch.bfloat16, w[..., 0].numel()) != torch.bfloat16
    backward = "native" if converted else "composite"  # cpp converts in fewer passes
    many, few = [("native", "forward"), (backward, "backward")], [("native", "forward"), ("native", "backward")]
    assert names == [*many, *few, ("native", "decode"), ("composite", "decode")]


@pytest.mark.parametrize(("form", "backend", "device"), CALLS)
def test_none_is_the_preferred_backend_through_the_op(form, backend, device, ran, preferred):
    preferred(backend, device)
    w = randn(2, 3, 12, 8, dtype=torch.float32, device=device)
    expected = outputs_and_gradients(call(form, backend), w)
    ran.clear()
    torch.testing.assert_close(outputs_and_gradients(call(form, None), w), expected, rtol=0, atol=0)
    assert ran == [(module(PACKAGE.get(form, form), backend, device), name) for name in PASSES[form]]


class Picky:
    """A kernel module that takes no tokens."""

    def __getattr__(self, name):
        def refuse(*args):
            raise _backend.Refused("takes shorter tokens, got long ones")

        return refuse


@pytest.mark.parametrize("form", [form for form in PASSES if form != "mssa"])
def test_what_a_kernel_refuses_composite_takes_for_none_alone(form, monkeypatch):
    package = PACKAGE.get(form, form)
    picky = _backend.Backend("picky", "crate_kernels.ops.{op}.composite", ("cpu",), (torch.float32,))
    monkeypatch.setitem(_backend._BACKENDS, "picky", picky)
    monkeypatch.setitem(_backend._has_kernel, (package, "picky"), True)
    monkeypatch.setitem(_backend._kernels, (package, "picky"), Picky())
    w = randn(2, 3, 12, 8, dtype=torch.float32)
    refusal = f"^{PUBLIC[form]}: backend='picky' takes shorter tokens, got long ones; use"
    with pytest.raises(NotImplementedError, match=refusal):
        call(form, "picky")(w)
    monkeypatch.setattr(_backend, "_PREFERENCE", {"cpu": ("picky",)})
    expected = outputs_and_gradients(call(form, "composite"), w)
    torch.testing.assert_close(outputs_and_gradients(call(form, None), w), expected, rtol=0, atol=0)


class Exhausted:
    """A kernel module without memory for its workspace."""

    def __getattr__(self, name):
        def allocate(*args):
            raise MemoryError

        return allocate


@pytest.mark.parametrize("form", [form for form in PASSES if form != "mssa"])
def test_an_error_in_an_ops_body_names_the_function_that_was_called(form, monkeypatch):
    package, w = PACKAGE.get(form, form), randn(2, 3, 12, 8, dtype=torch.float32)
    monkeypatch.setitem(_backend._kernels, (package, "composite"), Exhausted())
    with pytest.raises(MemoryError, match=f"^{PUBLIC[form]}: backend='composite' ran out of memory"):
        call(form, "composite")(w)
    monkeypatch.setitem(_backend._kernels, (package, "composite"), object())
    with pytest.raises(RuntimeError, match=f"^{PUBLIC[form]}: no kernel takes cpu tensors of torch.float32 here"):
        call(form, "composite")(w)


def test_an_exported_program_takes_the_kernel_of_the_machine_it_runs_on(monkeypatch):
    """What named none was traced where there was a kernel; composite's mssa, alone, is no op of ours."""

    class Model(torch.nn.Module):
        def forward(self, w):
            return crate_kernels.mssa(w) + crate_kernels.tssa(w, torch.ones(3))

    w = randn(1, 3, 5, 8, dtype=torch.float32)
    _backend.register(_backend.Backend("plain", "tests.ops.{op}.plain", ("cpu",), (torch.float32,)))
    monkeypatch.setattr(_backend, "_PREFERENCE", {"cpu": ("plain",)})
    try:
        program = torch.export.export(Model(), (w,)).module()
        torch.testing.assert_close(program(w), Model()(w))
        assert _backend.resolve("tssa", None, w.device, w.dtype) == "composite"
    finally:
        _backend.unregister("plain")
    monkeypatch.setattr(_backend, "_PREFERENCE", {})
    with pytest.raises(
        RuntimeError, match=r"^mssa: no kernel takes cpu tensors of torch\.float32 here; what is to run"
    ):
        program(w)


def test_the_mark_of_an_unnamed_backend_cannot_be_asked_for():
    with pytest.raises(ValueError, match=r"^mssa: backend must be None or one of triton, .*, got 'auto'"):
        crate_kernels.mssa(randn(1, 2, 5, 8), backend=_backend.AUTO)
