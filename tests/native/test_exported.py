"""The ops that exported programs call, in a process that has the C++ extension and no Python package."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import crate_kernels
from crate_kernels import testing
from crate_kernels._native import extension
from tests.models.families import build, drawn, inputs, output
from tests.ops.common import expected

pytestmark = [
    pytest.mark.skipif(extension.PATH is None, reason="needs the C++ extension: python -m crate_kernels build"),
    # PyTorch's, of its tracer and compiler.
    *(pytest.mark.filterwarnings(f"ignore::{kind}Warning") for kind in ("Deprecation", "Future", "User")),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]
OPS = ("mssa_fwd", "tssa_fwd", "tssa_causal_fwd", "ista_fwd", "ista_overcomplete_fwd", "linear_fwd")
CASES = [c for c in testing.CASES if c.options.get("phi") not in ("relu", "identity")]
DTYPES = (torch.float32, torch.bfloat16)
ROOT = Path(crate_kernels.__file__).parents[1]
PROGRAMS, TRACES = ("crate",), ("tost",)
W, ONE, FLOAT = torch.randn(1, 1, 2, 3), torch.ones(1), torch.float32
BATCH = (None, None, 0, None)  # no mask, nothing packed, no seed
REFUSED = {
    "composite": ("tssa_fwd", (W, ONE, *BATCH, 0.0, 0, "composite"), "tssa: backend='composite' needs Pyth"),
    "registered": ("ista_fwd", (W, torch.eye(3), 0.1, 0.1, True, FLOAT, "mine"), "ista: backend='mine' needs"),
    "dtype": ("mssa_fwd", (W.double(), *BATCH, False, None, 0.0, None, "auto"), "dtype must be float32, bfloat16 or"),
    "shape": ("mssa_fwd", (W[0], *BATCH, False, None, 0.0, None, "auto"), "mssa: w must be of 4 dimensions, got"),
    "sums": (
        "tssa_causal_fwd",
        (W, ONE, None, *BATCH, 0.0, 4, "auto"),
        "tssa: sums_every must be 0 without Python, got 4",
    ),
    "temp": ("tssa_fwd", (W, torch.ones(2), *BATCH, 0.0, 0, "auto"), "tssa: temp must be float32 (1,) on cpu, got"),
}


class Recorder(TorchDispatchMode):
    """Keeps the calls of our ops, and their results."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.namespace == "crate_kernels":
            self.calls.append((func._schema.name.partition("::")[2], args, result))
        return result


def recorded(case, dtype):
    """Return the one op that a public call without gradient is."""
    inputs = testing.make_inputs(case, dtype)
    torch.manual_seed(0)
    with torch.no_grad(), Recorder() as recorder:
        getattr(crate_kernels, case.op)(**inputs.differentiable, **inputs.others, **case.options, backend="cpp")
    (call,) = recorder.calls
    return call


class Logits(torch.nn.Module):
    """A model that returns one tensor, as a trace needs."""

    def __init__(self, family):
        super().__init__()
        self.family, self.model = family, drawn(build(family)).eval()

    def forward(self, *inputs):
        return output(self.family, self.model(*inputs))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return what one such process answers, and the calls that were recorded here."""
    folder = tmp_path_factory.mktemp("alone")
    calls = {(repr(case), dtype): recorded(case, dtype) for case in CASES for dtype in DTYPES}
    files = {}
    for family in (*PROGRAMS, *TRACES):
        model, example = Logits(family), inputs(family)
        path = str(folder / f"{family}{'.pt2' if family in PROGRAMS else '.pt'}")
        if family in PROGRAMS:
            torch.export.save(torch.export.export(model, example), path)
        else:
            torch.jit.save(torch.jit.trace(model, example, check_trace=False), path)
        files[path] = example
    asked = {
        "schemas": OPS,
        "calls": [(name, args) for name, args, _ in calls.values()],
        "refused": [(name, args) for name, args, _ in REFUSED.values()],
        "files": files,
    }
    torch.save(asked, folder / "asked")
    script = Path(__file__).with_name("alone.py")
    command = [sys.executable, script, extension.PATH, folder / "asked", folder / "found"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = torch.load(folder / "found")
    found["calls"] = dict(zip(calls, found["calls"], strict=True))
    found["here"] = calls
    return found


@pytest.mark.parametrize("name", OPS)
def test_schemas_are_those_of_the_package(alone, name):
    assert alone["schemas"][name] == str(getattr(torch.ops.crate_kernels, name).default._schema)


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.op}-{case.name}")
def test_results_are_those_of_the_package(alone, case, dtype):
    """Of the same kernels to the bit; the products of sparse coding are others, and within tolerance."""
    found, (_, _, here) = (alone[which][repr(case), dtype] for which in ("calls", "here"))
    here = here if isinstance(here, tuple) else (here,)
    assert [(t.shape, t.stride(), t.dtype) for t in found] == [(t.shape, t.stride(), t.dtype) for t in here]
    if not case.op.startswith("ista"):
        torch.testing.assert_close(found, here, rtol=0, atol=0)
        return
    eager, exact = ({"out": results["out"]} for results in expected(case, dtype))
    assert [m for m in testing.measure({"out": found[0]}, eager, exact, dtype) if not m.passed] == []


@pytest.mark.parametrize("family", [*PROGRAMS, *TRACES])
def test_a_program_or_a_trace_computes_the_same(alone, family):
    (found,) = (result for path, result in alone["files"].items() if Path(path).stem == family)
    with torch.no_grad():
        torch.testing.assert_close(found, Logits(family)(*inputs(family)))


@pytest.mark.parametrize("which", REFUSED)
def test_what_needs_python_or_does_not_fit_is_refused(alone, which):
    message, (_, _, start) = alone["refused"][list(REFUSED).index(which)], REFUSED[which]
    assert message is not None
    assert start in message


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """Return a function that runs a package in C++: examples/run_package.cpp, compiled as its first lines say."""
    if shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler")
    source = ROOT / "examples" / "run_package.cpp"
    folder = tmp_path_factory.mktemp("program")
    said = " ".join(line.removeprefix("//") for line in source.read_text().partition("#include")[0].splitlines())
    words = shlex.split(said[said.index("c++ -std") :].replace("$TORCH", torch.__path__[0]))
    words = [str({"run_package.cpp": source, "run_package": folder / "program"}.get(word, word)) for word in words]
    subprocess.run(words, check=True, timeout=600)

    def run(package, example):
        torch.save(example, folder / "in.pt")
        command = [folder / "program", extension.PATH, package, folder / "in.pt", folder / "out.pt"]
        subprocess.run(command, check=True, timeout=120)
        return torch.load(folder / "out.pt")

    return run


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["crate", "tost", "crate_lm", "tost_lm"])
def test_a_compiled_package_runs_here_and_in_cpp(program, family, tmp_path):
    model, (example,) = Logits(family), inputs(family)
    with torch.no_grad():
        shapes = (({0: torch.export.Dim("batch", min=2, max=64)},),)
        exported = torch.export.export(model, (example,), dynamic_shapes=shapes)
        package = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "model.pt2"))
        more = torch.cat([example, example.flip(-1), example])
        expected = model(more)
    torch.testing.assert_close(torch._inductor.aoti_load_package(package)(more), expected)
    torch.testing.assert_close(program(package, more), expected)
