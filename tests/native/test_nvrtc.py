"""NVRTC: where it is looked for, what it compiles for, and what is said where it is absent or refuses."""

import contextlib
import ctypes
from types import SimpleNamespace

import pytest
import torch

from crate_kernels._native import nvrtc
from tests.cuda import compilers

KERNEL = '#include "a/b.h"\ntemplate <int N> __global__ void fill(int* to) { to[threadIdx.x] = N + kMore; }\n'
HEADERS = {"a/b.h": "constexpr int kMore = 5;\n"}


@pytest.fixture
def compiler():
    return compilers.needed()


@pytest.mark.parametrize(("capability", "magic"), [(80, b"\x7fELF"), (90, b"\x7fELF"), (999, b"//")])
def test_a_kernel_is_compiled_by_its_name_with_headers_from_memory(capability, magic, compiler):
    architecture = compiler.architecture(capability)
    result = compiler.compile(KERNEL, architecture, ["--std=c++17"], HEADERS, ["fill<3>", "fill<4>"])
    assert result.binary.lstrip().startswith(magic)
    assert result.names == {"fill<3>": "_Z4fillILi3EEvPi", "fill<4>": "_Z4fillILi4EEvPi"}
    assert all(name.encode() in result.binary for name in result.names.values())


REFUSED = {
    "error": ("__global__ void f() { nothing(); }", "sm_80", [], r'(?s)for sm_80:.*identifier "nothing" is undefined'),
    "option": ("", "sm_80", ["--no-such-option"], "NVRTC_ERROR_INVALID_OPTION"),
    "name": ("", "sm_80", [], "for sm_80"),
    "architecture": ("", "sm_1", [], "invalid value for --gpu-architecture"),
}


@pytest.mark.parametrize(("source", "architecture", "options", "message"), REFUSED.values(), ids=REFUSED)
def test_what_it_refuses_is_an_error_that_says_why(source, architecture, options, message, compiler):
    with pytest.raises(nvrtc.NotCompiled, match=message):
        compiler.compile(source, architecture, options, {}, ["f"])


class Stub:
    """An NVRTC of a version that knows some architectures."""

    def __init__(self, version=(12, 6), known=(75, 80, 90)):
        self.version, self.known = version, known
        self.nvrtcCompileProgram = SimpleNamespace()

    def nvrtcVersion(self, major, minor):
        major._obj.value, minor._obj.value = self.version
        return 0

    def nvrtcGetNumSupportedArchs(self, count):
        count._obj.value = len(self.known)
        return 0

    def nvrtcGetSupportedArchs(self, into):
        into[:] = self.known
        return 0


ARCHITECTURES = {75: "sm_75", 80: "sm_80", 90: "sm_90a", 86: "compute_80", 100: "compute_90", 121: "compute_90"}


@pytest.mark.parametrize(("capability", "expected"), ARCHITECTURES.items(), ids=map(str, ARCHITECTURES))
def test_a_gpu_gets_its_own_code_and_a_newer_one_the_newest_that_is_known(capability, expected):
    assert nvrtc.Nvrtc(Stub()).architecture(capability) == expected


