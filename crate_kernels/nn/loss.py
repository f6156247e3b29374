"""The objective of MCR^2 as a loss."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor, nn

from crate_kernels._core import checks
from crate_kernels.analysis import mcr2


class MCR2Loss(nn.Module):
    """Maximal coding rate reduction of a batch, negated: ``Rc(Z | Pi) - R(Z)`` (Yu et al. 2020, arXiv 2006.08558).

    ``crate_kernels.analysis.mcr2`` has the formula. It grows with the features' norm: normalise them first.

    Args:
        eps_squared: the paper's eps^2; default 0.5, with which it trains. The published code calls it ``eps``.
    """

    @checks.suggesting
    def __init__(self, eps_squared: float = 0.5) -> None:
        super().__init__()
        self.eps_squared = checks.number("MCR2Loss", "eps_squared", eps_squared)
        if self.eps_squared <= 0:
            raise ValueError(f"MCR2Loss: eps_squared must be > 0, got {eps_squared}")

    @checks.closed
    def forward(self, z: Tensor, labels: Tensor, **unknown: NoReturn) -> Tensor:
        """Return the loss of features (samples, dim) with integer labels (samples,).

        It is computed in float64, and returned in z's dtype or, if that has 16 bits, in float32.
        """
        if isinstance(unknown, dict) and unknown:
            checks.no_keyword(MCR2Loss.forward, unknown)
        reduction = mcr2(z, labels, eps_squared=self.eps_squared)
        return -reduction.to(torch.promote_types(z.dtype, torch.float32))

    def extra_repr(self) -> str:
        """Return the argument, for ``print``."""
        return f"eps_squared={self.eps_squared}"
