"""Building the CUDA library by a stand-in nvcc: built once, for which architectures, on which machines."""

from pathlib import Path

import pytest
import torch

from crate_kernels._native import build as _build
from crate_kernels._native import compilers
from crate_kernels.cli import main
from tests.native.common import SOURCES, assert_one_of_three_builds, files_left, needs_sources

pytestmark = needs_sources


def test_parallel_first_use_builds_once(tmp_path, toolkit):
    log = toolkit()
    path = f"{toolkit.folder}/bin:/usr/bin:/bin"
    assert_one_of_three_builds({"PATH": path, "HOME": str(tmp_path)}, "--cuda")
    assert Path(f"{log}.links").read_text() == "link\n"


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
    "none": ([], compilers.CUDA_ARCHS),
    "own": ([(8, 0)], ("80", "80+PTX")),
    "hopper": ([(9, 0)], ("90a", "90+PTX")),
    "two": ([(8, 6), (7, 5), (8, 6)], ("75", "86", "86+PTX")),
    "unknown to nvcc": ([(12, 0)], compilers.CUDA_ARCHS),
}


@pytest.mark.parametrize(("capabilities", "archs"), GPUS.values(), ids=GPUS)
def test_architectures_are_those_of_the_gpus(capabilities, archs, toolkit, monkeypatch):
    toolkit()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda n: capabilities[n])
    assert compilers.cuda_archs() == archs


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
        compilers.find_nvcc()


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
    monkeypatch.setattr(_build, "cuda_archs", lambda: compilers.CUDA_ARCHS)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert main(["build"]) == 0
    out = capsys.readouterr().out
    assert "build: _cpu.so (already there)" in out
    assert said is None or said in out
    assert log.exists() == gpu
    assert main(["build", "--cuda"]) == 0
    assert "-shared" in log.read_text()


def test_a_library_of_another_nvcc_is_made_anew(toolkit, capsys):
    for release, said in (("13.0", "compiled in"), ("13.0", "already there"), ("13.1", "compiled in")):
        toolkit(release)
        assert main(["build", "--cuda"]) == 0
        assert said in capsys.readouterr().out


def test_a_failed_nvcc_says_why_and_leaves_nothing(tmp_path, toolkit, monkeypatch, capsys):
    toolkit(ending="echo no such architecture >&2; exit 1")
    assert main(["build", "--cuda"]) == 1
    assert "no such architecture" in capsys.readouterr().out
    assert files_left(tmp_path) == ["lock"]
