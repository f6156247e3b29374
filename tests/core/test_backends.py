"""Which backend a call gets, and why one is unavailable."""

import types
from dataclasses import replace

import pytest
import torch

from crate_kernels._core import backends
from crate_kernels._core.backends import Backend

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
            one = Backend(name, KERNELS, devices, real.dtypes, missing, unfit=real.unfit)
            monkeypatch.setitem(backends._BACKENDS, name, one)
            for op in backends.OPS:
                monkeypatch.setitem(backends._has_kernel, (op, name), True)

    return pretend


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


@pytest.fixture
def gpus(monkeypatch):
    """Return a function that pretends that GPUs of these compute capabilities are here, and the list of questions."""
    asked = []

    def pretend(*capabilities, hip=None):
        def capability(device):
            asked.append(device)
            return capabilities[device.index or 0]

        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
        return asked

    backends._too_old_for_triton.cache_clear()
    yield pretend
    backends._too_old_for_triton.cache_clear()


# name: (capabilities of the GPUs, version of HIP, ready backends, device, chosen one)
GPUS = {
    "turing": (((7, 5),), None, ("triton", "cpp"), CUDA, "cpp"),
    "turing-without-the-library": (((7, 5),), None, ("triton",), CUDA, "composite"),
    "ampere": (((8, 0),), None, ("triton", "cpp"), CUDA, "triton"),
    "blackwell": (((12, 0),), None, ("triton", "cpp"), CUDA, "triton"),
    "second-is-turing": (((8, 0), (7, 5)), None, ("triton", "cpp"), torch.device("cuda", 1), "cpp"),
    "hip": (((7, 5),), "6.3", ("triton", "cpp"), CUDA, "triton"),
    "fake": ((), None, ("triton", "cpp"), CUDA, "triton"),
}


@pytest.mark.parametrize(("capabilities", "hip", "ready", "device", "expected"), GPUS.values(), ids=GPUS)
def test_triton_takes_no_gpu_that_is_too_old(capabilities, hip, ready, device, expected, machine, gpus, monkeypatch):
    machine(*ready)
    asked = gpus(*capabilities, hip=hip)
    w = types.SimpleNamespace(device=device, dtype=torch.bfloat16)
    for op in backends.OPS:
        assert backends.resolve(op, None, device, w.dtype) == expected
    monkeypatch.setattr(backends, "kernel", lambda *names: types.SimpleNamespace(forward=print))
    assert next(backends.eligible_backends("mssa", "forward", backends.AUTO, w))[0] == expected
    assert len(asked) <= 1, "a GPU is asked once"
    if expected != "triton":
        refusal = "^ista: backend='triton' is unavailable: Triton takes GPUs of .* 8.0 and later, this one has 7.5; use"
        with pytest.raises(RuntimeError, match=refusal):
            backends.resolve("ista", "triton", device, w.dtype)


@pytest.mark.parametrize("name", ["composite", "reference"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_plain_pytorch_takes_every_device_and_dtype(name, dtype):
    for device in (CPU, CUDA, torch.device("meta")):
        assert backends.resolve("mssa", name, device, dtype) == name


@pytest.fixture
def cuda_kernels(monkeypatch):
    """Return a function that pretends that CUDA C++ can be compiled or not, and that Triton is not there."""

    def pretend(missing):
        triton, cpp = backends._BACKENDS["triton"], backends._BACKENDS["cpp"]
        monkeypatch.setitem(backends._BACKENDS, "triton", replace(triton, missing="Triton is away"))
        on_cuda = replace(cpp.on_cuda, missing=missing)
        monkeypatch.setitem(backends._BACKENDS, "cpp", replace(cpp, missing=None, on_cuda=on_cuda))

    return pretend


@pytest.mark.parametrize("op", backends.OPS)
def test_without_triton_cuda_tensors_get_cuda_kernels(op, cuda_kernels):
    cuda_kernels(None)
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
def test_without_cuda_kernels_cuda_tensors_get_composite(op, cuda_kernels):
    cuda_kernels("there is no NVRTC")
    assert backends.resolve(op, None, CUDA, torch.float32) == "composite"
    assert backends.resolve(op, None, CPU, torch.float32) == "cpp"
    assert backends.unavailable_reason(op, "cpp") is None
    assert backends.unavailable_reason(op, "cpp", "cuda") == "there is no NVRTC"
    with pytest.raises(RuntimeError, match=f"^{op}: backend='cpp' is unavailable: there is no NVRTC; use backend='co"):
        backends.resolve(op, "cpp", CUDA, torch.float32)


@pytest.mark.parametrize("op", backends.OPS)
def test_cpp_has_one_module_for_cpus_and_gpus(op, monkeypatch):
    monkeypatch.setattr(backends, "_kernels", {})
    monkeypatch.setattr(backends.importlib, "import_module", types.ModuleType)
    for device in ("cpu", "cuda"):
        assert backends.kernel(op, "cpp", device).__name__ == f"crate_kernels.ops.{op}.native"
    assert backends.kernel(op, "composite", "cuda").__name__ == f"crate_kernels.ops.{op}.composite"


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
        return names if first is None else backends.prefer(first, names)

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
