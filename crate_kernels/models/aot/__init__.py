"""AoT: attention-only transformers by unrolled subspace denoising (Wang et al. 2025, arXiv 2506.03790)."""

from .language import AoTLM, AoTLMConfig
from .layers import Layer, start_as_derived
from .mhsa import MHSA, KeyValueCache
from .regression import AoTRegression, AoTRegressionConfig
from .vision import AoTVision, AoTVisionConfig

__all__ = [
    "MHSA",
    "AoTLM",
    "AoTLMConfig",
    "AoTRegression",
    "AoTRegressionConfig",
    "AoTVision",
    "AoTVisionConfig",
    "KeyValueCache",
    "Layer",
    "start_as_derived",
]
