"""Which backend a call gets, why one is unavailable, and that an import starts nothing."""

import re
import runpy
import subprocess
import sys
import types
from dataclasses import replace
from functools import cache

import pytest
import torch

import crate_kernels
from crate_kernels._core import backends
from crate_kernels._core.backends import Backend
from crate_kernels._native import extension

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
KERNELS = "crate_kernels.ops.{op}.composite"


@pytest.fixture
def machine(monkeypatch):
    """Return a function that pretends that the named kernel backends are ready, and no other."""

    def pretend(*ready):
        for name in ("triton", "cpp"):
            real = backends._BACKENDS[name]
            devices = ("cuda",) if name == "triton" else ("cpu", "cuda")
            missing = None if name in ready else f"{name} is away"
            monkeypatch.setitem(backends._BACKENDS, name, Backend(name, KERNELS, devices, real.dtypes, missing))
            for op in backends.OPS:
                monkeypatch.setitem(backends._has_kernel, (op, name), True)

    return pretend


@pytest.fixture
def registered():
    """Return a function that registers a backend for this test alone."""
    names = []

    def register(*args, **kwargs):
        backends.register(Backend(*args, **kwargs))
        names.append(args[0])

    yield register
    for name in names:
        backends.unregister(name)


CHOICES = {
    "cuda-all": (("triton", "cpp"), CUDA, torch.float32, "triton"),
    "cuda-half": (("triton", "cpp"), CUDA, torch.bfloat16, "triton"),
    "cuda-no-triton": (("cpp",), CUDA, torch.float16, "cpp"),
    "cuda-nothing": ((), CUDA, torch.float32, "composite"),
    "cuda-double": (("triton", "cpp"), CUDA, torch.float64, "composite"),
    "cpu-all": (("triton", "cpp"), CPU, torch.float32, "cpp"),
    "cpu-no-extension": (("triton",), CPU, torch.float32, "composite"),
    "cpu-double": (("triton", "cpp"), CPU, torch.float64, "composite"),
    "other-device": (("triton", "cpp"), torch.device("mps"), torch.float32, "composite"),
    "meta": (("triton", "cpp"), torch.device("meta"), torch.float32, "composite"),
}


@pytest.mark.parametrize("op", backends.OPS)
@pytest.mark.parametrize(("ready", "device", "dtype", "expected"), CHOICES.values(), ids=CHOICES)
def test_none_chooses_the_best_that_is_ready(op, ready, device, dtype, expected, machine):
    machine(*ready)
    assert backends.resolve(op, None, device, dtype) == expected


