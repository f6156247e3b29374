"""Compile, without a GPU, the same kernels that a launcher would launch on one, and read their resources.

The launcher runs on meta tensors, and its launch tables answer for the target. The launches are recorded, compiled
and measured: registers, stack (where spilled registers go), shared memory and, on Hopper, the number of warp-group
products.
"""

import io
import json
import os
import re
import subprocess
import tempfile
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from crate_kernels._triton import launch as _launch
from tests.tools.aot import listing

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
ADA = {"sm_89": GPUTarget("cuda", 89, 32)}  # sm_80's code with little shared memory
STRICT = ("sm_80", "sm_90")  # where 16-bit kernels with head_dim <= 128 may not spill at all
SHARED_LIMIT = {"sm_80": 163 * 1024, "sm_89": 99 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}
TENSOR_MEMORY = 512  # columns that a multiprocessor of sm_100 has
ROOT = Path(__file__).parents[3]
# Known spills, in bytes of stack per thread; they may shrink, never grow.
RECORDED = Path(__file__).with_name("spills.json")
VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
TUNED = ((3, 6), (3, 7))  # versions whose machine code the launch tables are chosen by: STRICT holds for these alone


@dataclass(frozen=True)
class Launch:
    """One kernel launch: the function, its arguments by name, and its options."""

    function: JITFunction
    arguments: dict
    options: dict


@dataclass(frozen=True)
class Kernel:
    """Resources of a compiled kernel: registers and stack bytes per thread, bytes of shared memory, wgmma count."""

    name: str
    registers: int
    stack: int
    shared: int
    wgmma: int
    config: str


@contextmanager
def _recording(target, launches):
    """Answer for ``target`` in place of the device's own architecture, and record launches instead of making them."""

    def run(self, *args, grid, warmup, **kwargs):
        named = dict(zip((p.name for p in self.params), args, strict=False))
        arguments = {**named, **{k: v for k, v in kwargs.items() if k in self.arg_names}}
        options = {k: v for k, v in kwargs.items() if k not in self.arg_names}
        launches.append(Launch(self, arguments, options))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", run)
        patch.setattr(_launch, "arch", lambda device: target)
        patch.setattr(_launch, "multiprocessors", lambda device: 132)
        yield


def launches(call, target):
    """Return the launches of ``call`` on ``target``."""
    found = []
    with _recording(target, found):
        call()
    return found


def source_of(launch, target):
    """Return the source of a launch, specialised as Triton itself does where it runs."""
    function, backend = launch.function, make_backend(target)
    bind = create_function_from_signature(function.signature, function.params, backend)
    named, specialization, options = bind(**launch.arguments, **launch.options)
    _, signature, constants, attributes = function._pack_args(backend, options, named, specialization, options)
    return ASTSource(function, signature, constants, attributes)


@dataclass(frozen=True)
class Assembled:
    """A compiled launch, and the assembler's report on it."""

    compiled: object
    report: str


_ASSEMBLED = {}


def assemble(launch, target):
    """Compile a launch for an NVIDIA GPU, and keep what the assembler says; once per process.

    Triton's cache does not keep the assembler's report, so its entry is not read.
    """
    source = source_of(launch, TARGETS[target])
    key = source.hash(), str(launch.options), target
    if key not in _ASSEMBLED:
        said = io.StringIO()
        with knobs.nvidia.scope(), knobs.compilation.scope(), redirect_stdout(said):
            knobs.nvidia.dump_ptxas_log, knobs.compilation.always_compile = True, True
            compiled = triton.compile(source, target=TARGETS[target], options=launch.options)
        _ASSEMBLED[key] = Assembled(compiled, said.getvalue())
    return _ASSEMBLED[key]


def nvidia_tool(name):
    """Return the path of one of the NVIDIA tools in Triton's wheel."""
    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name


