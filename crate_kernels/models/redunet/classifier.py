"""Classification by the nearest subspace, the use of ReduNet's features."""

from __future__ import annotations

import torch
from torch import Tensor

from crate_kernels._core import checks
from crate_kernels.models.redunet.layers import check_labels


class NearestSubspace:
    """Assign a sample to the class whose principal subspace leaves the smallest residual.

    ``argmin_j |z - B_j B_j^T z|``, B_j the leading right singular vectors of class j's samples, which are
    not centred (ReduNet, Section 5, and its code).

    Args:
        n_components: dimension of the subspaces, or the number of singular vectors if smaller; default 10.

    Attributes:
        bases: (num_classes, features, n_components), zero-padded; None before ``fit``.
    """

    def __init__(self, n_components: int = 10) -> None:
        self.n_components = checks.integer("NearestSubspace", "n_components", n_components, minimum=1)
        self.bases: Tensor | None = None

    def fit(self, z: Tensor, y: Tensor) -> NearestSubspace:
        """Compute the subspaces of samples (m, ...) with labels (m,) in 0, 1, ...; return the classifier."""
        rows = z.flatten(1)
        labels = check_labels("NearestSubspace", y, len(rows), int(y.max()) + 1 if len(rows) else 0)
        self.bases = rows.new_zeros(int(labels.max()) + 1, rows.shape[1], self.n_components)
        for j, base in enumerate(self.bases):
            members = rows[labels == j]
            if not len(members):
                raise ValueError(f"NearestSubspace: y must hold every class, got none of {j}")
            right = torch.linalg.svd(members, full_matrices=False).Vh[: self.n_components].mT
            base[:, : right.shape[1]] = right
        return self

    def residuals(self, z: Tensor) -> Tensor:
        """Return the distance (m, num_classes) of samples (m, ...) from each subspace."""
        if self.bases is None:
            raise RuntimeError("NearestSubspace: fit must come before predict")
        rows = z.flatten(1)
        inside = torch.linalg.vector_norm(rows @ self.bases, dim=-1)  # (num_classes, m)
        return (rows.square().sum(1) - inside.square()).clamp(min=0).sqrt().mT

    def predict(self, z: Tensor) -> Tensor:
        """Return the class (m,) of samples (m, ...)."""
        return self.residuals(z).argmin(1)

    def score(self, z: Tensor, y: Tensor) -> float:
        """Return the share of samples (m, ...) whose predicted class is ``y`` (m,)."""
        return float((self.predict(z) == y).double().mean())
