"""What the tests of mssa's kernels for Hopper GPUs under the emulator share."""

from contextlib import ExitStack, contextmanager

import pytest
import torch

from crate_kernels import mssa
from crate_kernels._triton import table

HOPPER = {"capability": 90, "shared_limit": 227 * 1024, "multiprocessors": 1}  # a block has several heads
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


def run_and_check(case):
    """Run the backward alone, which has to take every head."""
    dw, left = case.run()
    assert not any(left), f"heads left: {left}"
    case.check(dw)


def run_and_check_forward(case):
    """Run the forward alone, which has to take every head."""
    out, lse, left = case.run_forward()
    assert not any(left), f"heads left: {left}"
    case.check_forward(out, lse)


def both_ways(case, backend):
    """Return out, lse and the gradient of a case by ``crate_kernels.mssa``."""
    w = case.w.detach().requires_grad_()
    out, lse = mssa(w, return_lse=True, backend=backend, **case.options)
    outputs, gradients = [out], [case.dout]
    if case.dlse is not None:
        outputs, gradients = [out, lse], [case.dout, case.dlse]
    (dw,) = torch.autograd.grad(outputs, w, gradients)
    return out.detach(), lse.detach(), dw


@contextmanager
def taking(kind):
    """Have the kernels of a kind of calls taken in both directions, as tuning may find."""
    with ExitStack() as stack:
        for launch_table, config in kind.forced.items():
            stack.enter_context(table.forced(launch_table, config))
        yield
