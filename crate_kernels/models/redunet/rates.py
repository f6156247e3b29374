"""Maximal coding rate reduction, the objective that ReduNet's layers ascend."""

from __future__ import annotations

import torch
from torch import Tensor

from crate_kernels._core import checks
from crate_kernels.models.redunet.layers import covariance, frequencies_first


def mcr2(z: Tensor, y: Tensor, eps: float) -> tuple[float, float, float]:
    """Measure the rate reduction of samples under a partition into classes.

    ``R = 1/2 logdet(I + c sum_i z_i z_i^H)``, ``Rc = sum_j m_j/m 1/2 logdet(I + c_j sum_(class j) z_i z_i^H)``,
    ``c = channels / (m eps)``, averaged over frequencies if there are any (ReduNet, Eq. 8 and its
    code, whose eps is the book's eps^2).

    Args:
        z: (m, channels) vectors, or ``(m, channels, *size)`` frequencies of a unitary transform.
        y: (m,) labels; classes without a sample do not count.
        eps: distortion, > 0.

    Returns:
        ``(R - Rc, R, Rc)``, in nats, computed in double precision.
    """
    if checks.number("mcr2", "eps", eps) <= 0:
        raise ValueError(f"mcr2: eps must be > 0, got {eps}")
    rows = frequencies_first(z.to(torch.promote_types(z.dtype, torch.float64)))

    def rate(members: Tensor) -> float:
        count, channels = members.shape[-2:]
        gram = covariance(members) * (channels / (count * eps))
        identity = torch.eye(channels, dtype=gram.dtype, device=gram.device)
        factor = torch.linalg.cholesky(identity + gram).diagonal(dim1=-2, dim2=-1).real
        return float(factor.log().sum(-1).mean())

    expanded = rate(rows)
    compressed = 0.0
    for label in y.unique():
        members = rows[..., y == label, :]
        compressed += members.shape[-2] / rows.shape[-2] * rate(members)
    return expanded - compressed, expanded, compressed
