"""The C++ extension without memory: an error that says so, and nothing half-done."""

from pathlib import Path

import pytest
import torch

from crate_kernels import mssa
from crate_kernels._core import backends
from crate_kernels._native import extension
from crate_kernels.ops.mssa.call import DecodeCall, MSSACall
from tests.ops.common import NEEDS_EXTENSION

pytestmark = NEEDS_EXTENSION


@pytest.fixture
def little_memory():
    """Let this process get another GiB of addresses at most."""
    resource = pytest.importorskip("resource", reason="needs a Unix, whose processes have limits of memory")
    statm = Path("/proc/self/statm")
    if not statm.exists():
        pytest.skip("needs Linux, which says what a process has")
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(statm.read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("count", [1, 2])
def test_out_of_memory_says_so_whichever_thread_finds_out(count, threads, little_memory):
    """2^24 tokens that are one in memory: the tensors fit into memory, and a thread's scratch does not."""
    extension.load()
    threads(count)
    one = torch.zeros(1, 1, 1, 8)
    w, out = one.expand(1, 2, 1 << 24, 8), one.clone().expand(1, 2, 1 << 24, 8)
    # A RuntimeError from PyTorch 2.15 on.
    with pytest.raises((MemoryError, RuntimeError), match="bad_alloc"):
        torch.ops.crate_kernels_C.mssa_fwd(w, *MSSACall(), out, torch.zeros(1, 2, 1 << 24))


def test_out_of_memory_for_the_parts_of_a_gradient_says_so(threads, little_memory):
    extension.load()
    threads(2)
    one = torch.zeros(1, 1, 1, 8)
    w, dw = one.expand(1, 1, 1 << 24, 8), one.clone().expand(1, 1, 1 << 24, 8)
    with pytest.raises((MemoryError, RuntimeError), match="bad_alloc"):
        torch.ops.crate_kernels_C.mssa_bwd(w, None, w, w, torch.zeros(1, 1, 1 << 24), *MSSACall(), dw)


def test_out_of_memory_leaves_a_cache_as_long_as_it_was(threads, little_memory):
    """2^20 new tokens, of whose parts the results take 2 GiB."""
    extension.load()
    threads(2)
    one = torch.zeros(1, 1, 1, 256)
    w, out = one.expand(1, 1, 1 << 20, 256), one.clone().expand(1, 1, 1 << 20, 256)
    data, lengths = torch.zeros(1, 1, 1024, 256), torch.tensor([7], dtype=torch.int32)
    with pytest.raises((MemoryError, RuntimeError), match="bad_alloc"):
        torch.ops.crate_kernels_C.mssa_decode(
            w, data, lengths, *DecodeCall(None, 1024, True, 1.0, False), out, torch.zeros(1)
        )
    assert lengths.item() == 7


@pytest.mark.parametrize("error", [MemoryError, RuntimeError])
@pytest.mark.parametrize("function", ["forward", "backward"])
def test_out_of_memory_names_the_operator(function, error, monkeypatch):
    def fail(*args):
        raise error("std::bad_alloc")

    monkeypatch.setattr(backends.kernel("mssa", "cpp"), function, fail)
    with pytest.raises(MemoryError, match=rf"^mssa: backend='cpp' ran out of memory for its workspace in {function}"):
        mssa(torch.randn(1, 2, 5, 8, requires_grad=True), backend="cpp").sum().backward()