@pytest.mark.parametrize("name", ["composite", "reference"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_plain_pytorch_takes_every_device_and_dtype(name, dtype):
    for device in (CPU, CUDA, torch.device("meta")):
        assert backends.resolve("mssa", name, device, dtype) == name


@pytest.fixture
def cuda_library(monkeypatch):
    """Return a function that pretends that the CUDA library is there or not, and that Triton is not."""

    def pretend(missing):
        triton, cpp = backends._BACKENDS["triton"], backends._BACKENDS["cpp"]
        monkeypatch.setitem(backends._BACKENDS, "triton", replace(triton, missing="Triton is away"))
        on_cuda = replace(cpp.on_cuda, missing=missing)
        monkeypatch.setitem(backends._BACKENDS, "cpp", replace(cpp, missing=None, on_cuda=on_cuda))

    return pretend


@pytest.mark.parametrize("op", backends.OPS)
def test_without_triton_cuda_tensors_get_the_cuda_library(op, cuda_library):
    cuda_library(None)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert backends.resolve(op, None, CUDA, dtype) == "cpp"
        assert backends.resolve(op, "cpp", CUDA, dtype) == "cpp"
        assert backends.resolve(op, "cpp", CPU, dtype) == "cpp"
    assert backends.resolve(op, None, CUDA, torch.float64) == "composite"
    with pytest.raises(NotImplementedError, match=f"^{op}: backend='cpp' takes .*, got torch.float64; use backend='c"):
        backends.resolve(op, "cpp", CUDA, torch.float64)
    with pytest.raises(RuntimeError, match=f"^{op}: backend='cpp' takes cpu or cuda tensors, got mps; use backend='co"):
        backends.resolve(op, "cpp", torch.device("mps"), torch.float32)


@pytest.mark.parametrize("op", backends.OPS)
def test_without_the_cuda_library_cuda_tensors_get_composite(op, cuda_library):
    cuda_library("there is no nvcc")
    assert backends.resolve(op, None, CUDA, torch.float32) == "composite"
    assert backends.resolve(op, None, CPU, torch.float32) == "cpp"
    assert backends.unavailable_reason(op, "cpp") is None
    assert backends.unavailable_reason(op, "cpp", "cuda") == "there is no nvcc"
    with pytest.raises(RuntimeError, match=f"^{op}: backend='cpp' is unavailable: there is no nvcc; use backend='co"):
        backends.resolve(op, "cpp", CUDA, torch.float32)


def test_what_to_do_about_a_cuda_library_that_is_missing(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert backends._cuda_missing() == "this PyTorch has no CUDA (install one that has)"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(extension, "CUDA_PATHS", ())
    assert "python -m crate_kernels build, with a GPU and nvcc" in backends._cuda_missing()
    monkeypatch.setattr(extension, "CUDA_PATHS", (backends.Path("_cuda.so"),))
    assert backends._cuda_missing() is None


@pytest.mark.parametrize("op", backends.OPS)
def test_cpp_has_one_module_for_cpus_and_gpus(op, monkeypatch):
    monkeypatch.setattr(backends, "_kernels", {})
    monkeypatch.setattr(backends.importlib, "import_module", types.ModuleType)
    for device in ("cpu", "cuda"):
        assert backends.kernel(op, "cpp", device).__name__ == f"crate_kernels.ops.{op}.native"
    assert backends.kernel(op, "composite", "cuda").__name__ == f"crate_kernels.ops.{op}.composite"


@pytest.mark.parametrize(("cuda", "found"), [(None, ()), ("13.0", ("_cuda.so",))], ids=["cpu-pytorch", "cuda-pytorch"])
def test_importing_loads_no_library_and_finds_only_what_pytorch_can_load(cuda, found, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.ops, "load_library", pytest.fail)
    monkeypatch.setattr(extension.libraries, "find", lambda: "_cpu.so")
    monkeypatch.setattr(extension.libraries, "find_cuda", lambda: ("_cuda.so",))
    module = runpy.run_path(extension.__file__)
    assert (module["PATH"], module["CUDA_PATHS"]) == ("_cpu.so", found)


def test_the_library_of_this_gpu_is_loaded(monkeypatch):
    loaded, paths = [], tuple(backends.Path(f"_cuda-{arch}.so") for arch in ("75", "80-80+PTX", "90a-90+PTX"))
    load = extension.load_cuda.__wrapped__
    monkeypatch.setattr(extension, "load_cuda", cache(load))
    monkeypatch.setattr(extension, "CUDA_PATHS", paths)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    assert extension.load_cuda() == extension.load_cuda() == paths[1]
    assert loaded == [paths[1]]
    monkeypatch.setattr(extension, "CUDA_PATHS", ())
    with pytest.raises(ImportError, match="the CUDA library is not built; python -m crate_kernels build"):
        load()


REFUSALS = {
    "absent": ("cpp", CPU, torch.float32, RuntimeError, "backend='cpp' is unavailable: cpp is away; use backend='comp"),
    "device": ("triton", CPU, torch.float32, RuntimeError, "backend='triton' takes cuda tensors, got cpu; use backend"),
    "dtype": (
        "triton",
        CUDA,
        torch.float64,
        NotImplementedError,
        "backend='triton' takes torch.float32, torch.bfloat16, torch.float16, got torch.float64; use backend='comp",
    ),
    "name": ("cuda", CUDA, torch.float32, ValueError, "backend must be None or one of triton, cpp, composite, refer"),
    "empty": ("", CUDA, torch.float32, ValueError, "backend must be None or one of .* got ''"),
    "type": (True, CUDA, torch.float32, TypeError, "backend must be None or a string, got bool"),
}


@pytest.mark.parametrize(("requested", "device", "dtype", "kind", "message"), REFUSALS.values(), ids=REFUSALS)
def test_a_request_is_refused_never_replaced(requested, device, dtype, kind, message, machine):
    machine("triton")
    with pytest.raises(kind, match=f"^tssa: {message}"):
        backends.resolve("tssa", requested, device, dtype)


def test_a_request_is_obeyed_where_none_would_choose_another(machine):
    machine("triton", "cpp")
    assert backends.resolve("ista", "cpp", CUDA, torch.float32) == "cpp"
    assert backends.resolve("ista", "composite", CUDA, torch.float32) == "composite"


class Module:
    """A kernel module that says what it is asked, and refuses it or returns its own name."""

    def __init__(self, name, asked, refuses):
        self.name, self.asked, self.refuses = name, asked, refuses

    def forward(self, *args):
        self.asked.append(self.name)
        if self.refuses:
            raise backends.Refused("takes nothing")
        return self.name


@pytest.fixture
def modules(machine, monkeypatch):
    """Return a function that makes Triton, cpp and composite modules of which some refuse, and lists who was asked."""

    def make(*refusing):
        machine("triton", "cpp")
        asked = []
        for name in ("triton", "cpp", "composite"):
            monkeypatch.setitem(backends._kernels, ("tssa", name), Module(name, asked, name in refusing))
        return asked

    return make


ON_GPU = types.SimpleNamespace(device=CUDA, dtype=torch.bfloat16)
# name: (who refuses, the order's first, who is asked)
ORDERS = {
    "general": ((), None, ["triton"]),
    "first": ((), "cpp", ["cpp"]),
    "refused": (("cpp",), "cpp", ["cpp", "triton"]),
    "both-refused": (("cpp", "triton"), "cpp", ["cpp", "triton", "composite"]),
    "general-refused": (("triton",), None, ["triton", "cpp"]),
    "unknown-first": ((), "extra", ["triton"]),
}


@pytest.mark.parametrize(("refusing", "first", "asked"), ORDERS.values(), ids=ORDERS)
def test_where_none_is_named_backends_are_tried_in_order(refusing, first, asked, modules):
    found = modules(*refusing)

    def order(names, *args):
        assert (names, args) == (("triton", "cpp", "composite"), ("tokens",))
        return names if first is None else backends.first(first, names)

    assert backends.run("tssa", "forward", backends.AUTO, ON_GPU, "tokens", order=order) == asked[-1]
    assert found == asked


def test_a_named_backend_has_no_order(modules):
    asked = modules("triton")
    with pytest.raises(NotImplementedError, match=r"^tssa: backend='triton' takes nothing; use backend='comp"):
        backends.run("tssa", "forward", "triton", ON_GPU, order=pytest.fail)
    assert asked == ["triton"]


def test_what_no_module_has_is_an_error(modules):
    modules()
    with pytest.raises(RuntimeError, match=r"^tssa: no kernel takes cuda tensors of torch\.bfloat16 here; what is to"):
        backends.run("tssa", "sideways", backends.AUTO, ON_GPU)


# What a build says of its architectures: those that it has machine code for.
ARCHS = {"75_80_90a_90PTX": {"sm_75", "sm_80", "sm_90"}, "80_80PTX": {"sm_80"}, "90a_90PTX": {"sm_90"}}


@pytest.mark.parametrize(("said", "expected"), ARCHS.items(), ids=ARCHS)
def test_the_architectures_of_the_cuda_library(said, expected, monkeypatch):
    monkeypatch.setattr(extension, "cuda_build_info", lambda: {"archs": said})
    assert extension.cuda_archs.__wrapped__() == expected


@pytest.mark.parametrize("error", [ImportError("not built"), OSError("no such file")], ids=["none", "bad"])
def test_a_cuda_library_that_cannot_be_loaded_has_no_architecture(error, monkeypatch):
    def fail():
        raise error

    monkeypatch.setattr(extension, "cuda_build_info", fail)
    assert extension.cuda_archs.__wrapped__() == set()


def test_a_registered_backend_is_offered_until_it_is_unregistered():
    before = backends.names()
    backends.register(Backend("extra", KERNELS, remedy="wait"))
    try:
        assert backends.names() == (*before, "extra")
        assert backends.unavailable_reason("mssa", "extra") is None
        assert backends.resolve("mssa", "extra", CPU, torch.float64) == "extra"
        assert backends.kernel("tssa", "extra").__name__ == "crate_kernels.ops.tssa.composite"
    finally:
        backends.unregister("extra")
    assert backends.names() == before
    with pytest.raises(ValueError, match="got 'extra'"):
        backends.resolve("mssa", "extra", CPU, torch.float32)


def test_a_registered_backend_computes_what_is_asked_of_it(registered):
    registered("extra", KERNELS)
    w, temp = torch.randn(2, 3, 5, 8), torch.ones(3)
    torch.testing.assert_close(
        crate_kernels.tssa(w, temp, backend="extra"), crate_kernels.tssa(w, temp, backend="composite"), rtol=0, atol=0
    )


def test_a_backend_without_a_kernel_for_the_op_says_so(registered):
    registered("partial", "crate_kernels.{op}")
    assert backends.unavailable_reason("tssa", "partial") == "partial has no tssa kernel yet"
    with pytest.raises(RuntimeError, match=r"tssa: backend='partial' is unavailable: partial has no tssa kernel yet; "):
        crate_kernels.tssa(torch.randn(1, 1, 2, 4), torch.ones(1), backend="partial")


def test_a_backend_that_is_missing_keeps_its_reason_and_remedy(registered):
    registered("away", KERNELS, missing="no such driver", remedy="install the driver")
    assert backends.unavailable_reason("ista", "away") == "no such driver"
    with pytest.raises(RuntimeError, match=r"is unavailable: no such driver; install the driver$"):
        backends.resolve("ista", "away", CPU, torch.float32)


def test_registering_imports_no_kernel(registered, tmp_path, monkeypatch):
    (tmp_path / "kernels_on_disk").mkdir()
    (tmp_path / "kernels_on_disk" / "mssa.py").write_text("raise ImportError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    registered("disk", "kernels_on_disk.{op}")
    assert backends.unavailable_reason("mssa", "disk") is None
    assert backends.unavailable_reason("tssa", "disk") == "disk has no tssa kernel yet"
    with pytest.raises(ImportError, match=r"^imported$"):
        backends.kernel("mssa", "disk")


def test_a_kernel_is_imported_once(registered, monkeypatch):
    registered("once", KERNELS)
    imported = []
    monkeypatch.setattr(
        backends.importlib, "import_module", lambda name: imported.append(name) or types.ModuleType(name)
    )
    assert backends.kernel("mssa", "once") is backends.kernel("mssa", "once")
    assert imported == ["crate_kernels.ops.mssa.composite"]


def test_a_name_registered_again_gets_its_own_kernel():
    for package in ("composite", "reference"):
        backends.register(Backend("again", f"crate_kernels.ops.{{op}}.{package}"))
        try:
            assert backends.kernel("mssa", "again").__name__ == f"crate_kernels.ops.mssa.{package}"
        finally:
            backends.unregister("again")


USE_EVERYTHING = """
import sys, torch
import crate_kernels, crate_kernels.nn, crate_kernels.models, crate_kernels.testing
assert "triton" not in sys.modules, "imported with the package"
w = torch.randn(2, 3, 5, 8, requires_grad=True)
out = crate_kernels.mssa(w) + crate_kernels.tssa(w, torch.ones(3)) + crate_kernels.tssa(w, torch.ones(3), causal=True)
out = out + crate_kernels.ista(w, torch.eye(8)) + crate_kernels.ista_overcomplete(w, torch.ones(8, 9))
out.sum().backward()
assert w.grad.isfinite().all()
assert "triton" not in sys.modules, "imported by a call that needs none"
"""
HIDE_TRITON = """
import sys
class Hidden:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] == "triton" else self.finder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(self.finder, name)
sys.meta_path[:] = [Hidden(finder) for finder in sys.meta_path]
"""
REASON = """
import re
from crate_kernels._core import backends
try:
    crate_kernels.mssa(w, backend="triton")
except RuntimeError as error:
    assert re.search("backend='triton' is unavailable: .*; use backend='composite'", str(error)), error
else:
    raise AssertionError("triton ran where there is none")
assert backends._BACKENDS["triton"].missing == "Triton is not installed (pip install triton)"
assert backends.resolve("mssa", None, torch.device("cuda"), torch.float32) in ("cpp", "composite")
"""


def python(script, **environment):
    """Run a script in a fresh interpreter from the root of the tree, warnings as errors."""
    root = str(backends.Path(crate_kernels.__file__).parents[1])
    # Importing torch may warn: only warnings after it count.
    script = "import torch, warnings; warnings.simplefilter('error')\n" + script
    command = [sys.executable, "-c", script]
    path = {"PATH": "/usr/bin:/bin", "PYTHONPATH": root, **environment}
    return subprocess.run(command, env=path, capture_output=True, text=True, timeout=120)


def test_importing_and_calling_import_no_triton():
    result = python(USE_EVERYTHING)
    assert result.returncode == 0, result.stderr
    assert result.stdout == ""


def test_everything_works_where_triton_is_not_installed():
    result = python(HIDE_TRITON + USE_EVERYTHING + REASON)
    assert result.returncode == 0, result.stderr


def test_a_flop_counter_imported_later_knows_the_ops():
    script = """
import sys, crate_kernels
assert "torch.utils.flop_counter" not in sys.modules, "imported with the package"
from torch.utils.flop_counter import FlopCounterMode
with FlopCounterMode(display=False) as counter:
    crate_kernels.ista(torch.ones(9, 4), torch.eye(4), backend="composite")
assert counter.get_total_flops() == 2 * 9 * 4 * 4 + 2 * 4**3
"""
    result = python(HIDE_TRITON + script)  # the counter only warns without Triton
    assert result.returncode == 0, result.stderr


def test_no_environment_variable_steers_the_choice():
    script = """
import crate_kernels, torch
from crate_kernels._core import backends
print([backends.resolve(op, None, torch.device(d), torch.float32) for op in backends.OPS for d in ("cpu", "cuda")])
"""
    steering = {"CRATE_KERNELS_BACKEND": "reference", "CRATE_KERNELS_DISABLE_TRITON": "1", "TRITON_INTERPRET": "0"}
    plain, steered = python(script), python(script, **steering)
    assert plain.returncode == steered.returncode == 0, plain.stderr + steered.stderr
    assert plain.stdout == steered.stdout


def test_no_variable_of_the_environment_chooses_what_computes():
    """Triton's says on which device it can run at all, and the other how many compilers run side by side."""
    root = backends.Path(crate_kernels.__file__).parent
    reads = [
        f"{path.name}: {line.strip()}"
        for path in sorted(root.rglob("*.py"))
        for line in path.read_text().splitlines()
        if re.search(r"(?<!\*\*)os\.(environ(?!\.setdefault)|getenv)", line)
    ]
    assert reads == [
        'backends.py: _INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"',
        'ninja_build.py: asked = os.environ.get("MAX_JOBS")',
    ]
