"""Building and finding the extension and the CUDA library: built once, never on import, never used when outdated."""

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.utils.cpp_extension import include_paths

from crate_kernels._native import build as _build
from crate_kernels._native import extension as _extension
from crate_kernels._native import libraries as _libraries
from crate_kernels._native import ninja_build
from crate_kernels.cli import main

SOURCES = _libraries.source_folder()
pytestmark = pytest.mark.skipif(SOURCES is None, reason="needs the C++ sources: run from a checkout")
# Stand-in for a compiler: writes the sources' marker to the requested output; the linker joins the objects.
WRITE = r"""case "$*" in *--version*) exit;; esac
PATH=/usr/bin:/bin
for last; do
  case "$last" in
  -DCRATE_SOURCES=*) sources="${last#*=}";;
  *.o) objects="$objects $last";;
  esac
done
case "$*" in *-shared*) cat $objects > "$last";; *) printf 'crate_kernels sources %s\0' "$sources" > "$last";; esac
"""
SLOW_COMPILER = """#!/bin/sh
# Stand-in that records each link.
case "$*" in *-shared*) echo link >> "{log}"; sleep 0.3;; esac
{write}"""


@pytest.fixture
def compiler(tmp_path):
    """Return a stand-in compiler and its log of links: the real one takes a minute."""
    path, log = tmp_path / "cxx", tmp_path / "log"
    path.write_text(SLOW_COMPILER.format(log=log, write=WRITE))
    path.chmod(0o755)
    return path, log


@pytest.fixture
def build(tmp_path, monkeypatch, capsys):
    """Return a function that builds with a compiler into an empty home, and returns the status and the output."""

    def run(compiler):
        monkeypatch.setattr(Path, "home", lambda: tmp_path)
        monkeypatch.setattr(torch.version, "cuda", None)
        monkeypatch.setenv("CXX", str(compiler))
        return main(["build"]), capsys.readouterr().out

    return run


def left(folder):
    """List the files of a cache, without the folders in which the next build continues."""
    cache = folder / ".cache" / "crate_kernels"
    files = [path.relative_to(cache) for path in cache.rglob("*") if path.is_file()]
    return [path.name for path in files if not path.parts[0].startswith("objects-")]


def test_parallel_first_use_builds_once(tmp_path, compiler):
    path, log = compiler
    root = str(Path(_build.__file__).parents[2])
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "CXX": str(path), "PYTHONPATH": root}

    def build_in_a_process(_):
        command = [sys.executable, "-m", "crate_kernels", "build"]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)

    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(build_in_a_process, range(3)))
    assert [r.returncode for r in results] == [0, 0, 0], results
    assert log.read_text() == "link\n"
    assert sum("compiled in" in r.stdout for r in results) == 1
    assert sum("already there" in r.stdout for r in results) == 2


def test_a_failed_build_says_why_and_leaves_nothing(tmp_path, build):
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho no such flag >&2\nexit 1\n")
    broken.chmod(0o755)
    status, said = build(broken)
    assert status == 1
    assert "no such flag" in said
    assert left(tmp_path) == ["lock"]


def test_a_missing_compiler_is_said_to_be_missing(tmp_path, build):
    status, said = build(tmp_path / "nowhere")
    assert status == 1
    assert "no C++ compiler" in said
    assert "CXX" in said


COMPILERS = {
    "unbalanced quote": ("g++ -DNAME='x", "CXX cannot be read (No closing quotation): g++ -DNAME='x"),
    "options alone": ("-O2", "CXX must name a C++ compiler, got '-O2'"),
    "empty": ("", "CXX must name a C++ compiler, got ''"),
}


@pytest.mark.parametrize(("cxx", "message"), COMPILERS.values(), ids=COMPILERS)
def test_a_cxx_that_names_no_compiler_is_refused(cxx, message, build):
    assert build(cxx) == (1, f"build: {message}\n")


