"""The CUDA kernels on CPU tensors: the backend "emulated", which is backend "cpp" of a GPU under the emulator."""

import shutil
import sys

import pytest
import torch
from torch.utils.cpp_extension import get_cxx_compiler

from crate_kernels import _backend, _build, _extension
from tests.cuda import emulated
from tests.ops.conftest import fixed_seed, poisoned_memory  # noqa: F401  # they hold here too

AMPERE = {"capability": 80, "multiprocessors": 4, "shared_limit": 163 * 1024}


@pytest.fixture(scope="session")
def library():
    """Load the emulated library and return ``torch.ops.crate_kernels_C``."""
    folder = _build.source_folder()
    if folder is None:
        pytest.skip("the CUDA sources are not here")
    if not sys.platform.startswith("linux"):
        pytest.skip("the emulator needs Linux")
    if shutil.which(get_cxx_compiler().split()[0]) is None:
        pytest.skip("no C++ compiler: install g++ or set CXX")
    if _extension.CUDA_PATHS:
        pytest.skip("the CUDA library is installed and has the same operators: make test-gpu runs it")
    path = emulated.build(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_extension, "CUDA_PATHS", (path,))
        _extension.load_cuda()
        yield torch.ops.crate_kernels_C


@pytest.fixture(scope="session")
def backend(library):
    """Register the backend "emulated" and return its name."""
    floats = _backend._BACKENDS["cpp"].dtypes
    _backend.register(_backend.Backend("emulated", "crate_kernels.ops.{op}.cuda", ("cpu",), floats))
    yield "emulated"
    _backend.unregister("emulated")


@pytest.fixture
def device(library):
    """Return a function that changes the emulated GPU: capability, multiprocessors, shared_limit, descending."""

    def change(**properties):
        values = {**AMPERE, "descending": False, **properties}
        library.emulated_device(*(values[name] for name in (*AMPERE, "descending")))

    yield change
    change()
