"""The mixture, the network, and the signal-to-noise ratio after each layer."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from crate_kernels import analysis
from crate_kernels.experiments.denoise.settings import Mixture
from crate_kernels.nn import MSSA


def draw(mixture: Mixture, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw tokens (tokens, dim), orthonormal subspaces (clusters, dim, rank) orthogonal to each other, and labels.

    ``z_i = U_k a_i + sum_(j != k) U_j e_ij``, a ~ N(0, I), e ~ N(0, noise^2 I): AoT, Definition 2.1. Float64.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (mixture.dim, mixture.clusters * mixture.rank)
    basis = torch.linalg.qr(torch.randn(shape, generator=generator, dtype=torch.float64)).Q
    subspaces = basis.view(mixture.dim, mixture.clusters, mixture.rank).transpose(0, 1).contiguous()
    labels = torch.arange(mixture.tokens) * mixture.clusters // mixture.tokens
    codes = torch.randn(mixture.tokens, mixture.clusters, mixture.rank, generator=generator, dtype=torch.float64)
    own = labels.unsqueeze(1) == torch.arange(mixture.clusters)
    codes = codes * torch.where(own, 1.0, mixture.noise).unsqueeze(-1)
    return torch.einsum("nkp,kdp->nd", codes, subspaces), subspaces, labels


def layer(mixture: Mixture, subspaces: Tensor, backend: str | None) -> MSSA:
    """Build the operator of a layer: ``sum_k U_k U_k^T Z phi(..)``, with known subspaces."""
    phi = "softmax" if mixture.threshold is None else "threshold"
    module = MSSA(
        mixture.dim,
        mixture.clusters,
        mixture.rank,
        tied=True,
        scale=1.0 if mixture.form == "unscaled" else mixture.rank**-0.5,
        phi=phi,
        threshold=mixture.threshold,
        backend=backend,
    )
    module = module.to(subspaces.device, subspaces.dtype)  # first: a copy into float32 would round
    with torch.no_grad():
        module.qkv.weight.copy_(subspaces.mT.flatten(0, 1))
    return module


@torch.no_grad()
def denoise(
    mixture: Mixture, seed: int, device: torch.device, backend: str | None, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Return the SNR (layers + 1, clusters) before the first layer and after each."""
    tokens, subspaces, labels = draw(mixture, seed)
    operator = layer(mixture, subspaces.to(device), backend).to(dtype)
    z = tokens.to(device, dtype)
    found = [z]
    for _ in range(mixture.layers):
        seen = F.layer_norm(z, (mixture.dim,)) if mixture.form == "normalised" else z
        z = z + mixture.eta * operator(seen.unsqueeze(0))[0]
        found.append(z)
    return torch.stack([analysis.snr(z.cpu().double(), subspaces, labels) for z in found])


def departure(mixture: Mixture, ratios: Tensor) -> Tensor:
    """Return the largest relative error of each layer's SNR against Theorem 3.1's ``SNR_0 (1 + eta tau)^l``.

    NaN stays NaN here and in the maxima of a tensor; Python's ``max`` would pass over it.
    """
    assert mixture.threshold is not None
    growth = (1 + mixture.eta * mixture.threshold) ** torch.arange(len(ratios), dtype=torch.float64)
    return (ratios / (ratios[0] * growth.unsqueeze(1)) - 1).abs().amax(1)