def test_a_gpu_that_is_too_old_is_refused():
    with pytest.raises(nvrtc.NotCompiled, match=r"NVRTC 12\.6 compiles from sm_75 on, this GPU is sm_70"):
        nvrtc.Nvrtc(Stub()).architecture(70)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Return a function that pretends what is loaded, in wheels and known to the system, and lists what was opened."""
    packages = tmp_path / "packages"
    (packages / "torch").mkdir(parents=True)
    monkeypatch.setattr(torch, "__file__", str(packages / "torch" / "__init__.py"))
    monkeypatch.setattr(torch.version, "cuda", "12.8")

    def pretend(loaded=(), wheels=(), system=()):
        opened = []
        for name in wheels:
            (packages / "nvidia" / "cu" / "lib").mkdir(parents=True, exist_ok=True)
            for path in (name, "libnvrtc-builtins.so.12.8"):
                (packages / "nvidia" / "cu" / "lib" / path).touch()

        def load(name, mode=0):
            if name in loaded or (not mode and (name in system or str(packages) in name)):
                if not mode:
                    opened.append(name.removeprefix(f"{packages}/nvidia/cu/lib/"))
                return Stub()
            raise OSError(f"{name}: cannot open shared object file")

        monkeypatch.setattr(nvrtc.ctypes, "CDLL", load)
        return opened

    nvrtc.library.cache_clear()
    nvrtc.unavailable_reason.cache_clear()
    yield pretend
    nvrtc.library.cache_clear()
    nvrtc.unavailable_reason.cache_clear()


PLACES = {
    "loaded": ({"loaded": ["libnvrtc.so.13"], "wheels": ["libnvrtc.so.12"]}, ["libnvrtc.so.13"]),
    "of-pytorchs-cuda": ({"loaded": ["libnvrtc.so.12", "libnvrtc.so.13"]}, ["libnvrtc.so.12"]),
    "wheel": (
        {"wheels": ["libnvrtc.so.12"], "system": ["libnvrtc.so.12"]},
        ["libnvrtc-builtins.so.12.8", "libnvrtc.so.12"],
    ),
    "system": ({"system": ["libnvrtc.so.13"]}, ["libnvrtc.so.13"]),
    "toolkit": ({"system": ["/usr/local/cuda/lib64/libnvrtc.so.12"]}, ["/usr/local/cuda/lib64/libnvrtc.so.12"]),
}


@pytest.mark.parametrize(("there", "opened"), PLACES.values(), ids=PLACES)
def test_the_one_that_pytorch_has_loaded_comes_first(there, opened, machine):
    found = machine(**there)
    assert nvrtc.library().version == (12, 6)
    assert found == opened
    assert nvrtc.unavailable_reason() is None


ABSENT = {
    "no-cuda": (None, "linux", r"this PyTorch has no CUDA \(install one that has\)"),
    "not-found": ("12.8", "linux", r"is not found \(/usr.*cannot open .*\); pip install nvidia-cuda-nvrtc"),
    "windows": ("12.8", "win32", "are compiled on Linux, not on win32"),
}


@pytest.mark.parametrize(("cuda", "platform", "message"), ABSENT.values(), ids=ABSENT)
def test_without_it_the_reason_says_what_to_do(cuda, platform, message, machine, monkeypatch):
    machine()
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(nvrtc.sys, "platform", platform)
    with pytest.raises(nvrtc.Unavailable, match=message):
        nvrtc.library()
    assert nvrtc.unavailable_reason() is not None


def test_what_is_not_nvrtc_is_passed_over(machine, monkeypatch):
    opened = machine(loaded=["libnvrtc.so.12"], system=["libnvrtc.so.13"])
    load = nvrtc.ctypes.CDLL
    monkeypatch.setattr(nvrtc.ctypes, "CDLL", lambda name, mode=0: object() if "12" in name else load(name, mode))
    assert nvrtc.library().version == (12, 6)
    assert opened == ["libnvrtc.so.13"]
    assert ctypes.CDLL is nvrtc.ctypes.CDLL


class Scripted(Stub):
    """An NVRTC that notes each call, and fails in one."""

    def __init__(self, failing=""):
        super().__init__()
        self.calls, self.failing = [], failing
        self.nvrtcGetErrorString = lambda status: f"error {status}".encode()
        self.nvrtcCompileProgram = lambda *args: self.done("nvrtcCompileProgram", list(args[2])[: args[1]])
        for kind, size in (("CUBIN", 4), ("PTX", 3), ("ProgramLog", 9)):
            setattr(
                self, f"nvrtcGet{kind}Size", lambda program, into, size=size: setattr(into._obj, "value", size) or 0
            )

    def done(self, name, *noted):
        self.calls.append((name.removeprefix("nvrtc"), *noted))
        return 6 if self.failing == name.removeprefix("nvrtc") else 0

    def nvrtcCreateProgram(self, program, source, name, count, texts, keys):
        program._obj.value = 77
        return self.done("nvrtcCreateProgram", source, dict(zip(list(keys), list(texts), strict=True)))

    def nvrtcAddNameExpression(self, program, name):
        return self.done("nvrtcAddNameExpression", name)

    def nvrtcGetLoweredName(self, program, name, found):
        found._obj.value = b"_Z" + name
        return self.done("nvrtcGetLoweredName")

    def nvrtcGetCUBIN(self, program, content):
        content.raw = b"cubi"
        return self.done("nvrtcGetCUBIN")

    def nvrtcGetPTX(self, program, content):
        content.raw = b"ptx"
        return self.done("nvrtcGetPTX")

    def nvrtcGetProgramLog(self, program, content):
        content.raw = b" spills \0"
        return self.done("nvrtcGetProgramLog")

    def nvrtcDestroyProgram(self, program):
        return self.done("nvrtcDestroyProgram")


@pytest.mark.parametrize(("architecture", "binary"), [("sm_90a", b"cubi"), ("compute_90", b"ptx")])
def test_what_nvrtc_is_asked_for_in_order(architecture, binary):
    library = Scripted()
    found = nvrtc.Nvrtc(library).compile("text", architecture, ["-a", "-b"], {"x.h": "1", "y.h": "2"}, ["f<1>", "g"])
    assert found == nvrtc.Compiled(binary, {"f<1>": "_Zf<1>", "g": "_Zg"}, "spills")
    assert library.calls[:4] == [
        ("CreateProgram", b"text", {b"x.h": b"1", b"y.h": b"2"}),
        ("AddNameExpression", b"f<1>"),
        ("AddNameExpression", b"g"),
        ("CompileProgram", [f"--gpu-architecture={architecture}".encode(), b"-a", b"-b"]),
    ]
    assert library.calls[-1] == ("DestroyProgram",)


@pytest.mark.parametrize(
    "failing", ["CreateProgram", "AddNameExpression", "CompileProgram", "GetLoweredName", "GetCUBIN"]
)
def test_what_fails_in_nvrtc_is_named_and_leaves_no_program(failing):
    library = Scripted(failing)
    words = r"NVRTC: error 6 for sm_80:\nspills" if failing == "CompileProgram" else f"NVRTC: nvrtc{failing}: error 6"
    with pytest.raises(nvrtc.NotCompiled, match=words):
        nvrtc.Nvrtc(library).compile("text", "sm_80", names=["f"])
    assert (library.calls[-1] == ("DestroyProgram",)) == (failing != "CreateProgram")


class Counting:
    """A library that counts the programs which were made and not destroyed."""

    def __init__(self, library):
        self._library, self.alive = library, 0

    def __getattr__(self, name):
        found = getattr(self._library, name)
        step = {"nvrtcCreateProgram": 1, "nvrtcDestroyProgram": -1}.get(name, 0)

        def counted(*args):
            self.alive += step
            return found(*args)

        return counted if step else found


@pytest.mark.parametrize("source", ["", "nothing"], ids=["compiles", "does not"])
def test_no_program_outlives_its_compilation(source, monkeypatch):
    compiler = compilers.needed()
    counting = Counting(compiler._library)
    monkeypatch.setattr(compiler, "_library", counting)
    with contextlib.nullcontext() if not source else pytest.raises(nvrtc.NotCompiled):
        compiler.compile(source, "sm_80")
    assert counting.alive == 0
