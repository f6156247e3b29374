"""The other product of linear layers, taken where a test can see it."""

import pytest
import torch

from crate_kernels._core import products


@pytest.fixture
def taken(monkeypatch):
    """Take the other product at any size, on any processor; list the calls of it."""
    calls = []
    original = torch.ops.mkldnn._linear_pointwise.default

    def product(*args):
        calls.append(args)
        return original(*args)

    monkeypatch.setattr(products, "_library", product)
    monkeypatch.setattr(products, "_MIN_WORK", 1)
    return calls
