"""Building and finding the extension and the CUDA library: once for all who ask, never on import, never an old one."""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from crate_kernels import _build
from crate_kernels.cli import main

SOURCES = _build.source_folder()
pytestmark = pytest.mark.skipif(SOURCES is None, reason="needs the C++ sources: run from a checkout")
SLOW_COMPILER = """#!/bin/sh
# Writes what it is asked to, and remembers that it was asked to link.
for last; do :; done
case "$*" in *-shared*) echo link >> "{log}"; sleep 0.3;; esac
echo object > "$last"
"""


@pytest.fixture
def compiler(tmp_path):
    """Return a stand-in compiler and its log of links: the real one takes a minute."""
    path, log = tmp_path / "cxx", tmp_path / "log"
    path.write_text(SLOW_COMPILER.format(log=log))
    path.chmod(0o755)
    return path, log


def build(home, compiler):
    root = str(Path(_build.__file__).parents[1])
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "CXX": str(compiler), "PYTHONPATH": root}
    command = [sys.executable, "-m", "crate_kernels", "build"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_parallel_first_use_builds_once(tmp_path, compiler):
    path, log = compiler
    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(lambda _: build(tmp_path, path), range(3)))
    assert [r.returncode for r in results] == [0, 0, 0], results
    assert log.read_text() == "link\n"
    assert sum("compiled in" in r.stdout for r in results) == 1
    assert sum("already there" in r.stdout for r in results) == 2


def test_a_failed_build_says_why_and_leaves_nothing(tmp_path):
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho no such flag >&2\nexit 1\n")
    broken.chmod(0o755)
    result = build(tmp_path, broken)
    assert result.returncode == 1
    assert "no such flag" in result.stdout
    assert [p.name for p in (tmp_path / ".cache").rglob("*") if p.is_file()] == ["lock"]


def test_a_missing_compiler_is_said_to_be_missing(tmp_path):
    result = build(tmp_path, tmp_path / "nowhere")
    assert result.returncode == 1
    assert "no C++ compiler" in result.stdout
    assert "CXX" in result.stdout


def test_options_that_come_with_the_compiler_win(tmp_path, compiler):
    path, _ = compiler
    log = tmp_path / "commands"
    path.write_text(path.read_text().replace("for last;", f'echo "$@" >> "{log}"; for last;'))
    assert build(tmp_path, f"{path} -O1 -fsanitize=address").returncode == 0
    commands = [line.split() for line in log.read_text().splitlines() if "csrc" in line or "-shared" in line]
    assert all("-fsanitize=address" in words for words in commands)
    compiled = [words for words in commands if "-c" in words]
    assert compiled
    assert all(words.index("-O3") < words.index("-O1") for words in compiled)


def test_a_change_of_the_sources_is_another_build(tmp_path):
    copy = tmp_path / "csrc"
    shutil.copytree(SOURCES, copy)
    before = _build.source_hash(copy)
    assert before == _build.source_hash(SOURCES)
    (copy / "library.cpp").write_text("// changed\n")
    assert _build.source_hash(copy) != before
    assert _build.cache_folder(before) != _build.cache_folder(_build.source_hash(copy))


def test_an_extension_of_other_sources_is_not_found(tmp_path, monkeypatch):
    monkeypatch.setattr(_build, "_PACKAGE", tmp_path)
    monkeypatch.setattr(_build, "source_folder", lambda: SOURCES)
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    beside = tmp_path / f"_C{_build._SUFFIX}"
    assert _build.find() is None
    beside.write_bytes(b"crate_kernels sources 0123456789abcdef\0")
    assert _build.find() is None
    beside.write_bytes(b"..." + _build._marker(_build.source_hash(SOURCES)) + b"...")
    assert _build.find() == beside


def test_the_users_own_build_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(_build, "_PACKAGE", tmp_path)
    monkeypatch.setattr(_build, "source_folder", lambda: SOURCES)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    cached = _build.cache_folder(_build.source_hash(SOURCES)) / f"_C{_build._SUFFIX}"
    cached.parent.mkdir(parents=True)
    cached.touch()
    assert _build.find() == cached


