"""The options of each call, in one list: schemas are made from these records, and every backend takes them."""

from __future__ import annotations

from typing import NamedTuple

import torch


class ISTACall(NamedTuple):
    """The options of ``ista``."""

    step_size: float  # of the gradient descent
    lambd: float  # weight of the sparsity penalty
    nonnegative: bool  # threshold by ReLU, else by the two-sided soft threshold
    compute: torch.dtype  # dtype of the products

    @property
    def threshold(self) -> float:
        """The threshold of the step."""
        return self.step_size * self.lambd


class OvercompleteCall(NamedTuple):
    """The options of ``ista_overcomplete``."""

    step_size: float  # of the gradient descent
    lambd: float  # weight of the sparsity penalty
    steps: int  # number of proximal steps

    @property
    def threshold(self) -> float:
        """The threshold of each step."""
        return self.step_size * self.lambd

    @property
    def nonnegative(self) -> bool:
        """True: codes are thresholded by ReLU."""
        return True
