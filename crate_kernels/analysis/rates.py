"""Terms of sparse rate reduction, ``R(Z) - Rc(Z | U) - lambda |Z|_0`` (CRATE, Yu et al.).

Rows are tokens. ``I + a Z^T Z = R^T R`` of the QR factorisation of ``[sqrt(a) Z; I]``, or that of ``Z^T`` where there
are fewer tokens than channels: ``1/2 logdet`` is the sum of ``log |R_ii|``. No Gram matrix is formed, which would
square the tokens and lose the identity beside large equal ones; R is never singular, so that gradients are finite also
where singular values are equal or 0. Everything is float64. (On a device without it, move the tokens to the CPU
first.)

All compile as one graph, where tokens that are not finite give NaN in place of an error, and take ``vmap``.

The papers write ``eps^2`` where the published code writes ``eps = 0.01``. The argument here is ``eps_squared``, the
divisor in both. Its default, 0.01, is that of the published code, so that the numbers can be compared with the
published figures (which also scale tokens to unit norm first); the papers' eps is then 0.1.
"""

from __future__ import annotations

import math

from torch import Tensor

from crate_kernels._core import checks

from ._classes import class_rate
from ._factors import factors
from ._inputs import distortion, features_and_labels, tokens_and_subspaces, trailing


def _rate(op: str, name: str, w: Tensor, eps_squared: float) -> Tensor:
    """Return 1/2 logdet(I + dim / (seqlen eps^2) w w^T) of float64 w (..., seqlen, dim)."""
    seqlen, dim = w.shape[-2:]
    *_, r = factors(op, name, w, math.sqrt(dim / (seqlen * eps_squared)))
    return r.diagonal(dim1=-2, dim2=-1).abs().log().sum(-1)


@checks.suggesting
def coding_rate(z: Tensor, *, eps_squared: float = 0.01) -> Tensor:
    """Measure how many nats code all tokens up to distortion eps.

    ``R(Z) = 1/2 logdet(I + dim / (seqlen eps^2) Z Z^T)`` (CRATE; the rate of MCR^2, Yu et al., 2020).

    Args:
        z: Tokens (..., seqlen, dim), any floating dtype.
        eps_squared: The papers' eps^2, by default 0.01, the published code's ``eps``.

    Returns:
        Float64 tensor (...), natural logarithm, differentiable.

    Raises:
        ValueError: z lacks the two axes, has an empty one or is not floating; eps_squared is not > 0.
        TypeError: z is not a Tensor or eps_squared is not a number.
        torch.linalg.LinAlgError: z is not finite.
    """
    z = trailing("coding_rate", "z", z, "(..., seqlen, dim)").double()
    return _rate("coding_rate", "z", z, distortion("coding_rate", eps_squared))


@checks.suggesting
def projected_coding_rate(w: Tensor, *, eps_squared: float = 0.01) -> Tensor:
    """Measure Rc of projected tokens, the output of MSSA's ``qkv``.

    ``Rc = 1/2 sum_k logdet(I + head_dim / (seqlen eps^2) w_k w_k^T)``, ``w_k = Z U_k`` (CRATE). One head's
    term is ``coding_rate(w)``. Published code scales projected tokens to unit norm first:
    ``projected_coding_rate(F.normalize(w, dim=-1))``.

    Args:
        w: Projected tokens (..., nheads, seqlen, head_dim), any floating dtype.
        eps_squared: The papers' eps^2, by default 0.01.

    Returns:
        Float64 tensor (...), natural logarithm, differentiable.

    Raises:
        ValueError: w lacks the three axes, has an empty one or is not floating; eps_squared is not > 0.
        TypeError: w is not a Tensor or eps_squared is not a number.
        torch.linalg.LinAlgError: w is not finite.
    """
    w = trailing("projected_coding_rate", "w", w, "(..., nheads, seqlen, head_dim)")
    return _rate("projected_coding_rate", "w", w.double(), distortion("projected_coding_rate", eps_squared)).sum(-1)


@checks.suggesting
def subspace_coding_rate(z: Tensor, subspaces: Tensor, *, eps_squared: float = 0.01) -> Tensor:
    """Measure how many nats code the tokens' projections on each subspace.

    ``Rc(Z | U) = 1/2 sum_k logdet(I + head_dim / (seqlen eps^2) (Z U_k) (Z U_k)^T)`` (CRATE).

    Args:
        z: Tokens (..., seqlen, dim), any floating dtype.
        subspaces: U (nsubspaces, dim, head_dim), any floating dtype, columns not necessarily orthonormal;
            ``projection_subspaces`` returns those of a layer.
        eps_squared: The papers' eps^2, by default 0.01.

    Returns:
        Float64 tensor (...), natural logarithm, differentiable.

    Raises:
        ValueError: A shape, dtype or device does not fit; eps_squared is not > 0.
        TypeError: z or subspaces is not a Tensor, or eps_squared is not a number.
        torch.linalg.LinAlgError: z or subspaces is not finite.
    """
    z, subspaces = tokens_and_subspaces("subspace_coding_rate", z, subspaces)
    eps_squared = distortion("subspace_coding_rate", eps_squared)
    return _rate("subspace_coding_rate", "z @ subspaces", z.unsqueeze(-3) @ subspaces, eps_squared).sum(-1)


