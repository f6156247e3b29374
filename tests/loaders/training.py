"""A training with every part that a checkpoint holds."""

import torch
from torch import nn

from crate_kernels.experiments.common.fit import Fit


def training():
    """Return a training of a few weights, not begun."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    x = torch.randn(8, 3)
    return Fit(
        "small",
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        lambda number: model(x).square().mean(),
        total=4,
        warmup=1,
        identity={"seed": 0, "sizes": [3, 4, 1]},
        watch=lambda: 0.5,
        watch_at={1, 2},
    )
