"""Where the tests of the GPU suite run: on a GPU, or interpreted and then on tiny shapes."""

import pytest
import torch

from crate_kernels import _backend

DRY = _backend._INTERPRETED
DEVICE = "cpu" if DRY else "cuda"


def pytest_ignore_collect(collection_path, config):
    """Collect nothing where neither a GPU nor the interpreter can run a kernel."""
    return True if not DRY and not torch.cuda.is_available() else None


@pytest.fixture(autouse=True)
def exact_products():
    """Keep TF32 out of what the kernels are held against."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    yield
    torch.backends.cuda.matmul.fp32_precision = before
