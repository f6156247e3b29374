"""What the extension needs, and what a wheel may hold."""

import re
import shutil
import subprocess
import sys
import zipfile

import pytest

from crate_kernels._native import extension
from tests.tools.ship import wheel

SYSTEM = {"libc.so.6", "libm.so.6", "libgcc_s.so.1", "libstdc++.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1"}
SYSTEM |= {"ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}


@pytest.mark.skipif(extension.PATH is None, reason="needs the C++ extension: python -m crate_kernels build")
@pytest.mark.skipif(shutil.which("readelf") is None, reason="needs readelf: install binutils")
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_the_extension_needs_pytorch_and_the_system_alone():
    """PyTorch's library by its name, which it has in memory; nothing of a folder of this machine."""
    said = subprocess.run(
        ["readelf", "--wide", "--dynamic", extension.PATH], capture_output=True, text=True, check=True
    )
    assert set(re.findall(r"\(NEEDED\).*\[(.*)\]", said.stdout)) - SYSTEM == {"libtorch_cpu.so"}
    assert re.findall(r"\((?:RPATH|RUNPATH)\)", said.stdout) == []


def packed(folder, *names):
    """Write a wheel of these files."""
    path = folder / "crate_kernels-0.1.0-py3-none-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, b"")
    return path


def test_a_wheel_holds_the_extension_and_no_other_library(tmp_path, monkeypatch, capsys):
    assert wheel.faults(packed(tmp_path, wheel.EXTENSION, "crate_kernels/__init__.py")) == []
    copied = packed(tmp_path, "crate_kernels.libs/libcudart-0123.so.13")
    monkeypatch.setattr(sys, "argv", ["wheel", str(copied)])
    assert wheel.main() == 1
    said = capsys.readouterr().out
    assert "must hold no other library, got crate_kernels.libs/libcudart-0123.so.13" in said
    assert "must hold crate_kernels/_cpu.so" in said
