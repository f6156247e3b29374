"""The CUDA library by nvcc: its unresolved symbols, the resources of its kernels, and its contents."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from crate_kernels._native import build, compilers, libraries
from tests.native import report

pytestmark = pytest.mark.exhaustive  # nvcc compiles for minutes

# Symbols of PyTorch's CUDA half; a CPU PyTorch has all others.
UNRESOLVED = {"aoti_torch_get_current_cuda_stream", "torch_c10_cuda_check_msg", "torch_c10_cuda_free_error_msg"}
STRICT = ("sm_80", "sm_90a")  # where kernels of 16-bit types may not spill at all
# The default architectures without the last one's PTX, which is a quarter of the time and has no registers yet.
ARCHS = tuple(arch for arch in compilers.CUDA_ARCHS if "+" not in arch)
STATIC_SHARED_LIMIT = 48 * 1024
# Known spills, in bytes stored and loaded per thread; they may shrink, never grow.
RECORDED = Path(__file__).with_name("spills.json")


@pytest.fixture(scope="module")
def built():
    """Compile for every architecture, once per change of the sources."""
    if libraries.source_folder() is None:
        pytest.skip("needs the CUDA sources: run from a checkout")
    if shutil.which("nm") is None:
        pytest.skip("needs nm: install binutils")
    try:
        compilers.find_nvcc()
    except build.BuildError as reason:
        pytest.skip(str(reason))
    return build.build_cuda_cached(ARCHS)[0]


@pytest.fixture(scope="module")
def kernels(built):
    return report.kernels(built.with_suffix(".so.txt").read_text())


def test_only_pytorchs_cuda_half_is_unresolved(built):
    if torch.version.cuda is not None:
        pytest.skip("needs a PyTorch without CUDA: this one has its own CUDA half")
    libraries = Path(torch.__file__).parent / "lib"
    here = set().union(*(report.defined(p) for p in libraries.glob("lib*.so") if p.stem in ("libtorch_cpu", "libc10")))
    wanted = {
        name for name in report.undefined(built) if name.startswith(("aoti_", "torch_", "cuda", "_ZN5torch", "c10"))
    }
    assert wanted - here == UNRESOLVED


STAND_IN = """
int aoti_torch_get_current_cuda_stream(int device, void** stream) { return 1; }
int torch_c10_cuda_check_msg(int e, const char* f, const char* n, unsigned l, _Bool d, char** m) { return 1; }
void torch_c10_cuda_free_error_msg(char* message) {}
"""
LOAD = """
import ctypes, sys, torch
try:
    torch.ops.load_library(sys.argv[2])
