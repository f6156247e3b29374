"""Fixtures that install a stand-in compiler."""

import shutil
from pathlib import Path

import pytest
import torch

from crate_kernels.cli import main
from tests.native.common import NVCC, SLOW_COMPILER, WRITE


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
