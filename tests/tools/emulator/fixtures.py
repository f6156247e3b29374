"""The CUDA kernels on CPU tensors: backend "emulated" is a GPU's backend "cpp" under the emulator."""

import shutil
from pathlib import Path

import pytest
import torch

from crate_kernels._core import backends, plan
from crate_kernels._cuda import launch, sources
from crate_kernels._native import libraries
from tests.tools.emulator import emulated, gpu

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def library():
    """Load the emulator and return ``torch.ops.crate_kernels_C``."""
    reason = emulated.unavailable_reason()
    if reason is not None:
        pytest.skip(reason)
    emulated.load()
    gpu.change_device()
    return torch.ops.crate_kernels_C


@pytest.fixture(scope="session")
def backend(library):
    """Register the backend "emulated" and return its name."""
    emulated.register()
    yield "emulated"
    backends.unregister("emulated")


@pytest.fixture
def device(library):
    """Return a function that changes the emulated GPU: ``gpu.change_device``."""
    yield gpu.change_device
    gpu.change_device()


def file_with(text, files, root=ROOT):
    """Return the one file with a text, of patterns below csrc."""
    found = [path for name in files for path in (root / "csrc").glob(f"{name}.cuh") if text in path.read_text()]
    assert len(found) == 1, f"{len(found)} files have {text!r}"
    return found[0]


@pytest.fixture
def copied(tmp_path, monkeypatch, device):
    """Return a function that copies the sources, which kernels are compiled from then on; it returns the copy."""

    def copy():
        for part in ("csrc", "tests/tools/emulator"):
            shutil.copytree(ROOT / part, tmp_path / part)
        monkeypatch.setattr(libraries, "source_folder", lambda: tmp_path / "csrc")
        return tmp_path

    def forget():
        sources.headers.cache_clear()
        launch._functions.clear()
        plan.forget()

    forget()
    yield copy
    monkeypatch.undo()
    forget()


@pytest.fixture
def broken(copied):
    """Return a function that changes one place of files below csrc, which kernels are compiled from then on."""

    def change(files, before, after):
        path = file_with(before, files, copied())
        path.write_text(path.read_text().replace(before, after, 1))

    return change
