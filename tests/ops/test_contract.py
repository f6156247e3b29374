"""What every backend behind the op boundary owes PyTorch: compile, export, checkpoint, meta tensors."""

import sys
from functools import partial

import pytest
import torch
import torch._dynamo.testing
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import crate_kernels
from crate_kernels import testing
from crate_kernels._core import backends
from tests.ops.common import (
    EMULATED,
    FORMS,
    KERNELS,
    VARIATION,
    home,
    kernels,
    leaves,
    offsets,
    outputs_and_gradients,
    randn,
)

pytestmark = pytest.mark.usefixtures("plain_backend")

# The plain backend shows that a kernel file is enough for mssa, whose composite stays outside the op.
BACKENDS = {
    op: ["plain" if op == "mssa" else "composite", *kernels(spec.package)] for op, spec in testing.SPECS.items()
}
# Cases that are compiled differently; all of an operator that is not listed.
NAMES = {
    "mssa": ["n65", "causal-n65", "pad-row", "causal-packed", "dropout", "strided", "empty-batch", "n1"],
    "tssa": ["n65", "causal-n65", "pad-row", "packed", "causal-packed", "dropout", "causal-dropout", "empty-batch"],
    "ista": ["few-tokens", "many-tokens", "two-sided", "strided", "empty-batch"],
    "ista_overcomplete": ["two-steps", "one-step", "tied", "empty-batch"],
}
CALLS = [
    pytest.param(case, backend, id=f"{case}-{backend}")
    for case in testing.CASES
    for backend in BACKENDS[case.op]
    if case.name in NAMES.get(case.op, (case.name,))
]
# The case of each operator that inductor compiles and export takes.
CASE = {
    op: next((c for c in spec.cases if c.name == "causal-n65"), spec.cases[0]) for op, spec in testing.SPECS.items()
}
OPS = [pytest.param(op, backend, id=f"{op}-{backend}") for op, found in BACKENDS.items() for backend in found]


def beside(op, backend):
    """Leave to make test-all what the compiler takes for a quicker kernel that is tried too: it sees a name."""
    if backend in KERNELS:
        return VARIATION
    return pytest.mark.exhaustive if len(BACKENDS[op]) > 1 else ()


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


def call(case, inputs, backend):
    result = getattr(crate_kernels, case.op)(**inputs.differentiable, **inputs.others, **case.options, backend=backend)
    return result if isinstance(result, tuple) else (result,)


def differentiate(outputs, inputs):
    loss = sum((torch.where(out.isfinite(), out, 0.0) * (1 + out.detach().cos())).sum() for out in outputs)
    return torch.autograd.grad(loss, list(inputs.differentiable.values()))


