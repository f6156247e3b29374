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


def features_and_labels(op: str, z: object, labels: object) -> tuple[Tensor, Tensor]:
    """Require features (samples, dim) and the integer class of each on one device; return the features in float64."""
    features = checks.tensor(op, "z", z, 2, "(samples, dim)")
    if 0 in features.shape:
        raise ValueError(f"{op}: z must be (samples, dim), got {tuple(features.shape)}")
    if not isinstance(labels, Tensor):
        raise TypeError(f"{op}: labels must be a Tensor, got {type(labels).__name__}")
    if labels.is_floating_point() or labels.is_complex() or labels.shape != features.shape[:1]:
        wanted = f"integers (samples,) = ({features.shape[0]},)"
        raise ValueError(f"{op}: labels must be {wanted}, got {labels.dtype} {tuple(labels.shape)}")
    checks.same_device(op, "labels", labels, features, "z")
    return features.double(), labels


def distortion(op: str, eps_squared: object) -> float:
    """Require a positive finite number."""
    value = checks.number(op, "eps_squared", eps_squared)
    if value <= 0:
        raise ValueError(f"{op}: eps_squared must be > 0, got {value}")
    return value
