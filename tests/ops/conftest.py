"""Uninitialised memory is NaN in every operator test, so that an output nobody wrote is seen."""

import pytest
import torch

from crate_kernels import _backend


def _poisoned(allocate):
    """Wrap an allocator so that what it returns is NaN wherever the dtype has one."""

    def allocate_nan(*args, **kwargs):
        tensor = allocate(*args, **kwargs)
        if tensor.is_floating_point():
            tensor.detach().fill_(torch.nan)
        return tensor

    return allocate_nan


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """Patch the allocators that Python code calls: composite's and the kernels' outputs and scratch space.

    PyTorch can do so below Python too, but only by forbidding what has no deterministic form on a GPU.
    """
    for name in ("empty", "empty_like", "empty_strided", "empty_permuted"):
        monkeypatch.setattr(torch, name, _poisoned(getattr(torch, name)))
    for name in ("new_empty", "new_empty_strided"):
        monkeypatch.setattr(torch.Tensor, name, _poisoned(getattr(torch.Tensor, name)))


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def plain_backend():
    """Put plain PyTorch behind the op of mssa, whose composite stays outside it."""
    _backend.register(_backend.Backend("plain", "tests.backends.plain.{op}"))
    yield
    _backend.unregister("plain")