@pytest.mark.parametrize("name", [c.name for c in testing.cases("mssa") if c.options.get("phi") in (None, "threshold")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_plain_backend_is_within_tolerance(name, dtype):
    case = next(c for c in testing.cases("mssa") if c.name == name)
    inputs = testing.make_inputs(case, dtype)
    eager = testing.run(case, inputs, "reference")
    oracle = testing.run(case, inputs.to(torch.float64), "reference")
    for result in testing.measure(testing.run(case, inputs, "plain"), eager, oracle, dtype):
        assert result.passed, result


def first(case, backend):
    """Leave all but the first case of an operator to make test-all beside cpp, and beside mssa where Triton is slow."""
    often = case.name == NAMES[case.op][0] and (backend not in KERNELS or not VARIATION or case.op == "mssa")
    return () if often else beside(case.op, backend)


# A compiled function draws another seed: the checkpoint test covers dropout.
@pytest.mark.parametrize(
    ("case", "backend"),
    [
        pytest.param(c, b, id=f"{c}-{b}", marks=first(c, b))
        for c, b in (p.values for p in CALLS)
        if not c.options.get("dropout_p")
    ],
)
def test_fullgraph_compile_equals_eager(case, backend):
    inputs = leaves(case, device=home(backend))
    compiled = torch.compile(lambda i: call(case, i, backend), fullgraph=True, backend="aot_eager")
    expected, actual = call(case, inputs, backend), compiled(inputs)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(differentiate(actual, inputs), differentiate(expected, inputs))


# The compiler sees a name: what it does around one backend it does around all.
@pytest.mark.parametrize(
    ("op", "backend"),
    [pytest.param(*p.values, id=p.id, marks=() if p.values[1] == "cpp" else pytest.mark.exhaustive) for p in OPS],
)
def test_inductor_compiles_a_module_around_the_op(op, backend):
    case = CASE[op]
    inputs = leaves(case, device=home(backend))

    def model(i):  # what stands around the op is exact, so that a difference is the op's
        doubled = testing.Inputs({k: 2 * t for k, t in i.differentiable.items()}, i.others)
        return tuple(out.abs() for out in call(case, doubled, backend))

    actual, expected = torch.compile(model, fullgraph=True)(inputs), model(inputs)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(differentiate(actual, inputs), differentiate(expected, inputs))


def of_any_length(op, backend):
    """Return a call of ``op`` that takes w of (1, 2, any seqlen, 16) alone."""
    device = home(backend)
    if op == "tssa-causal":
        temp, bias = torch.ones(2, device=device), torch.zeros(2, 600, 1, device=device)
        return lambda w: crate_kernels.tssa(w, temp, causal=True, denom_bias=bias, backend=backend)
    sizes = {"batch": 1, "nheads": 2, "seqlen": 8, "head_dim": 16, "dim": 16, "hidden": 32}
    case = testing.Case(op, "any-length", tuple(sizes[axis] for axis in testing.SPECS[op].axes))
    (first, _), *rest = testing.make_inputs(case, torch.float32, device).differentiable.items()
    options = {"causal": True, "return_lse": True} if op == "mssa" else {}
    function = partial(getattr(crate_kernels, op), **dict(rest), **options, backend=backend)
    return lambda w: function(**{first: w})[0] if options else function(**{first: w})


def with_lse(w, **options):
    """Return a result that takes both outputs of mssa by composite, padded or packed as ``w`` is long."""
    if options.pop("packed", False):
        length, w = w.shape[2], w.transpose(1, 2).flatten(0, 1)
        options["cu_seqlens"] = torch.arange(w.shape[0] // length + 1, dtype=torch.int32) * length
        out, lse = crate_kernels.mssa(w, max_seqlen=length, return_lse=True, backend="composite", **options)
        return out * lse.t().unsqueeze(-1)
    if options.pop("padded", False):
        kept = torch.arange(w.shape[2]) < w.shape[2] // 2 + 1
        options["key_padding_mask"] = kept[None].expand(w.shape[0], -1)
    out, lse = crate_kernels.mssa(w, return_lse=True, backend="composite", **options)
    return out * lse.unsqueeze(-1)


ANY_LENGTH = {**BACKENDS, "tssa-causal": BACKENDS["tssa"]}
DYNAMIC = {
    "mssa-composite": lambda w: crate_kernels.mssa(w, causal=True, backend="composite"),
    "mssa-lse-composite": with_lse,
    "mssa-lse-causal-padded-composite": partial(with_lse, causal=True, padded=True),
    "mssa-lse-packed-composite": partial(with_lse, packed=True),
    **{f"{op}-{backend}": of_any_length(op, backend) for op, found in ANY_LENGTH.items() for backend in found},
}
BESIDE = {f"{op}-{b}" for op, found in ANY_LENGTH.items() for b in found if beside(op.partition("-")[0], b)}
SYMBOLS = {f"{op}-{name}" for op in ("mssa", "tssa", "ista") for name in ("plain", *KERNELS)} - BESIDE


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=VARIATION if n in SYMBOLS else pytest.mark.exhaustive) for n in DYNAMIC]
)
def test_compiles_with_every_size_a_symbol(name):
    compiled = torch.compile(DYNAMIC[name], fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in ((2, 2, 9, 16), (1, 2, 12, 16)):
        w = randn(*shape, dtype=torch.float32, device=home(name.rpartition("-")[2])).requires_grad_()
        results = []
        for function in (compiled, DYNAMIC[name]):
            out = function(w)
            results.append((out.detach(), *torch.autograd.grad(out.sum(), w)))
        torch.testing.assert_close(*results)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.exhaustive if n in BESIDE - {"mssa-triton"} else ()) for n in DYNAMIC]
)
def test_a_new_seqlen_does_not_recompile(name):
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(DYNAMIC[name], fullgraph=True, backend=counter)
    # 3 and 513 tokens are on either side of every choice by length: such choices belong inside the op.
    for n in (3, 17, 100) if VARIATION else (3, 17, 100, 513):
        w = torch.randn(1, 2, n, 16, device=home(name.rpartition("-")[2]), requires_grad=True)
        torch._dynamo.mark_dynamic(w, 2)
        out = compiled(w)
        torch.testing.assert_close(out, DYNAMIC[name](w))
        out.sum().backward()
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("op", "backend"),
    [pytest.param(*p.values, id=p.id, marks=VARIATION if p.values[1] in KERNELS else ()) for p in OPS],
)
def test_export(op, backend):
    case = CASE[op]
    inputs = testing.make_inputs(case, torch.float32, home(backend))
    names = list(inputs.differentiable)

    class Model(torch.nn.Module):
        def forward(self, *tensors):
            return call(case, testing.Inputs(dict(zip(names, tensors, strict=True)), {}), backend)

    tensors = tuple(inputs.differentiable.values())
    program = torch.export.export(Model(), tensors)
    torch.testing.assert_close(program.module()(*tensors), Model()(*tensors))
    assert "crate_kernels" in str(program.graph)