def test_options_that_come_with_the_compiler_win(tmp_path, compiler, build):
    path, _ = compiler
    log = tmp_path / "commands"
    path.write_text(path.read_text().replace("PATH=", f'echo "$@" >> "{log}"\nPATH='))
    assert build(f"{path} -O1 -fsanitize=address")[0] == 0
    commands = [line.split() for line in log.read_text().splitlines() if "csrc" in line or "-shared" in line]
    assert all("-fsanitize=address" in words for words in commands)
    compiled = [words for words in commands if "-c" in words]
    assert compiled
    assert all(words.index("-O3") < words.index("-O1") for words in compiled)


def test_a_disk_without_room_is_said_to_be_full(tmp_path, monkeypatch, compiler, build):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ninja_build.os, "replace", full)
    assert build(compiler[0]) == (1, "build: [Errno 28] No space left on device\n")
    assert left(tmp_path) == ["lock"]


def test_a_change_of_the_sources_is_another_build(tmp_path):
    copy = tmp_path / "csrc"
    shutil.copytree(SOURCES, copy)
    before = _libraries.source_hash(copy)
    assert before == _libraries.source_hash(SOURCES)
    (copy / "library.cpp").write_text("// changed\n")
    assert _libraries.source_hash(copy) != before
    assert _libraries.cache_folder(before) != _libraries.cache_folder(_libraries.source_hash(copy))


def test_a_build_is_of_its_flags_its_pytorch_and_its_kind_of_machine(monkeypatch):
    def identity():
        extension, library = _libraries.source_hash(SOURCES), _libraries.cuda_source_hash(SOURCES)
        return extension, library, _libraries.cache_folder("0"), _libraries.cuda_cache_folder("0")

    def changed(*changes):
        before = identity()
        with monkeypatch.context() as patch:
            patch.setattr(*changes)
            return [a != b for a, b in zip(identity(), before, strict=True)]

    assert changed(_libraries, "FLAGS", (*_libraries.FLAGS, "-g")) == [True, False, False, False]
    assert changed(_libraries, "CUDA_FLAGS", (*_libraries.CUDA_FLAGS, "-g")) == [False, True, False, False]
    assert changed(torch, "__version__", "2.99") == [False, False, True, False]  # the CUDA library fits every PyTorch
    assert changed(_libraries, "PLATFORM", "linux-riscv64") == [False, False, True, True]


def test_an_extension_of_other_sources_is_not_found(tmp_path, monkeypatch):
    monkeypatch.setattr(_libraries, "_PACKAGE", tmp_path)
    monkeypatch.setattr(_libraries, "source_folder", lambda: SOURCES)
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    beside = tmp_path / _libraries.EXTENSION
    assert _libraries.find() is None
    beside.write_bytes(b"crate_kernels sources 0123456789abcdef\0")
    assert _libraries.find() is None
    beside.write_bytes(b"..." + _libraries.marker(_libraries.source_hash(SOURCES)) + b"...")
    assert _libraries.find() == beside
    monkeypatch.setattr(_libraries, "source_folder", lambda: None)  # without sources any library fits
    beside.write_bytes(b"crate_kernels sources 0123456789abcdef\0")
    assert _libraries.find() == beside
    beside.write_bytes(b"another library")
    assert _libraries.find() is None


def test_the_users_own_build_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(_libraries, "_PACKAGE", tmp_path)
    monkeypatch.setattr(_libraries, "source_folder", lambda: SOURCES)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    sources = _libraries.source_hash(SOURCES)
    cached = _libraries.cache_folder(sources) / _libraries.EXTENSION
    cached.parent.mkdir(parents=True)
    cached.write_bytes(_libraries.marker(sources))
    assert _libraries.find() == cached


def elf(sources, order="little"):
    """Return a minimal whole file: a header that locates the table of sections, the marker, that table."""
    marker = _libraries.marker(sources)
    table = 64 + len(marker)
    header = bytearray(64)
    header[:6] = b"\x7fELF\x02" + bytes([1 if order == "little" else 2])
    header[40:48], header[58:60], header[60:62] = (n.to_bytes(w, order) for n, w in ((table, 8), (64, 2), (2, 2)))
    return bytes(header) + marker + bytes(128)


