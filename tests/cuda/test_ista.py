"""ista's CUDA kernels under the emulator, within the budget of every backend."""

import torch

from crate_kernels import ista


def test_forward(backend):
    x, w = torch.randn(40, 17), torch.randn(17, 17) / 4
    torch.testing.assert_close(ista(x, w, backend=backend), ista(x, w, backend="reference"))
