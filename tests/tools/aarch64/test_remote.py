"""Calls of the CPU kernels in another process, here one of this machine: compiled as for aarch64, without PyTorch."""

import shlex
import shutil
import sys
from functools import partial

import pytest
import torch
from torch.utils.cpp_extension import get_cxx_compiler

from crate_kernels import SubspaceCache, ista, mssa, tssa
from crate_kernels._core import backends
from crate_kernels._native import extension, libraries
from tests.ops.common import outputs_and_gradients, randn
from tests.tools import natives
from tests.tools.aarch64 import remote

COMPILER = tuple(shlex.split(get_cxx_compiler()))
pytestmark = [
    pytest.mark.exhaustive,  # compiles the kernels once more
    pytest.mark.skipif(libraries.source_folder() is None, reason="needs the C++ sources: run from a checkout"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux"),
    pytest.mark.skipif(shutil.which(COMPILER[0]) is None, reason="needs a C++ compiler"),
    pytest.mark.skipif(extension.PATH is None, reason="needs python -m crate_kernels build"),
]


@pytest.fixture(scope="module")
def library():
    opened = remote.Remote(str(remote.build(COMPILER)))
    yield opened
    opened.close()


@pytest.fixture
def backend(library):
    natives.register("remote", library)
    yield "remote"
    backends.unregister("remote")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("op", ["mssa", "tssa", "ista"])
def test_the_numbers_are_the_extensions(op, dtype, backend, threads):
    threads(1)
    w, square = randn(2, 33, 3, 20, dtype=dtype).transpose(1, 2), randn(20, 20, dtype=dtype)
    call, inputs = {
        "mssa": (partial(mssa, causal=True, return_lse=True), (w,)),
        "tssa": (partial(tssa, causal=True), (w, torch.ones(3))),
        "ista": (ista, (w[0, 0], square)),
    }[op]
    mine, theirs = (outputs_and_gradients(partial(call, backend=name), *inputs) for name in (backend, "cpp"))
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_a_cache_of_this_process_is_written_by_the_other(backend):
    w, cache = randn(1, 2, 5, 8, dtype=torch.float32), SubspaceCache(1, 2, 8, 8)
    mssa(w, causal=True, cache=cache, backend=backend)
    torch.testing.assert_close(cache.data[:, :, :5], w, rtol=0, atol=0)
    assert cache.lengths.tolist() == [5]


def test_an_error_comes_back(library):
    w = torch.zeros(1, 1, 1, 300)
    with pytest.raises(RuntimeError, match="head_dim must be from 1 to 256, got 300"):
        library.mssa_fwd(w, None, None, 0, None, False, 1.0, 0.0, None, torch.empty_like(w), torch.zeros(1, 1, 1))


def test_a_process_that_ends_is_an_error():
    ended = remote.Remote("true")
    with pytest.raises((RuntimeError, BrokenPipeError)):
        ended.mssa_fwd()
    ended.close()
