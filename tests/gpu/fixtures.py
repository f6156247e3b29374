"""Where the tests of the GPU suite run: on a GPU, or interpreted and then on tiny shapes."""

import pytest
import torch

from crate_kernels._core import backends

DRY = backends._INTERPRETED
DEVICE = "cpu" if DRY else "cuda"


# By their ids the suite selects; the interpreter runs Triton's kernels only.
BACKENDS = [pytest.param("triton")] if DRY else [pytest.param("triton"), pytest.param("cpp", id="cpp-cuda")]


@pytest.fixture(params=BACKENDS)
def backend(request):
    """Return each backend that is a kernel on this device, in turn."""
    op = request.path.parent.name
    reason = backends.unavailable_reason(op, request.param, DEVICE)
    if reason is not None:
        pytest.skip(reason)
    return request.param


@pytest.fixture(autouse=True)
def exact_products():
    """Keep TF32 out of what the kernels are held against."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    yield
    torch.backends.cuda.matmul.fp32_precision = before