@pytest.mark.parametrize(
    ("case", "backend"),
    [
        pytest.param(c, b, id=f"{c}-{b}", marks=VARIATION if b in KERNELS and c.op == "mssa" else ())
        for c, b in (p.values for p in CALLS)
        if c.options.get("dropout_p")
    ],
)
@pytest.mark.parametrize(
    "compiled", [pytest.param(False, id="eager"), pytest.param(True, id="compiled", marks=VARIATION)]
)
def test_checkpoint_repeats_the_dropout_mask(case, backend, compiled):
    inputs = leaves(case, device=home(backend))
    names = list(inputs.differentiable)

    def plain(*tensors):
        return call(case, testing.Inputs(dict(zip(names, tensors, strict=True)), inputs.others), backend)

    def recomputed(*tensors):
        return checkpoint(plain, *tensors, use_reentrant=False)

    # On a GPU a compiled graph with a checkpoint draws from other generators: compare it with itself.
    alone = compiled and home(backend) == "cuda"
    results = []
    for function, seed in ((recomputed if alone else plain, 0 if alone else 1), (recomputed, 1)):
        # One compiler run each, from the same seed: the same graph draws the same dropout seed.
        torch._dynamo.reset()
        function = torch.compile(function, backend="aot_eager", fullgraph=True) if compiled else function
        torch.manual_seed(0)
        outputs = function(*inputs.differentiable.values())
        # Move the generator on: a backward that draws its mask anew must fail.
        torch.manual_seed(seed)
        results.append((outputs, differentiate(outputs, inputs)))
    torch.testing.assert_close(results[1], results[0])


# A backend for one kind of device refuses meta tensors; the default takes composite for them.
@pytest.mark.parametrize(("case", "backend"), [c for c in CALLS if c.values[1] not in KERNELS])
def test_meta_tensors(case, backend):
    inputs = testing.make_inputs(case, torch.float16)
    meta = testing.Inputs(
        {k: t.to("meta") for k, t in inputs.differentiable.items()},
        {k: t.to("meta") if isinstance(t, torch.Tensor) else t for k, t in inputs.others.items()},
    )
    for actual, expected in zip(call(case, meta, backend), call(case, inputs, backend), strict=True):
        assert actual.device.type == "meta"
        assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
        # The stride of a dimension of size 1 addresses nothing.
        moving = [d for d, size in enumerate(expected.shape) if size > 1 and expected.numel()]
        assert [actual.stride(d) for d in moving] == [expected.stride(d) for d in moving]


@FORMS
def test_composite_mssa_packs_alike_under_compile(causal):
    """Traced offsets cannot be read, so the sequences are padded to the longest instead of split."""

    def packed(w):
        packing = {"cu_seqlens": offsets((5, 0, 9, 1)), "max_seqlen": 9}
        return crate_kernels.mssa(w, **packing, causal=causal, return_lse=True, backend="composite")

    compiled = torch.compile(packed, fullgraph=True, backend="aot_eager")
    w = randn(15, 3, 8, dtype=torch.float32)
    torch.testing.assert_close(outputs_and_gradients(compiled, w), outputs_and_gradients(packed, w))
    # Padded places of a shorter sequence read another sequence's token, which may be NaN.
    w[5:14] = torch.nan
    out, lse, dw = outputs_and_gradients(compiled, w)
    for tokens in (out, lse.t(), dw):
        assert tokens.isfinite().flatten(1).all(1).tolist() == [True] * 5 + [False] * 9 + [True]


