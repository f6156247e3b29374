"""What the tests of the demo share: a tiny run and exact comparison."""

import torch

from crate_kernels.experiments.demo.settings import DemoSettings

CPU = torch.device("cpu")
TINY = DemoSettings(epochs=2, batch_size=400, dim=16, depth=2, heads=2, dim_head=8, warmup=2)


def weights(training):
    return {name: value.clone() for name, value in training.model.state_dict().items()}


def assert_equal(left, right):
    torch.testing.assert_close(left, right, rtol=0, atol=0)
