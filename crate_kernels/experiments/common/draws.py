"""Random generators, each seeded by its purpose."""

from __future__ import annotations

import numpy as np
import torch


def generator(*purpose: int) -> torch.Generator:
    """Return a separate generator per purpose (PyTorch's would keep 32 bits of a hand-mixed seed)."""
    return torch.Generator().manual_seed(int(np.random.SeedSequence(purpose).generate_state(1)[0]))