CUT = {"nothing": 0, "part of the header": 30, "header": 64, "no sections": 64 + 40, "one byte": -1}


@pytest.mark.parametrize("cut", CUT.values(), ids=CUT)
def test_what_is_left_of_a_library_is_neither_loaded_nor_already_there(cut, tmp_path, monkeypatch, compiler, build):
    """The process that maps it ends by SIGBUS."""
    monkeypatch.setattr(_libraries, "_PACKAGE", tmp_path)
    monkeypatch.setattr(_libraries, "source_folder", lambda: SOURCES)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    sources = _libraries.source_hash(SOURCES)
    cached = _libraries.cache_folder(sources) / _libraries.EXTENSION
    cached.parent.mkdir(parents=True)
    for order in ("little", "big"):
        cached.write_bytes(elf(sources, order))
        assert _libraries.find() == cached
        cached.write_bytes(elf(sources, order)[:cut])
        assert _libraries.find() is None
    status, said = build(compiler[0])
    assert status == 0
    assert "compiled in" in said
    assert _libraries.find() == cached
    assert "already there" in build(compiler[0])[1]


@pytest.mark.skipif(_extension.PATH is None, reason="needs python -m crate_kernels build")
def test_a_linkers_own_file_is_whole_and_a_part_of_it_is_not():
    content = _extension.PATH.read_bytes()
    assert _libraries._is_whole(content)
    assert not any(_libraries._is_whole(content[: len(content) * part // 8]) for part in range(1, 8))


HOMES = {
    "a file": (lambda folder: folder / "file", "the user's cache cannot be written: .*Not a directory.*; set HOME"),
    "too long": (lambda folder: folder / ("x" * 300), "the user's cache cannot be written: .*too long.*; set HOME"),
    "none": (None, "there is no cache without a home folder: Could not determine home directory. Set HOME"),
}


@pytest.mark.parametrize(("home", "message"), HOMES.values(), ids=HOMES)
def test_without_a_usable_home_nothing_is_found_and_build_says_so(home, message, tmp_path, monkeypatch, capsys):
    def none():
        raise RuntimeError("Could not determine home directory.")

    (tmp_path / "file").touch()
    monkeypatch.setattr(_libraries, "_PACKAGE", tmp_path)
    monkeypatch.setattr(_libraries, "source_folder", lambda: SOURCES)
    monkeypatch.setattr(Path, "home", none if home is None else lambda: home(tmp_path))
    assert _libraries.find() is None
    assert _libraries.find_cuda() == ()
    for command in (["build"], ["build", "--cuda"]):
        monkeypatch.setattr(_build, "find_nvcc", lambda: "nvcc")
        assert main(command) == 1
        assert re.search(f"^build: {message}", capsys.readouterr().out)


STABLE = ("torch/csrc/stable/", "torch/headeronly/", "torch/csrc/inductor/aoti_torch/")


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_the_extension_includes_nothing_but_pytorchs_stable_headers():
    """Others refuse TORCH_TARGET_VERSION on some PyTorch, or are of one Python, and a floor that nobody runs breaks."""
    folders = include_paths()
    command = ["c++", *_libraries.FLAGS, "-DCRATE_SOURCES=0", *(f"-isystem{path}" for path in folders), "-M"]
    done = subprocess.run([*command, *map(str, SOURCES.rglob("*.cpp"))], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    words = {word for word in done.stdout.split() if word.endswith(".h")}
    names = {os.path.relpath(word, root) for root in folders for word in words if word.startswith(f"{root}/")}
    assert any(name.startswith("torch/csrc/stable/") for name in names)
    assert sorted(name for name in names if not name.startswith(STABLE)) == []


NVCC = """#!/bin/sh
# Stand-in for nvcc: names its release and GPU codes, logs its arguments and each link, then runs `ending`.
case "$*" in
*--version*) echo "Cuda compilation tools, release {release}, V{release}.0"; exit 0;;
*--list-gpu-code*) echo sm_75 sm_80 sm_86 sm_90 sm_90a; exit 0;;
esac
echo "$@" >> "{log}"
case "$*" in *-shared*) echo link >> "{log}.links"; sleep 0.3;; esac
{ending}
"""


@pytest.fixture
def toolkit(tmp_path, monkeypatch):
    """Return a function that installs a stand-in nvcc where the build looks for nvcc, and returns its log."""
    from torch.utils import cpp_extension

    folder, log = tmp_path / "toolkit", tmp_path / "log"
    (folder / "bin").mkdir(parents=True)

    def install(release="13.0", ending=f'echo "ptxas info : Used 9 registers"\n{WRITE}'):
        path = folder / "bin" / "nvcc"
        path.write_text(NVCC.format(release=release, log=log, ending=ending))
        path.chmod(0o755)
        monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(folder))
        return log

    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    (tmp_path / "cat").symlink_to(shutil.which("cat"))  # prints the output of a failed nvcc; this PATH has no nvcc
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    install.folder = folder
    return install


def test_parallel_first_use_builds_the_cuda_library_once(tmp_path, toolkit):
    log = toolkit()
    root = str(Path(_build.__file__).parents[2])
    environment = {"PATH": f"{toolkit.folder}/bin:/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONPATH": root}

    def build_cuda(_):
        command = [sys.executable, "-m", "crate_kernels", "build", "--cuda"]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)

    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(build_cuda, range(3)))
    assert [r.returncode for r in results] == [0, 0, 0], results
    assert Path(f"{log}.links").read_text() == "link\n"
    assert sum("compiled in" in r.stdout for r in results) == 1
    assert sum("already there" in r.stdout for r in results) == 2


def test_the_cuda_library_is_for_the_architectures_asked_for(tmp_path, toolkit):
    log = toolkit()
    path, compiled = _build.build_cuda_cached(("80", "90a", "90+PTX"))
    assert compiled
    assert path.name == "_cuda-80-90a-90+PTX.so"
    assert "Used 9 registers" in path.with_suffix(".so.txt").read_text()
    commands = [line for line in log.read_text().splitlines() if " -c " in line]
    assert len(commands) == len(list(SOURCES.rglob("*.cu")))
    for command in commands:
        codes = [word for word in command.split() if word.startswith("arch=")]
        assert codes == [f"arch=compute_{x}" for x in ("80,code=sm_80", "90a,code=sm_90a", "90,code=compute_90")]
    assert _build.build_cuda_cached(("80", "90a", "90+PTX")) == (path, False)
    assert _build.build_cuda_cached(("75",))[0].parent == path.parent


GPUS = {
    "none": ([], _build.CUDA_ARCHS),
    "own": ([(8, 0)], ("80", "80+PTX")),
    "hopper": ([(9, 0)], ("90a", "90+PTX")),
    "two": ([(8, 6), (7, 5), (8, 6)], ("75", "86", "86+PTX")),
    "unknown to nvcc": ([(12, 0)], _build.CUDA_ARCHS),
}


@pytest.mark.parametrize(("capabilities", "archs"), GPUS.values(), ids=GPUS)
def test_architectures_are_those_of_the_gpus(capabilities, archs, toolkit, monkeypatch):
    toolkit()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda n: capabilities[n])
    assert _build.cuda_archs() == archs