@checks.suggesting
def rate_reduction(z: Tensor, subspaces: Tensor, *, eps_squared: float = 0.01) -> Tensor:
    """Measure the rate reduction of a representation: ``Delta R = R(Z) - Rc(Z | U)`` (CRATE; MCR^2).

    Args:
        z: Tokens (..., seqlen, dim), any floating dtype.
        subspaces: U (nsubspaces, dim, head_dim), any floating dtype.
        eps_squared: The papers' eps^2, by default 0.01, in both terms.

    Returns:
        Float64 tensor (...), natural logarithm, differentiable.

    Raises:
        ValueError: A shape, dtype or device does not fit; eps_squared is not > 0.
        TypeError: z or subspaces is not a Tensor, or eps_squared is not a number.
        torch.linalg.LinAlgError: z or subspaces is not finite.
    """
    z, subspaces = tokens_and_subspaces("rate_reduction", z, subspaces)
    eps_squared = distortion("rate_reduction", eps_squared)
    projected = _rate("rate_reduction", "z @ subspaces", z.unsqueeze(-3) @ subspaces, eps_squared)
    return _rate("rate_reduction", "z", z, eps_squared) - projected.sum(-1)


@checks.suggesting
def class_coding_rate(z: Tensor, labels: Tensor, *, eps_squared: float = 0.01) -> Tensor:
    """Measure how many nats code the samples of each class by themselves.

    ``Rc(Z | Pi) = sum_j m_j / (2 m) logdet(I + dim / (m_j eps^2) Z_j Z_j^T)`` over the m_j samples Z_j of each class
    (MCR^2, Yu et al., 2020, Eq. 5). All classes are factored at once.

    Args:
        z: Features (samples, dim), any floating dtype.
        labels: Class of each sample, (samples,), any integers, on z's device.
        eps_squared: The papers' eps^2, by default 0.01, the published code's ``eps``.

    Returns:
        Float64 tensor (), natural logarithm, differentiable in z.

    Raises:
        ValueError: A shape, dtype or device does not fit; eps_squared is not > 0.
        TypeError: z or labels is not a Tensor, or eps_squared is not a number.
        torch.linalg.LinAlgError: z is not finite.
    """
    z, labels = features_and_labels("class_coding_rate", z, labels)
    return class_rate("class_coding_rate", z, labels, distortion("class_coding_rate", eps_squared))


@checks.suggesting
def mcr2(z: Tensor, labels: Tensor, *, eps_squared: float = 0.01) -> Tensor:
    """Measure the rate reduction of features under a partition into classes, the objective of MCR^2.

    ``Delta R = R(Z) - Rc(Z | Pi)`` (MCR^2, Yu et al., 2020, Eq. 6): ``coding_rate(z) - class_coding_rate(z, labels)``.
    It is to be maximised; ``crate_kernels.nn.MCR2Loss`` is its negative. It grows with the features' norm, so that
    training needs a bound on it, such as ``F.normalize(z, dim=-1)``.

    Args:
        z: Features (samples, dim), any floating dtype.
        labels: Class of each sample, (samples,), any integers, on z's device.
        eps_squared: The papers' eps^2, by default 0.01, in both terms. The paper trains with eps^2 = 0.5.

    Returns:
        Float64 tensor (), natural logarithm, differentiable in z.

    Raises:
        ValueError: A shape, dtype or device does not fit; eps_squared is not > 0.
        TypeError: z or labels is not a Tensor, or eps_squared is not a number.
        torch.linalg.LinAlgError: z is not finite.
    """
    z, labels = features_and_labels("mcr2", z, labels)
    eps_squared = distortion("mcr2", eps_squared)
    return _rate("mcr2", "z", z, eps_squared) - class_rate("mcr2", z, labels, eps_squared)


@checks.suggesting
def rate_gradient(z: Tensor, subspaces: Tensor, *, eps_squared: float = 0.01) -> Tensor:
    """Return the gradient of Rc with respect to the tokens; MSSA is its first-order softmax form.

    ``a sum_k (I + a (Z U_k) (Z U_k)^T)^-1 Z U_k U_k^T``, ``a = head_dim / (seqlen eps^2)`` (CRATE Eq. 9).

    Args:
        z: Tokens (..., seqlen, dim), any floating dtype.
        subspaces: U (nsubspaces, dim, head_dim), any floating dtype.
        eps_squared: The papers' eps^2, by default 0.01.

    Returns:
        Float64 tensor (..., seqlen, dim), differentiable.

    Raises:
        ValueError: A shape, dtype or device does not fit; eps_squared is not > 0.
        TypeError: z or subspaces is not a Tensor, or eps_squared is not a number.
        torch.linalg.LinAlgError: z or subspaces is not finite.
    """
    z, subspaces = tokens_and_subspaces("rate_gradient", z, subspaces)
    w = z.unsqueeze(-3) @ subspaces
    seqlen, head_dim = w.shape[-2:]
    alpha = head_dim / (seqlen * distortion("rate_gradient", eps_squared))
    tokens, identity, _ = factors("rate_gradient", "z @ subspaces", w, math.sqrt(alpha))
    # Q = [sqrt(a) w; I] R^-1, so that w (R^T R)^-1 is the product of its parts.
    solved = tokens @ identity.mT if seqlen >= head_dim else identity @ tokens.mT
    return math.sqrt(alpha) * (solved @ subspaces.mT).sum(-3)


@checks.suggesting
def sparsity(z: Tensor) -> Tensor:
    """Measure the fraction of NONZEROS, ``|Z|_0 / (seqlen dim)`` (CRATE, the layer-wise sparsity plots).

    The published ``cal_sparsity`` returns the fraction of zeros and subtracts it from 1 when it plots.

    Args:
        z: Tokens (..., seqlen, dim), any floating dtype.

    Returns:
        Float64 tensor (...) in [0, 1].

    Raises:
        ValueError: z lacks the two axes, has an empty one or is not floating.
        TypeError: z is not a Tensor.
    """
    z = trailing("sparsity", "z", z, "(..., seqlen, dim)")
    return (z != 0).double().mean((-2, -1))
