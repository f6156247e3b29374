"""NaN in fresh memory, so that an output that is not written is seen."""

from contextlib import nullcontext

import torch

from crate_kernels._core import recording

ALLOCATORS = {
    torch: ("empty", "empty_like", "empty_strided", "empty_permuted"),
    torch.Tensor: ("new_empty", "new_empty_strided"),
}


def fill(patch):
    """Let the allocators that Python code calls fill tensors of floating-point dtype with NaN; undone with ``patch``.

    PyTorch can do so below Python too, but then forbids operations without a deterministic form on a GPU.
    """
    # PyTorch lists its allocators once, for contexts of a device: ours would stay in the list, in their place.
    with torch.device("cpu"):
        torch.empty(0)
    for owner, names in ALLOCATORS.items():
        for name in names:
            patch.setattr(owner, name, _filled(getattr(owner, name)))


def _filled(allocate):
    def allocate_nan(*args, **kwargs):
        tensor = allocate(*args, **kwargs)
        if tensor.is_floating_point():
            with nullcontext() if recording.recorder() is None else recording.unseen():
                tensor.detach().fill_(torch.nan)
        return tensor

    return allocate_nan