except OSError as error:
    print("refused:", error, error.__cause__)
ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)
torch.ops.load_library(sys.argv[2])
library = torch.ops.crate_kernels_C
print(library.cuda_build_info())
print(library.cuda_kernel_names())
"""


def test_with_stand_ins_for_those_it_loads_and_says_what_it_is(built, kernels, tmp_path):
    if torch.version.cuda is not None:
        pytest.skip("needs a PyTorch without CUDA: this one has its own CUDA half")
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler: install gcc")
    source, stand_in = tmp_path / "stand_in.c", tmp_path / "libtorch_cuda.so"
    source.write_text(STAND_IN)
    named = ["-Wl,-soname,libtorch_cuda.so", "-o", str(stand_in)]
    subprocess.run([compiler, "-shared", "-fPIC", str(source), *named], check=True)
    command = [sys.executable, "-c", LOAD, str(stand_in), str(built)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    refused, *said = done.stdout.splitlines()
    assert refused.startswith("refused:")
    assert "libtorch_cuda.so" in refused
    assert f"sources {libraries.cuda_source_hash(libraries.source_folder())}" in said
    assert f"archs {'_'.join(ARCHS)}" in said
    named = [line for line in said if line.startswith("crate_kernels::")]
    # Every kernel except the probe that reads its architecture.
    assert len(set(named)) == len(named) == len({k.name for k in kernels} - {"capability_probe<void>"})


def test_nothing_of_the_library_is_in_the_way_of_others(built):
    """It is loaded for everyone to see."""
    ends = {"_init", "_fini", "_end", "_edata", "__bss_start"}
    assert {name for name in report.defined(built) if not name.startswith("_Z")} <= ends
    assert not {name for name in report.defined(built) if "crate" in name}


def test_no_path_of_the_machine_is_in_the_library(built):
    contents = built.read_bytes()
    for folder in (libraries.source_folder(), Path(torch.__file__).parent, Path.home() / ".cache"):
        assert str(folder).encode() not in contents


def test_every_kernel_is_there_for_every_architecture(kernels):
    by_arch = {f"sm_{arch}": set() for arch in ARCHS}
    for kernel in kernels:
        by_arch[kernel.arch].add(kernel.name)
    assert by_arch["sm_75"] <= by_arch["sm_80"] == by_arch["sm_90a"]


def test_half_precision_spills_nothing(kernels):
    spilled = [k for k in kernels if k.arch in STRICT and k.half and k.spills and not wide(k)]
    assert spilled == []


def wide(kernel):
    """Return True if the heads are wider than 128, by the name: the only such template argument."""
    return any(f" {n}," in kernel.name or f" {n}>" in kernel.name for n in (160, 192, 224, 256))


def test_no_spill_is_new_or_larger(kernels, built):
    recorded = json.loads(RECORDED.read_text())
    release = [line for line in compilers.run([compilers.find_nvcc(), "--version"]).splitlines() if "release" in line]
    if recorded["release"] not in release[0]:
        pytest.skip(f"needs nvcc {recorded['release']}, whose spills are recorded; this is {release[0].strip()}")
    grown = {
        f"{k.name} {k.arch}": k.spills for k in kernels if k.spills > recorded["spills"].get(k.name, {}).get(k.arch, 0)
    }
    assert grown == {}


def test_static_shared_memory_fits_every_gpu(kernels):
    assert [k for k in kernels if k.shared > STATIC_SHARED_LIMIT] == []
    assert all(0 < k.registers <= 255 for k in kernels)


def test_headers_of_the_cpu_extension_that_the_cuda_library_includes_are_hashed():
    folder = libraries.source_folder()
    included = set()
    for path in (p for p in folder.rglob("*") if p.suffix in (".cu", ".cuh")):
        for line in path.read_text().splitlines():
            if line.startswith('#include "') and line.endswith('.h"'):
                included.add((path.parent / line.split('"')[1]).resolve().relative_to(folder.resolve()).as_posix())
    assert included == {path.relative_to(folder).as_posix() for path in libraries.shared_headers(folder)}


def test_a_changed_header_recompiles_its_dependents_only(tmp_path):
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc: install the CUDA toolkit")
    sources, root, target, report = (tmp_path / name for name in ("csrc", "root", "to/_cuda.so", "report"))
    kernel = '#include "{}"\n__global__ void {}(int* x) {{ *x = VALUE; }}\n'
    changed = "ista/cuda/a.cu"
    files = {"ista/cuda/a.cuh": "#define VALUE 1\n", changed: kernel.format("a.cuh", "kernel_a")}
    files |= {"library.cu": kernel.format("common/dtype.h", "kernel_b"), "common/dtype.h": "#define VALUE 2\n"}
    for name, text in {**files, "common/tensor.h": ""}.items():
        (sources / name).parent.mkdir(parents=True, exist_ok=True)
        (sources / name).write_text(text)

    def compiled():
        lines = []
        build.compile_cuda(sources, target, ("80",), root, report, lines.append)
        said = report.read_text()
        assert said.count("kernel_a") == said.count("kernel_b") > 0  # also for sources that are not recompiled
        return {line.split()[1] for line in lines[1:]}

    try:
        assert compiled() == {"csrc/library.cu", f"csrc/{changed}", "library.so"}
    except build.BuildError as reason:
        if "PyTorch has CUDA" not in str(reason):
            raise
        pytest.skip(str(reason))
    (sources / "common/tensor.h").write_text("// nobody includes it, but the library says of what sources it is\n")
    assert compiled() == {"csrc/library.cu", "library.so"}
    (sources / "ista/cuda/a.cuh").write_text("#define VALUE 3\n")
    assert compiled() == {"csrc/library.cu", f"csrc/{changed}", "library.so"}


REPORT = """ptxas info    : 28 bytes gmem
ptxas info    : Compiling entry function '_ZN13crate_kernels1kINS_4bf16ELi64EEEvPKfl' for 'sm_80'
ptxas info    : Function properties for _ZN13crate_kernels1kINS_4bf16ELi64EEEvPKfl
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 128 registers, used 1 barriers, 16 bytes cumulative stack size, 4096 bytes smem, 376 bytes cmem[0]
ptxas info    : Compile time = 41.811 ms
"""


def test_the_assemblers_report_is_read():
    if shutil.which("c++filt") is None:
        pytest.skip("needs c++filt: install binutils")
    (kernel,) = report.kernels(REPORT)
    assert kernel == report.Kernel("k<bf16, 64>", "sm_80", 128, 16, 20, 4096)
    assert kernel.half
    assert not wide(kernel)
