"""The CUDA kernels on CPU tensors: backend "emulated" is a GPU's backend "cpp" under the emulator."""

import pytest
import torch

from crate_kernels._core import backends, plan
from tests.tools.emulator import emulated

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
