"""Fixtures of the GPU suite, whose tests run on a GPU, or interpreted on tiny shapes."""

import pytest
import torch

from crate_kernels._core import backends

DRY = backends._INTERPRETED
DEVICE = "cpu" if DRY else "cuda"


# The suite selects by these ids. The interpreter runs only Triton's kernels.
BACKENDS = [pytest.param("triton")] if DRY else [pytest.param("triton"), pytest.param("cpp", id="cpp-cuda")]


@pytest.fixture(params=BACKENDS)
def backend(request):
    """Return each backend that is a kernel on this device."""
    op = request.path.parent.name
    reason = backends.unavailable_reason(op, request.param, torch.device(DEVICE))
    if reason is not None:
        pytest.skip(reason)
    return request.param


@pytest.fixture(autouse=True)
def exact_products():
    """Keep TF32 out of the results that kernels are compared with."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    yield
    torch.backends.cuda.matmul.fp32_precision = before
