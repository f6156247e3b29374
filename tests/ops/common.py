"""Shared parts of the operator tests: the backends of this machine, losses, keep masks and tolerances."""

import os
from dataclasses import replace

import pytest
import torch

from crate_kernels import testing
from crate_kernels._core import backends as _backend
from crate_kernels._core import operator
from crate_kernels._native import extension
from tests.ops.naive_philox import philox4x32_10

EMULATED = ("emulated", "aarch64")  # plugins of tests/tools/emulator and tests/tools/aarch64
KERNELS = ("triton", "cpp", *EMULATED)
LEVELS = ("portable", "avx2", "avx512", "avx512_bf16", "amx")  # levels of the extension, ascending
NANS = {"nan": 0x7FC00000, "payload": 0x7FFFFFFF, "negative-payload": -1}  # bits of fp32
NEEDS_EXTENSION = pytest.mark.skipif(extension.PATH is None, reason="needs python -m crate_kernels build")
EXACT = {"rtol": 1e-12, "atol": 1e-12}
LAYOUTS = {
    "contiguous": lambda t: t,
    "projection": lambda t: t.transpose(0, -2).contiguous().transpose(0, -2) if t.dim() > 1 else t,
    "transposed": lambda t: t.mT.contiguous().mT if t.dim() > 1 else t,
    "channels-apart": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "expanded": lambda t: t[..., :1].expand(t.shape),
    "expanded-rows": lambda t: t[:1].expand(t.shape),
    "one-number": lambda t: t.flatten()[:1].view([1] * t.dim()).expand(t.shape) if t.numel() else t,
}
STRIDES = {name: LAYOUTS[name] for name in ("projection", "channels-apart", "transposed", "expanded")}
FORMS = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
# Triton's interpreter is slow: what takes the same ways through a kernel is left to make test-all there, as fp16 is.
VARIATION = pytest.mark.exhaustive if os.environ.get("TRITON_INTERPRET") == "1" else ()
TURNS = pytest.mark.turns if VARIATION else lambda test: test
SELDOM = VARIATION or (lambda test: test)


def seldom(table, *often):
    """List the values of ``table`` by name; where Triton is interpreted, all but ``often`` are left to make test-all.

    For what an operator's boundary decides and no kernel does: other backends run all of it every time.
    """
    assert {*often} <= {*table}
    values = table.items() if isinstance(table, dict) else zip(table, table, strict=True)
    return [
        pytest.param(*(v if isinstance(v, tuple) else (v,)), id=str(name), marks=() if name in often else VARIATION)
        for name, v in values
    ]


DTYPES = [
    pytest.param(torch.float32, id="fp32"),
    pytest.param(torch.bfloat16, id="bf16"),
    pytest.param(torch.float16, id="fp16", marks=VARIATION),
]


def cases_by_dtype(op):
    """List the cases of ``op`` in every dtype; where Triton is interpreted, fp32 and bf16 take turns."""
    return [
        pytest.param(case, *p.values, id=f"{case}-{p.id}", marks=p.marks or (() if (place + turn) % 2 else VARIATION))
        for place, case in enumerate(testing.cases(op))
        for turn, p in enumerate(DTYPES)
    ]


def backends(op, reference=True):
    """List (backend, device type) for every backend that computes ``op`` here; new kernels are found by name."""
    found = []
    for name in _backend.names():
        for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
            try:
                _backend.resolve(op, name, torch.device(device), torch.float32)
            except RuntimeError:
                continue
            if reference or name != "reference":
                marks = [pytest.mark.gpu] if device == "cuda" else []
                found.append(pytest.param(name, device, id=f"{name}-{device}", marks=marks))
    return found


def kernels(op):
    """List the backends of ``op`` that are kernels and can run here, each once, on its ``home``."""
    found = [tuple(p.values) for p in backends(op)]
    return [name for name in KERNELS if (name, home(name)) in found]


def home(backend):
    """Return the device type on which the tests of one device run ``backend``."""
    on_gpu = backend == "triton" and torch.cuda.is_available() and not _backend._INTERPRETED
    return "cuda" if on_gpu else "cpu"


