"""Kernels use all of the shared memory that a launch asks for: with 16 bytes less, the emulator sees them leave it.

Those whose layouts are structs of the device code are in ``tests/cuda/test_shared.py``.
"""

import pytest
import torch

import crate_kernels
from crate_kernels._cuda import launch
from tests.ops.common import randn


def attend(backend, *shape, dtype=torch.bfloat16):
    w = randn(*shape, dtype=dtype).requires_grad_()
    crate_kernels.mssa(w, backend=backend).sum().backward()


def decode(backend, new):
    cache = crate_kernels.SubspaceCache(1, 2, 40, 64, dtype=torch.float32)
    for tokens in (32, new):
        crate_kernels.mssa(randn(1, 2, tokens, 64, dtype=torch.float32), cache=cache, causal=True, backend=backend)


def shrink(backend, dim):
    x, weight = randn(2 * dim, dim, dtype=torch.float32), randn(dim, dim, dtype=torch.float32)
    crate_kernels.ista(
        x.requires_grad_(), weight.requires_grad_(), step_size=0.1, lambd=0.1, backend=backend
    ).sum().backward()


def add_up(backend, seqlen):
    w, temp = randn(2, 3, seqlen, 32, dtype=torch.float32), torch.ones(3, 1)
    crate_kernels.tssa(w.requires_grad_(), temp, causal=True, backend=backend).sum().backward()


# What runs the kernel, and its name.
CALLS = {
    "forward": ("mma_forward_kernel", attend, (1, 1, 256, 64)),
    "shift": ("mma_shift_kernel", attend, (1, 1, 256, 64)),
    "backward": ("mma_backward_kernel", attend, (1, 1, 256, 64)),
    "pairs": ("mma_pairs_kernel", attend, (8, 12, 256, 64)),
    "decode": ("mssa_decode_kernel", decode, (1,)),
    "decode-several": ("mssa_decode_kernel", decode, (4,)),
    "scan": ("tssa_scan_chunks_kernel", add_up, (200,)),
    "dmoment": ("dmoment", add_up, (200,)),
    "symmetrize": ("ista_symmetrize_kernel", shrink, (64,)),
}


@pytest.mark.usefixtures("unrepeated")
@pytest.mark.parametrize(("kernel", "run", "sizes"), CALLS.values(), ids=CALLS)
def test_a_launch_asks_for_no_more_shared_memory_than_its_kernel_uses(kernel, run, sizes, backend, monkeypatch):
    launched, real = [], launch.run

    def tight(found, shape, *rest):
        if kernel in found.name:
            launched.append(found.name)
            shape = shape._replace(shared_bytes=shape.shared_bytes - 16)
        return real(found, shape, *rest)

    monkeypatch.setattr(launch, "run", tight)
    with pytest.raises(RuntimeError, match="emulator"):
        run(backend, *sizes)
    assert launched