def compile_launch(launch, target):
    """Compile one launch for ``target`` and read its resources."""
    gpu = (TARGETS | ADA)[target]
    source = source_of(launch, gpu)
    known = _ASSEMBLED.get((source.hash(), str(launch.options), target))
    compiled = known.compiled if known else triton.compile(source, target=gpu, options=launch.options)
    config = {k: v for k, v in launch.arguments.items() if k.startswith(("BLOCK", "PART", "TAIL"))}
    registers, stack = _amd(compiled) if target.startswith("gfx") else nvidia_resources(compiled)
    wgmma = len(re.findall(r"wgmma\.mma_async", compiled.asm.get("ptx", "")))
    text = " ".join(f"{k}={v}" for k, v in {**config, **launch.options}.items())
    return Kernel(launch.function.__name__, registers, stack, compiled.metadata.shared, wgmma, text)


def nvidia_resources(compiled):
    """Return (registers, bytes of stack) per thread of a compiled kernel."""
    tool = nvidia_tool("cuobjdump")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(compiled.asm["cubin"])
        text = subprocess.run([tool, "--dump-resource-usage", path], capture_output=True, text=True, check=True).stdout
    usage = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", text))
    return int(usage["REG"]), int(usage["STACK"]) + int(usage["LOCAL"])


def disassembly(cubin):
    """Return nvdisasm's listing of a cubin, by its bytes, with lines of the source where the compiler notes them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [nvidia_tool("nvdisasm"), "-c", "-g", path]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def disassembled(cubin):
    """Return the functions of a cubin, by its bytes."""
    return listing.functions(disassembly(cubin))


def listed(launch, target):
    """Return the function of a launch as its machine code has it."""
    functions = disassembled(assemble(launch, target).compiled.asm["cubin"])
    (function,) = (each for each in functions if each.name == launch.function.__name__)
    return function


def _amd(compiled):
    text = compiled.asm["amdgcn"]
    fields = {k: int(re.search(rf"\.{k}:\s*(\d+)", text)[1]) for k in ("vgpr_count", "private_segment_fixed_size")}
    return fields["vgpr_count"], fields["private_segment_fixed_size"]


def compiled(call, target):
    """Compile the launches of ``call`` on ``target``; equal launches once."""
    kernels = []
    for launch in launches(call, target):
        kernel = compile_launch(launch, target)
        if kernel not in kernels:
            kernels.append(kernel)
    return kernels


def misfits(launches, target):
    """Compile launches; list those that ask for more memory of a multiprocessor than there is."""
    wrong = []
    for launch in launches:
        compiled = triton.compile(source_of(launch, TARGETS[target]), target=TARGETS[target], options=launch.options)
        shared, columns = compiled.metadata.shared, getattr(compiled.metadata, "tmem_size", None) or 0
        if shared > SHARED_LIMIT[target] or columns > TENSOR_MEMORY:
            name = launch.function.__name__
            wrong.append(f"{name}: {shared} bytes of shared memory, {columns} columns of tensor memory")
    return wrong


def spill_key(case, target, kernel, strict):
    """Return what a kernel's spills are recorded as; None if it may not spill, now or ever."""
    key = f"{case} {target} {kernel.name}"
    if not (strict and target in STRICT):
        return key
    return None if VERSION in TUNED else f"{key} triton {VERSION[0]}.{VERSION[1]}"


def over_limits(kernels, target, case, strict):
    """List the faults: shared memory beyond the device's, and spills beyond what is recorded."""
    recorded = json.loads(RECORDED.read_text())
    wrong = []
    for kernel in kernels:
        allowed = recorded.get(spill_key(case, target, kernel, strict), 0)
        if kernel.stack > allowed:
            wrong.append(f"{kernel}: {kernel.stack} bytes of stack, {allowed} allowed")
        if kernel.shared > SHARED_LIMIT[target]:
            wrong.append(f"{kernel}: {kernel.shared} bytes of shared memory, {SHARED_LIMIT[target]} there are")
    return wrong


def covering(cases):
    """Return parameters (name, target) of cases {name: (call, targets, ...)}.

    make test compiles a case for its one GPU, or for sm_90; make test-all for its other GPUs too.
    """
    return [
        pytest.param(
            name,
            target,
            id=f"{name}-{target}",
            marks=() if len(targets) == 1 or target == "sm_90" else pytest.mark.exhaustive,
        )
        for name, (_, targets, *_) in cases.items()
        for target in targets
    ]


def needs_compiler():
    """Skip a module where Triton interprets: then it compiles nothing in this process."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("compiles kernels: needs TRITON_INTERPRET unset", allow_module_level=True)
