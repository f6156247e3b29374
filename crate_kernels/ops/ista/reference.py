"""Sparse-coding steps as the published code has them: the oracle of every other backend.

With tokens as the rows of X and D = weight, one ISTA step of min_Z |X - Z D^T|^2 / 2 + lambda |Z|_1,
started at Z = X (CRATE's ISTA block)::

    Y = relu(X + eta (X D - (X D^T) D) - eta lambda)

three products of (tokens, dim, dim). The same with K = D - D^T D is one product,
Y = relu(X + eta X K - eta lambda), whose backward, with G' = G * (Y > 0), is::

    dX = G' + eta G' K^T,   dK = eta X^T G',   dD = dK - D (dK + dK^T)

and with R = X - X D^T it is two, for few tokens::

    Y = relu(X + eta R D - eta lambda)
    dR = eta G' D^T,   dX = G' + dR - dR D,   dD = eta R^T G' - dR^T X

The overcomplete form (CRATE-alpha) starts at Z_0 = 0 and returns the decoded Z_T D1^T::

    R_t = X - Z_t D^T,   Z_{t+1} = relu(Z_t + eta R_t D - eta lambda)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from crate_kernels.ops.ista.call import ISTACall, OvercompleteCall


def forward(x: Tensor, weight: Tensor, call: ISTACall) -> Tensor:
    """Return one proximal step, by the three published products."""
    reconstruction = F.linear(F.linear(x, weight), weight.t())
    update = x + call.step_size * (F.linear(x, weight.t()) - reconstruction)
    if call.nonnegative:
        return F.relu(update - call.threshold)
    return torch.sign(update) * F.relu(update.abs() - call.threshold)


def forward_overcomplete(x: Tensor, weight: Tensor, decoder: Tensor | None, call: OvercompleteCall) -> Tensor:
    """Return the decoded code after ``call.steps`` proximal steps from zero."""
    code = x.new_zeros(*x.shape[:-1], weight.shape[1])
    for _ in range(call.steps):
        residual = x - F.linear(code, weight)
        code = F.relu(code + call.step_size * F.linear(residual, weight.t()) - call.threshold)
    return F.linear(code, weight if decoder is None else decoder)
