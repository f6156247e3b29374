"""A step of several batches is the step of all of them at once."""

import pytest
import torch
from torch import nn

from crate_kernels.experiments.common.fit import Fit


def fitted(pieces, size):
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    xs = torch.randn(48, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    seen = []

    def loss(index):
        seen.append(index)
        return model(xs[size * index : size * (index + 1)]).square().mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fit = Fit("a", model, optimizer, loss, 4, 1, {}, clip=0.5, pieces=pieces)
    for _ in range(4):
        fit.step()
    return fit, seen


def test_pieces_make_one_step():
    whole, _ = fitted(1, 12)
    split, seen = fitted(3, 4)
    assert seen == list(range(12))
    assert split.losses == pytest.approx(whole.losses, rel=1e-12)
    assert len(split.losses) == 4
    for ours, theirs in zip(split.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