def test_composite_mssa_takes_meta_tensors():
    w = torch.empty(2, 3, 5, 16, device="meta", requires_grad=True)
    out = crate_kernels.mssa(w, causal=True)
    (dw,) = torch.autograd.grad(out.sum(), w)
    assert out.shape == dw.shape == w.shape


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_decoding_writes_the_cache_in_place_without_recompiling_every_step(compiled):
    torch.manual_seed(0)
    w = torch.randn(2, 3, 12, 8)
    cache = crate_kernels.SubspaceCache(2, 3, 12, 8)
    address = cache.data.data_ptr()
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")

    def step(token, cache):
        return crate_kernels.mssa(token, causal=True, cache=cache)

    function = torch.compile(step, fullgraph=True, backend=counter) if compiled else step
    outs = [function(w[:, :, n : n + 1].clone(), cache) for n in range(12)]
    torch.testing.assert_close(torch.cat(outs, 2), crate_kernels.mssa(w, causal=True))
    assert cache.data.data_ptr() == address
    torch.testing.assert_close(cache.data, w)
    # One compilation for the first length, one with the length as a symbol.
    assert counter.frame_count <= 2


@pytest.mark.parametrize("watcher", ["mode", "profiler", "subclass", "nobody"])
def test_whatever_watches_the_dispatcher_sees_the_op(watcher):
    class Watcher(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    class Subclass(torch.Tensor):
        @staticmethod
        def __new__(cls, inner):
            outer = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
            outer.inner = inner
            return outer

        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            seen.append(str(function))
            plain = [a.inner if isinstance(a, cls) else a for a in args]
            return function(*plain, **(kwargs or {}))

    seen, w = [], randn(1, 2, 5, 8, dtype=torch.float32)
    if watcher == "mode":
        with Watcher():
            crate_kernels.mssa(w, backend="plain")
    elif watcher == "profiler":
        with torch.autograd.profiler.profile() as profile:
            crate_kernels.mssa(w, backend="plain")
        seen = [event.name.replace("::", ".") + ".default" for event in profile.function_events]
    else:
        crate_kernels.mssa(Subclass(w) if watcher == "subclass" else w, backend="plain")
    assert ("crate_kernels.mssa_fwd.default" in seen) == (watcher != "nobody")


@pytest.mark.filterwarnings("ignore:.torch.jit.trace. is deprecated", "ignore:Converting a tensor to a Python")
# Composite mssa is PyTorch's attention, where only the logsumexp is our op, and a loop over packed sequences.
@pytest.mark.parametrize("op", [op for op in DYNAMIC if op not in ("mssa-composite", "mssa-lse-packed-composite")])
def test_a_trace_holds_the_op_and_so_takes_any_length(op, monkeypatch):
    """What a body does with one number of tokens is not what it does with another."""
    case_op, _, backend = op.rpartition("-")
    function, device = DYNAMIC[op], home(backend)
    module = backends.kernel(case_op.partition("-")[0].partition("_")[0], backend).__name__
    # PyTorch imports modules by name while it traces; an emulator's is a copy without a name.
    copies = {key: kernel for key, kernel in backends._kernels.items() if key[1] in EMULATED}
    monkeypatch.setattr(backends, "_kernels", copies)
    monkeypatch.delitem(sys.modules, module, raising=backend not in EMULATED)
    w, longer = (randn(1, 2, n, 16, dtype=torch.float32, device=device) for n in (3, 70))
    traced = torch.jit.trace(lambda w: function(w), w)  # trace needs a __name__, which a partial lacks
    assert any(node.kind().startswith("crate_kernels::") for node in traced.graph.nodes())
    torch.testing.assert_close(traced(longer), function(longer), rtol=0, atol=0)


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("mode", ["no-grad", "grad", "wants-grad"])
def test_a_body_records_no_graph_and_casts_nothing(monkeypatch, autocast, mode):
    def body(w, call):
        ran.append(((w @ w.mT).requires_grad, (w.float() @ w.mT.float()).dtype))
        return forward(w, call)

    ran, forward = [], backends.kernel("mssa", "plain").forward
    monkeypatch.setattr(backends.kernel("mssa", "plain"), "forward", body)
    w = randn(1, 2, 5, 8, dtype=torch.float32).requires_grad_(mode == "wants-grad")
    with torch.set_grad_enabled(mode != "no-grad"), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = crate_kernels.mssa(w, backend="plain")
    assert ran == [(False, torch.float32)]
    assert out.requires_grad == (mode == "wants-grad")
    assert out.dtype == (torch.bfloat16 if autocast else torch.float32)
