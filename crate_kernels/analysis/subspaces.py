"""Measurements of a layer's learned subspaces, and of how well tokens fit them."""

from __future__ import annotations

import torch
from torch import Tensor

from crate_kernels._core import checks

from ._inputs import tokens_and_subspaces


def _require_weight(op: str, weight: object) -> Tensor:
    checked = checks.tensor(op, "weight", weight, 2, "(nheads * head_dim, dim)")
    if 0 in checked.shape:
        raise ValueError(f"{op}: weight must be (nheads * head_dim, dim), got {tuple(checked.shape)}")
    return checked


def _head_subspaces(op: str, weight: object, nheads: object) -> Tensor:
    checked = _require_weight(op, weight)
    count = checks.integer(op, "nheads", nheads)
    if count < 1 or checked.shape[0] % count:
        raise ValueError(f"{op}: nheads must divide weight's {checked.shape[0]} rows, got {count}")
    return checked.unflatten(0, (count, -1)).mT


@checks.suggesting
def projection_subspaces(weight: Tensor, nheads: int) -> Tensor:
    """View a projection weight as the subspaces of its heads: ``linear(z, weight)`` is ``z U_k``, head-major.

    Args:
        weight: MSSA's ``qkv.weight`` (nheads * head_dim, dim), any floating dtype.
        nheads: Number of heads.

    Returns:
        U (nheads, dim, head_dim), a view. Columns are as learned; ``torch.linalg.qr(U).Q`` is orthonormal.

    Raises:
        ValueError: weight is empty, not a matrix or not floating; nheads does not divide its rows.
        TypeError: weight is not a Tensor or nheads is not an int.
    """
    return _head_subspaces("projection_subspaces", weight, nheads)


@checks.suggesting
def subspace_coherence(weight: Tensor, nheads: int) -> Tensor:
    """Measure how much the heads' subspaces overlap, independent of the basis that each head has learned.

    ``|Q_i^T Q_j|_F^2 / min(rank_i, rank_j)`` with Q_k an orthonormal basis of the row space of head k: the
    mean squared cosine of the principal angles. 1 on the diagonal and where one subspace contains the
    other, 0 where they are orthogonal, ``rank / dim`` for two random subspaces of one rank.
    CRATE asks for incoherent subspaces and plots ``subspace_gram``.

    Args:
        weight: MSSA's ``qkv.weight`` (nheads * head_dim, dim), any floating dtype.
        nheads: Number of heads.

    Returns:
        Symmetric float64 tensor (nheads, nheads). Directions below ``torch.linalg.matrix_rank``'s tolerance
        in the dtype of weight do not count, so a zero head has coherence 0, also with itself.

    Raises:
        ValueError: weight is empty, not a matrix or not floating; nheads does not divide its rows.
        TypeError: weight is not a Tensor or nheads is not an int.
    """
    subspaces = _head_subspaces("subspace_coherence", weight, nheads)
    tol = max(subspaces.shape[1:]) * torch.finfo(subspaces.dtype).eps
    bases, singular, _ = torch.linalg.svd(subspaces.double(), full_matrices=False)
    present = (singular > tol * singular[:, :1]).to(bases.dtype)
    bases, ranks = bases * present.unsqueeze(1), present.sum(-1)
    overlap = torch.einsum("idp,jdq->ijpq", bases, bases).square().sum((-2, -1))
    return overlap / torch.minimum(ranks[:, None], ranks).clamp(min=1)


@checks.suggesting
def subspace_gram(weight: Tensor) -> Tensor:
    """Return the matrix that the papers plot: ``|[U_1 .. U_K]^T [U_1 .. U_K]|``, columns scaled to unit norm.

    Entry (i, j) is the absolute cosine between two learned directions (CRATE, the figure of
    ``[U_1 .. U_K]^T [U_1 .. U_K]`` per layer); blocks of head_dim are heads. A block also shows
    how far a head's own basis is from orthogonal, which ``subspace_coherence`` does not measure.

    Args:
        weight: MSSA's ``qkv.weight`` (nheads * head_dim, dim), any floating dtype; a zero row gives zeros.

    Returns:
        Symmetric float64 tensor (nheads * head_dim, nheads * head_dim) in [0, 1].

    Raises:
        ValueError: weight is empty, not a matrix or not floating.
        TypeError: weight is not a Tensor.
    """
    unit = torch.nn.functional.normalize(_require_weight("subspace_gram", weight).double(), dim=-1)
    return (unit @ unit.mT).abs()


@checks.suggesting
def snr(z: Tensor, subspaces: Tensor, labels: Tensor | None = None) -> Tensor:
    """Measure the signal-to-noise ratio of tokens against the subspaces they belong to.

    ``SNR(Z_k) = |Z_k U_k U_k^T|_F / |Z_k (I - U_k U_k^T)|_F`` (AoT, Wang et al., 2025), Z_k the tokens of
    cluster k. AoT's Theorem 3.1: with phi = threshold tau and scale 1 it grows by 1 + eta tau per layer.

    Args:
        z: Tokens (..., seqlen, dim), any floating dtype.
        subspaces: U (nsubspaces, dim, head_dim), any floating dtype, orthonormal columns to the square root
            of its dtype's precision.
        labels: Cluster of each token, integers broadcastable to (..., seqlen), on z's device; a token with
            a label outside 0..nsubspaces-1 is not counted. By default None: every token counts in every
            subspace, so pass the tokens of one cluster.

    Returns:
        Float64 tensor (..., nsubspaces), differentiable; inf without noise, nan without tokens.

    Raises:
        ValueError: A shape, dtype or device does not fit, or columns are not orthonormal.
        TypeError: z, subspaces or labels is not a Tensor.
    """
    original = subspaces
    z, subspaces = tokens_and_subspaces("snr", z, subspaces)
    identity = torch.eye(subspaces.shape[-1], dtype=z.dtype, device=z.device)
    error = float((subspaces.mT @ subspaces - identity).detach().abs().max())
    if not error <= torch.finfo(original.dtype).eps ** 0.5:
        raise ValueError(
            "snr: subspaces must have orthonormal columns (torch.linalg.qr(subspaces).Q has), "
            f"got U^T U - I = {error:.1e}"
        )
    w = z.unsqueeze(-3) @ subspaces
    signal = w.square().sum(-1)
    noise = (z.unsqueeze(-3) - w @ subspaces.mT).square().sum(-1)
    if labels is not None:
        member = _membership(labels, z, subspaces.shape[0])
        signal, noise = signal.where(member, 0), noise.where(member, 0)
    return (signal.sum(-1) / noise.sum(-1)).sqrt()


def _membership(labels: object, z: Tensor, nsubspaces: int) -> Tensor:
    """Turn labels (..., seqlen) into a bool mask (..., nsubspaces, seqlen)."""
    if not isinstance(labels, Tensor):
        raise TypeError(f"snr: labels must be a Tensor, got {type(labels).__name__}")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(f"snr: labels must have an integer dtype, got {labels.dtype}")
    checks.same_device("snr", "labels", labels, z, "z")
    try:
        labels = labels.expand(z.shape[:-1])
    except RuntimeError:
        expected = tuple(z.shape[:-1])
        raise ValueError(
            f"snr: labels must broadcast to (..., seqlen) = {expected}, got {tuple(labels.shape)}"
        ) from None
    return labels.unsqueeze(-2) == torch.arange(nsubspaces, device=z.device).unsqueeze(-1)
