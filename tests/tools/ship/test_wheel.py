"""What a wheel needs, read from its libraries, and what is refused."""

import shutil
import sys
import zipfile

import pytest

from crate_kernels._native import extension
from tests.tools.ship import wheel

SAID = """
 0x0000000000000001 (NEEDED)             Shared library: [{torch}]
 0x0000000000000001 (NEEDED)             Shared library: [libc.so.6]
{more}
  000000: Version: 1  File: libc.so.6  Cnt: 2
  0x0010:   Name: GLIBC_2.2.5  Flags: none  Version: 9
  0x0020:   Name: GLIBC_{libc}  Flags: none  Version: 6
  0x0030:   Name: GLIBCXX_3.4.{cxx}  Flags: none  Version: 4
"""
TAG = "manylinux_2_28_x86_64"
LIBRARIES = {
    "as-tagged": ({}, TAG, []),
    "newer-tag": ({"libc": "2.32", "cxx": "29"}, "manylinux_2_34_x86_64", []),
    "newer-c-library": ({"libc": "2.32"}, TAG, ["needs GLIBC_2.32, later than 2.28 of manylinux_2_28_x86_64"]),
    "newer-c++-library": ({"cxx": "25"}, TAG, ["needs GLIBCXX_3.4.25, later than 3.4.24 of manylinux_2_28_x86_64"]),
    "untagged": ({}, "linux_x86_64", ["must have a manylinux tag, got linux_x86_64"]),
    "cuda-runtime": ({"more": "(NEEDED) Shared library: [libcudart.so.13]"}, TAG, ["needs libcudart.so.13"]),
    "another-pytorch": (
        {"torch": "libtorch_cuda.so"},
        TAG,
        ["needs libtorch_cuda.so", "must need libtorch_cpu.so"],
    ),
    "python": ({"more": "(NEEDED) Shared library: [libpython3.11.so.1.0]"}, TAG, ["needs libpython3.11.so.1.0"]),
    "a-folder": ({"more": "(RUNPATH) Library runpath: [/home/a]"}, TAG, ["looks for libraries in /home/a"]),
}


@pytest.mark.parametrize(("changes", "tag", "wrong"), LIBRARIES.values(), ids=LIBRARIES)
def test_what_a_library_may_need(changes, tag, wrong):
    said = SAID.format(**{"more": "", "torch": "libtorch_cpu.so", "libc": "2.17", "cxx": "24", **changes})
    assert wheel.faults(wheel.parsed(said), tag) == wrong


@pytest.mark.skipif(extension.PATH is None, reason="needs the C++ extension: python -m crate_kernels build")
@pytest.mark.skipif(shutil.which("readelf") is None, reason="needs readelf: install binutils")
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_the_extension_needs_pytorch_and_the_system_alone(tmp_path, monkeypatch, capsys):
    """Whatever this machine's C library is: only a wheel has a tag to hold to."""
    assert wheel.faults(wheel.needs(extension.PATH), "manylinux_2_99_x86_64") == []
    packed = tmp_path / "crate_kernels-0.1.0-py3-none-manylinux_2_5_x86_64.whl"
    with zipfile.ZipFile(packed, "w") as archive:
        archive.write(extension.PATH, "crate_kernels/_cpu.so")
        archive.write(extension.PATH, "crate_kernels/_gpu.so")
        archive.writestr("crate_kernels.libs/libtorch_cpu-0123.so", b"")
    found = wheel.Needs({"libtorch_cpu.so"}, {"GLIBC": (2, 17)}, [])
    monkeypatch.setattr(wheel, "needs", lambda library: found)
    monkeypatch.setattr(sys, "argv", ["wheel", str(packed)])
    assert wheel.main() == 1
    said = capsys.readouterr().out
    assert "must hold no other library, got crate_kernels.libs/libtorch_cpu-0123.so" in said
    assert "must hold no other library, got crate_kernels/_gpu.so" in said
    assert "needs GLIBC_2.17, later than 2.5 of manylinux_2_5_x86_64" in said
    assert "must need" not in said