def interpreted(backend, device):
    """Return True if Triton would interpret a kernel of ``backend``."""
    return backend == "triton" and torch.device(device).type == "cpu"


def randn(*shape, seed=0, dtype=torch.float64, device="cpu"):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(device, dtype)


def padding(kind, batch, seqlen):
    return testing.padding_mask(kind, batch, seqlen, torch.Generator().manual_seed(2)) if kind else None


def offsets(lengths):
    return torch.tensor((0, *lengths)).cumsum(0).to(torch.int32)


def leaves(case, dtype=torch.float32, device="cpu"):
    """Draw the inputs of ``case`` as leaves that require a gradient."""
    inputs = testing.make_inputs(case, dtype, device)
    return testing.Inputs({k: t.detach().requires_grad_() for k, t in inputs.differentiable.items()}, inputs.others)


def outputs_and_gradients(function, *tensors):
    """Return every output of ``function`` and the gradients of a random loss of all of them."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator, loss = torch.Generator().manual_seed(1), 0.0
    for out in outputs:
        # Drawn in the coarsest precision, so that every dtype sees the same upstream values.
        upstream = torch.randn(out.shape, generator=generator).bfloat16().to(out)
        # lse of a row without keys is -inf.
        loss = loss + (torch.where(out.isfinite(), out, 0.0) * upstream).sum()
    grads = torch.autograd.grad(loss, leaves, materialize_grads=True)
    return [*(out.detach() for out in outputs), *grads]


def keep_mask(seed, dropout_p, heads, rows, columns):
    """Return the (heads, rows, columns) dropout mask of a call made right after ``torch.manual_seed(seed)``."""
    torch.manual_seed(seed)
    key = int(operator.draw_seed(torch.device("cpu")))
    torch.manual_seed(seed)
    return torch.tensor(
        [
            [[philox4x32_10((j, i, h, 0), key)[0] >= dropout_p * 2**32 for j in range(columns)] for i in range(rows)]
            for h in range(heads)
        ]
    )


_expected = {}


def over_tolerance(case, dtype, backend, device):
    """Return the errors of ``backend`` in ``case``."""
    # Of the spec, not of ``testing``, which leaves out interpreted bfloat16: here it is computed right.
    reason = testing.SPECS[case.op].excluded(case, backend, dtype)
    if reason is not None:
        pytest.skip(f"needs another attention of PyTorch's: {reason}")
    if case.options.get("phi") in ("relu", "identity") and backend != "composite":
        pytest.skip("needs kernels with phi='relu' and 'identity': composite alone has them, and runs these cases")
    case = fewer(case) if interpreted(backend, device) else case
    return [m for m in measured(case, dtype, backend, device, *expected(case, dtype, device)) if not m.passed]


def fewer(case):
    """Return a case of fewer sequences and heads, but for the plain ones: the interpreter takes its time by program."""
    if case.op != "mssa" or case.padding or case.name.endswith("n65"):
        return case
    batch, nheads, *sizes = case.shape
    batch = min(batch, 2 if case.options.get("dropout_p") else 1)  # a mask is of the head's place among all
    return replace(case, shape=(batch, min(nheads, 2), *sizes))


def expected(case, dtype, device="cpu"):
    """Return eager's and float64's results, computed once for all backends, levels and numbers of threads."""
    key = repr(case), dtype, device  # other cases may have the same name
    if key not in _expected:
        _expected[key] = eager_and_exact(case, dtype, device)
    return _expected[key]


def eager_and_exact(case, dtype, device):
    """Return the results of ``reference`` in ``dtype`` and in float64."""
    inputs = testing.make_inputs(case, dtype, device)
    return testing.run(case, inputs, "reference"), testing.run(case, inputs.to(torch.float64), "reference")


def measured(case, dtype, backend, device, eager, exact):
    """Run ``backend`` and compare every output with float64."""
    actual = testing.run(case, testing.make_inputs(case, dtype, device), backend)
    assert actual.keys() == exact.keys()
    return testing.measure(actual, eager, exact, dtype)


def failures(case, dtype, backend="cpp"):
    """List what a backend gets wrong of a case on the CPU."""
    return [m for m in measured(case, dtype, backend, "cpu", *expected(case, dtype)) if not m.passed]