NO_NVCC = {
    "missing": (None, "13.0", "no nvcc: install the CUDA toolkit, with nvcc on PATH or in CUDA_HOME"),
    "old": ("11.8", None, "is 11.8; 12.0 or later is needed"),
    "newer than PyTorch's": ("13.0", "12.6", "is 13.0, PyTorch has CUDA 12.6"),
    "nameless": ("?", None, "--version names no release"),
}


@pytest.mark.parametrize(("release", "cuda", "message"), NO_NVCC.values(), ids=NO_NVCC)
def test_an_nvcc_that_does_not_fit_is_refused_with_the_reason(release, cuda, message, toolkit, monkeypatch):
    if release is not None:
        toolkit(release)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with pytest.raises(_build.BuildError, match=message):
        _build.find_nvcc()


def test_a_cuda_library_without_nvcc_is_left_out_and_no_failure(toolkit, monkeypatch, capsys):
    monkeypatch.setattr(_build, "build_cached", lambda show: (Path("_cpu.so"), False))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert main(["build"]) == 0
    assert "build: the CUDA library is left out: no nvcc" in capsys.readouterr().out
    assert main(["build", "--cuda"]) == 1
    assert "build: no nvcc" in capsys.readouterr().out


MACHINES = {
    "no-cuda": (None, False, None),
    "no-gpu": ("13.0", False, "the CUDA library is left out: PyTorch sees no GPU; build --cuda compiles it all the s"),
    "gpu": ("13.0", True, "_cuda-75-80-90a-90+PTX.so (compiled in"),
}