NVCC = """#!/bin/sh
# Says what it is asked to, writes what it is asked to, and remembers that it was asked to link.
case "$*" in
*--version*) echo "Cuda compilation tools, release {release}, V{release}.0"; exit 0;;
*--list-gpu-code*) echo sm_75 sm_80 sm_86 sm_90 sm_90a; exit 0;;
esac
echo "$@" >> "{log}"
for last; do :; done
case "$*" in *-shared*) echo link >> "{log}.links"; sleep 0.3;; esac
{ending}
"""


@pytest.fixture
def toolkit(tmp_path, monkeypatch):
    """Return a function that puts a stand-in nvcc where it is looked for, and returns its log."""
    from torch.utils import cpp_extension

    folder, log = tmp_path / "toolkit", tmp_path / "log"
    (folder / "bin").mkdir(parents=True)

    def install(release="13.0", ending='echo "ptxas info : Used 9 registers"; echo object > "$last"'):
        path = folder / "bin" / "nvcc"
        path.write_text(NVCC.format(release=release, log=log, ending=ending))
        path.chmod(0o755)
        monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(folder))
        return log

    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    install.folder = folder
    return install


def test_parallel_first_use_builds_the_cuda_library_once(tmp_path, toolkit):
    log = toolkit()
    root = str(Path(_build.__file__).parents[1])
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
    monkeypatch.setattr(_build, "build_cached", lambda: (Path("_C"), False))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert main(["build"]) == 0
    assert "build: the CUDA library is left out: no nvcc" in capsys.readouterr().out
    assert main(["build", "--cuda"]) == 1
    assert "build: no nvcc" in capsys.readouterr().out


def test_build_compiles_both_where_pytorch_has_cuda(toolkit, monkeypatch, capsys):
    log = toolkit()
    monkeypatch.setattr(_build, "build_cached", lambda: (Path("_C"), False))
    assert main(["build"]) == 0
    assert not log.exists()  # this PyTorch may have no CUDA, and then nvcc is not asked
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert main(["build"]) == 0
    assert "build: _C (already there)" in capsys.readouterr().out
    assert "-shared" in log.read_text()


def test_a_failed_nvcc_says_why_and_leaves_nothing(tmp_path, toolkit, monkeypatch, capsys):
    toolkit(ending="echo no such architecture >&2; exit 1")
    assert main(["build", "--cuda"]) == 1
    assert "no such architecture" in capsys.readouterr().out
    assert [p.name for p in (tmp_path / ".cache").rglob("*") if p.is_file()] == ["lock"]


CHANGES = {
    "kernels": ("ista/update.cuh", False, True),
    "launchers": ("ista/ista_cuda.cu", False, True),
    "cpu": ("ista/ista_cpu.cpp", True, False),
    "cpu-header": ("ista/kernels.h", True, False),
    "shared": ("common/dtype.h", True, True),
}


@pytest.mark.parametrize(("name", "extension", "library"), CHANGES.values(), ids=CHANGES)
def test_a_change_rebuilds_what_is_made_of_it_and_nothing_else(name, extension, library, tmp_path):
    copy = tmp_path / "csrc"
    shutil.copytree(SOURCES, copy)
    before = _build.source_hash(copy), _build.cuda_source_hash(copy)
    with open(copy / name, "a") as file:
        file.write("// changed\n")
    after = _build.source_hash(copy), _build.cuda_source_hash(copy)
    assert (before[0] != after[0], before[1] != after[1]) == (extension, library)


def test_a_cuda_library_of_other_sources_is_not_found(tmp_path, monkeypatch):
    monkeypatch.setattr(_build, "_PACKAGE", tmp_path)
    monkeypatch.setattr(_build, "source_folder", lambda: SOURCES)
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    installed, sources = tmp_path / "_cuda.so", _build.cuda_source_hash(SOURCES)
    assert _build.find_cuda() == ()
    installed.write_bytes(_build._marker("0123456789abcdef"))
    assert _build.find_cuda() == ()
    installed.write_bytes(b"..." + _build._marker(sources) + b"...")
    own = _build.cuda_cache_folder(sources) / "_cuda-80.so"
    own.parent.mkdir(parents=True)
    own.touch()
    assert _build.find_cuda() == (installed, own)
