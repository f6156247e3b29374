"""Random draws, each seeded by its purpose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def generator(*purpose: int) -> torch.Generator:
    """Return a separate generator per purpose (PyTorch's would keep 32 bits of a hand-mixed seed)."""
    return torch.Generator().manual_seed(int(np.random.SeedSequence(purpose).generate_state(1)[0]))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed PyTorch's own draws, as those of initial weights; the caller's random state is not touched."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
