"""The CUDA kernels on CPU tensors: backend "emulated" is a GPU's backend "cpp" under the emulator."""

import shutil
from pathlib import Path

import pytest
import torch

from crate_kernels._core import backends, plan
from crate_kernels._cuda import launch, sources
from crate_kernels._native import libraries
from tests.tools.emulator import emulated

ROOT = Path(__file__).parents[3]
AMPERE = {"capability": 80, "multiprocessors": 4, "shared_limit": 163 * 1024}


@pytest.fixture(scope="session")
def library():
    """Load the emulator and return ``torch.ops.crate_kernels_C``."""
    reason = emulated.unavailable_reason()
    if reason is not None:
        pytest.skip(reason)
    emulated.load()
    return torch.ops.crate_kernels_C


@pytest.fixture(scope="session")
def backend(library):
    """Register the backend "emulated" and return its name."""
    emulated.register()
    yield "emulated"
    backends.unregister("emulated")


@pytest.fixture
def device(library):
    """Return a function that changes the emulated GPU: capability, multiprocessors, shared_limit, descending, early."""

    def change(**properties):
        values = {**AMPERE, "descending": False, "early": False, **properties}
        library.emulated_device(*(values[name] for name in (*AMPERE, "descending", "early")))
        plan.forget()  # what was chosen for another device

    yield change
    change()


def file_with(text, files, root=ROOT):
    """Return the one file with a text, of patterns below csrc."""
    found = [path for name in files for path in (root / "csrc").glob(f"{name}.cuh") if text in path.read_text()]
    assert len(found) == 1, f"{len(found)} files have {text!r}"
    return found[0]


@pytest.fixture
def broken(tmp_path, monkeypatch, device):
    """Return a function that changes one place of files below csrc, which kernels are compiled from then on."""

    def change(files, before, after):
        for part in ("csrc", "tests/tools/emulator"):
            shutil.copytree(ROOT / part, tmp_path / part)
        path = file_with(before, files, tmp_path)
        path.write_text(path.read_text().replace(before, after, 1))
        monkeypatch.setattr(libraries, "source_folder", lambda: tmp_path / "csrc")

    def forget():
        sources.headers.cache_clear()
        launch._functions.clear()
        plan.forget()

    forget()
    yield change
    monkeypatch.undo()
    forget()
