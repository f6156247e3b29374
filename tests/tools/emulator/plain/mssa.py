"""A backend of mssa's kernels for GPUs without tensor cores, on any emulated GPU."""

import torch

from tests.tools.emulator import emulated

_TURING = 75
native = emulated.on_cuda("mssa")
decode = native.decode


def _without_tensor_cores(function, *args):
    change = torch.ops.crate_kernels_C.emulated_capability
    former = change(_TURING)
    try:
        return function(*args)
    finally:
        change(former)


def forward(w, call):
    return _without_tensor_cores(native.forward, w, call)


def backward(dout, dlse, w, out, lse, call):
    return _without_tensor_cores(native.backward, dout, dlse, w, out, lse, call)
