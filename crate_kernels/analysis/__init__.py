"""Measurements of a white-box model, layer by layer: rates, sparsity, subspaces, attention."""

from .attention import attention_maps
from .layerwise import LayerMeasurement, layerwise
from .rates import (
    class_coding_rate,
    coding_rate,
    mcr2,
    projected_coding_rate,
    rate_gradient,
    rate_reduction,
    sparsity,
    subspace_coding_rate,
)
from .subspaces import projection_subspaces, snr, subspace_coherence, subspace_gram

__all__ = [
    "LayerMeasurement",
    "attention_maps",
    "class_coding_rate",
    "coding_rate",
    "layerwise",
    "mcr2",
    "projected_coding_rate",
    "projection_subspaces",
    "rate_gradient",
    "rate_reduction",
    "snr",
    "sparsity",
    "subspace_coding_rate",
    "subspace_coherence",
    "subspace_gram",
]


def __dir__() -> list[str]:
    """List the public names."""
    return __all__
