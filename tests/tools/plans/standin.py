"""What launches plans where no test says otherwise: CUDA's driver, or one that emulates it."""

import ctypes

import torch

from crate_kernels._core import plan

_resting = ()


def rest_on(*functions):
    """Let plans launch by these functions of the driver whenever no test drives them otherwise."""
    global _resting
    _resting = functions
    drive(*_resting)


def drive(*functions):
    """Let plans launch by C functions, and drop the plans that there are; by CUDA's, where none is passed.

    They are those of ``Driver`` in csrc/common/plan_driver.h, in its order; None for one that is missing.
    """
    if not plan.available():
        return
    plan._load()
    torch.ops.crate_kernels_C.plan_drive_by([address_of(function) for function in functions])
    plan.forget()


def rest():
    """Let plans launch as they do where no test says otherwise."""
    drive(*_resting)


def address_of(function):
    """Return the address of a ctypes function; 0 for None."""
    return 0 if function is None else ctypes.cast(function, ctypes.c_void_p).value
