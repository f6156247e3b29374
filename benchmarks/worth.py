"""The benchmarks in order of worth: those of a quarter of an hour of a GPU, and those of a CPU's default run."""

from __future__ import annotations

_LONG = tuple(f"mssa-{name}-cuda" for name in ("long-16k-d64", "lm-4096-d128", "long-16k-d128-causal"))
_MODELS = (
    "mssa-vit-197-d64-cuda",
    "mssa-lm-1024-d64-causal-cuda",
    "tssa-vit-196-cuda",
    "tssa-lm-1024-causal-cuda",
    "ista-crate-b-cuda",
    "ista-lm-base-cuda",
    "ista_overcomplete-alpha-b-cuda",
)
_MORE = (
    "mssa-lm-4096-d64-cuda",
    "mssa-vit-785-d128-cuda",
    "mssa-vit-785-d64-cuda",
    "mssa-vit-197-d48-cuda",
    "mssa-lm-4096-d64-causal-cuda",
    "mssa-lm-4096-d128-causal-cuda",
    "tssa-vit-784-cuda",
    "tssa-long-4096-cuda",
    "tssa-long-4096-causal-cuda",
    "tssa-long-64k-cuda",
)
_STEPS = (
    "mssa-64x12x64-cached-4096",
    "mssa-16x16x128-cached-16384",
    "mssa-1x16x128-cached-65536",
    "tssa-64x12x64-cached-1024",
    "mssa-1x12x64-cached-1024",
    "tssa-1x12x64-cached-1024",
)
_NETWORKS = ("crate_base", "tost_small_12", "crate_lm_base", "tost_lm_base", "crate_small")
_TEXTS = ("crate_lm_base-8x512+256", "tost_lm_base-8x512+256")
_OVERHEADS = ("overhead-mssa", "overhead-tssa", "overhead-ista")

# (name of the subject, dtype, direction); every provider of one follows the other.
ORDER = tuple(
    (name, dtype, direction)
    for names, dtype, direction in (
        (_MODELS + _LONG, "bf16", "both"),
        (_MODELS + _LONG, "bf16", "forward"),
        (_STEPS, "bf16", "forward"),
        (_NETWORKS[:4], "bf16", "step"),
        (_TEXTS, "bf16", "forward"),
        (_OVERHEADS, "fp32", "forward"),
        (_MORE, "bf16", "both"),
        (_MORE, "bf16", "forward"),
        (_MODELS, "fp32", "both"),
        (_NETWORKS, "bf16", "forward"),
        (_MODELS, "fp32", "forward"),
        (_LONG, "fp32", "both"),
    )
    for name in names
)
_RANKS = {key: rank for rank, key in enumerate(ORDER)}


# What the default run of a CPU times, in this order: a few minutes, also where others use the cores. torch.compile and
# FlexAttention are not in it: they take seconds to compile a case.
_QUICK = (
    *_OVERHEADS,
    "mssa-vit-197-d64-cpu",
    "tssa-vit-196-many-cpu",
    "ista-tokens-1576-cpu",
    "mssa-lm-1024-d64-causal-cpu",
    "tssa-lm-1024-causal-cpu",
    "mssa-1x12x64-cached-1024",
    "tssa-1x12x64-cached-1024",
    "ista_overcomplete-alpha-s-cpu",
    "crate_small",
)
_QUICK_PROVIDERS = ("raw op", "public", "public with gradient", "eager", "sdpa", "composite", "cpp", "default")


def quick_rank(name: str, dtype: str, direction: str, provider: str) -> int | None:
    """Return the place of a benchmark in the default run of a CPU; None if it is not in it."""
    slow = direction == "backward" or (name == "crate_small" and dtype != "fp32")
    return None if slow or name not in _QUICK or provider not in _QUICK_PROVIDERS else _QUICK.index(name)


def rank(name: str, dtype: str, direction: str) -> int:
    """Return the place of a benchmark; what is not in the order comes after it."""
    return _RANKS.get((name, dtype, direction), len(ORDER))