@pytest.mark.parametrize(("cuda", "gpu", "said"), MACHINES.values(), ids=MACHINES)
def test_build_compiles_the_cuda_library_where_there_is_a_gpu(cuda, gpu, said, toolkit, monkeypatch, capsys):
    """It takes five minutes, and without a GPU nobody needs it."""
    log = toolkit()
    monkeypatch.setattr(_build, "build_cached", lambda show: (Path("_cpu.so"), False))
    monkeypatch.setattr(_build, "cuda_archs", lambda: _build.CUDA_ARCHS)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert main(["build"]) == 0
    out = capsys.readouterr().out
    assert "build: _cpu.so (already there)" in out
    assert said is None or said in out
    assert log.exists() == gpu
    assert main(["build", "--cuda"]) == 0
    assert "-shared" in log.read_text()


def test_a_failed_nvcc_says_why_and_leaves_nothing(tmp_path, toolkit, monkeypatch, capsys):
    toolkit(ending="echo no such architecture >&2; exit 1")
    assert main(["build", "--cuda"]) == 1
    assert "no such architecture" in capsys.readouterr().out
    assert left(tmp_path) == ["lock"]


CHANGES = {
    "kernels": ("ista/cuda/update.cuh", False, True),
    "launchers": ("ista/cuda/ista_cuda.cu", False, True),
    "cpu": ("ista/cpu/ista_cpu.cpp", True, False),
    "cpu-header": ("ista/cpu/kernels.h", True, False),
    "shared": ("common/dtype.h", True, True),
}


@pytest.mark.parametrize(("name", "extension", "library"), CHANGES.values(), ids=CHANGES)
def test_a_change_rebuilds_what_is_made_of_it_and_nothing_else(name, extension, library, tmp_path):
    copy = tmp_path / "csrc"
    shutil.copytree(SOURCES, copy)
    before = _libraries.source_hash(copy), _libraries.cuda_source_hash(copy)
    assert (copy / name).exists()
    with open(copy / name, "a") as file:
        file.write("// changed\n")
    after = _libraries.source_hash(copy), _libraries.cuda_source_hash(copy)
    assert (before[0] != after[0], before[1] != after[1]) == (extension, library)


def test_a_cuda_library_of_other_sources_is_not_found(tmp_path, monkeypatch):
    monkeypatch.setattr(_libraries, "_PACKAGE", tmp_path)
    monkeypatch.setattr(_libraries, "source_folder", lambda: SOURCES)
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    installed, sources = tmp_path / "_cuda.so", _libraries.cuda_source_hash(SOURCES)
    assert _libraries.find_cuda() == ()
    installed.write_bytes(_libraries.marker("0123456789abcdef"))
    assert _libraries.find_cuda() == ()
    installed.write_bytes(b"..." + _libraries.marker(sources) + b"...")
    own = _libraries.cuda_cache_folder(sources) / "_cuda-80.so"
    own.parent.mkdir(parents=True)
    own.touch()
    assert _libraries.find_cuda() == (installed,)
    own.write_bytes(_libraries.marker(sources))
    assert _libraries.find_cuda() == (installed, own)
    installed.write_bytes(elf(sources)[:-1])
    assert _libraries.find_cuda() == (own,)
