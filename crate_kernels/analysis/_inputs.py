"""Input checks of the measurements, beyond ``checks``: trailing axes, subspaces, distortion."""

from __future__ import annotations

from torch import Tensor

from crate_kernels._core import checks


def trailing(op: str, name: str, value: object, layout: str) -> Tensor:
    """Require a floating tensor with the axes named after ``...`` in ``layout`` as its last ones, none empty."""
    checked = checks.tensor(op, name, value, None, layout)
    naxes = layout.count(",")
    if checked.dim() < naxes or 0 in checked.shape[checked.dim() - naxes :]:
        raise ValueError(f"{op}: {name} must be {layout}, got {tuple(checked.shape)}")
    return checked


def tokens_and_subspaces(op: str, z: object, subspaces: object) -> tuple[Tensor, Tensor]:
    """Require tokens (..., seqlen, dim) and bases (nsubspaces, dim, head_dim) on one device; return them in float64."""
    tokens = trailing(op, "z", z, "(..., seqlen, dim)")
    layout = f"(nsubspaces, dim, head_dim) with dim = {tokens.shape[-1]}"
    bases = checks.tensor(op, "subspaces", subspaces, 3, layout)
    if 0 in bases.shape or bases.shape[1] != tokens.shape[-1]:
        raise ValueError(f"{op}: subspaces must be {layout}, got {tuple(bases.shape)}")
    checks.same_device(op, "subspaces", bases, tokens, "z")
    return tokens.double(), bases.double()


def distortion(op: str, eps_squared: object) -> float:
    """Require a positive finite number."""
    value = checks.number(op, "eps_squared", eps_squared)
    if value <= 0:
        raise ValueError(f"{op}: eps_squared must be > 0, got {value}")
    return value
