"""Contents of an install: a wheel for any machine if nothing was compiled, else a wheel for this machine."""

import re
import shutil
import sys
import zipfile
from pathlib import Path

import pytest

from crate_kernels._native import build as _build

ROOT = Path(_build.__file__).parents[2]
SOURCES = ("crate_kernels", "csrc", "pyproject.toml", "setup.py", "README.md", "LICENSE")
if not all((ROOT / name).exists() for name in SOURCES):
    pytest.skip("needs a checkout", allow_module_level=True)
pytest.importorskip("setuptools", "77", reason="needs setuptools: pip install setuptools")  # also brings distutils


def failing(*args):
    raise _build.BuildError("no compiler")


def compiling(folder, target, *args):
    target.write_bytes(b"compiled")


BUILDS = {"nothing-compiled": (failing, (), "py3-none-any"), "extension": (compiling, ("_cpu.so",), "py3-none-(?!any)")}


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """Return a function that builds the wheel with stand-ins for the compilers, in this process."""
    from distutils.core import run_setup

    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in [name for name in sys.modules if name.partition(".")[0] == "_native"]:  # imported from another copy
        monkeypatch.delitem(sys.modules, name)

    def build(compile_it):
        distribution = run_setup(str(tmp_path / "setup.py"), ["-q", "bdist_wheel"], stop_after="config")
        builder = distribution.cmdclass["build_ext"].build_extensions.__globals__["build"]
        monkeypatch.setattr(builder, "compile_extension", compile_it)
        distribution.parse_command_line()
        distribution.run_commands()
        (path,) = (tmp_path / "dist").iterdir()
        return path

    return build


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # setuptools warns of its code
@pytest.mark.parametrize(("compile_it", "files", "tag"), BUILDS.values(), ids=BUILDS)
def test_a_wheel_is_tagged_what_it_is(compile_it, files, tag, wheel):
    path = wheel(compile_it)
    assert re.search(f"-{tag}", path.name), path.name
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        about, metadata = (
            next(archive.read(name).decode() for name in names if name.endswith(f".dist-info/{part}"))
            for part in ("WHEEL", "METADATA")
        )
    assert {name for name in names if name.endswith(".so")} == {f"crate_kernels/{name}" for name in files}
    assert {"crate_kernels/csrc/library.cpp", "crate_kernels/csrc/ista/cuda/update.cuh"} <= {*names}
    assert f"Root-Is-Purelib: {str(not files).lower()}" in about
    assert path.stem.partition("-py3")[2] in about
    required = [line.partition(": ")[2] for line in metadata.splitlines() if line.startswith("Requires-Dist")]
    # A CUDA PyTorch brings its own Triton, and on a CPU it is a GB of nothing. The tests interpret and compile with it.
    assert {r for r in required if "extra ==" not in r} == {"torch>=2.11", "numpy", "safetensors", "ninja>=1.11"}
    assert any(re.match(r"crate-kernels\[.*\btriton\b.*\]; extra == .test.", r) for r in required)
    assert any(r.startswith("triton>=") and 'extra == "triton"' in r for r in required)
