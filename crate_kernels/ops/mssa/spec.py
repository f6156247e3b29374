"""Subspace self-attention for tests, ``verify`` and benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from crate_kernels._core import draw
from crate_kernels._core.spec import Case, Inputs, Spec, Sweep, Timed, Work, timed_attention
from crate_kernels.ops.mssa import baselines
from crate_kernels.ops.mssa.api import mssa
from crate_kernels.ops.mssa.call import MSSACall

_case = partial(Case.of, "mssa", return_lse=True)
_PLAIN = ("relu", "identity")
_IDENTITY = {"phi": "identity", "return_lse": False}

_CASES = (
    *(_case(f"n{n}", 2, 3, n, 16) for n in (1, 63, 64, 65)),
    *(_case(f"causal-n{n}", 2, 3, n, 16, causal=True) for n in (1, 63, 64, 65)),
    _case("vit", 1, 2, 197, 64),
    _case("vit-small", 1, 2, 197, 48),
    _case("causal-long", 1, 2, 257, 32, causal=True),
    *(_case(f"d{d}", 1, 2, 50, d) for d in (32, 80, 88, 104, 112, 128, 256)),
    _case("contiguous", 2, 3, 65, 32, layout="contiguous"),
    _case("strided", 2, 3, 65, 32, layout="strided"),
    _case("scale", 2, 3, 65, 16, scale=0.5),
    *(_case(f"{name}-scale", 2, 3, 65, 16, scale=scale) for name, scale in (("negative", -0.3), ("zero", 0.0))),
    *(_case(f"causal-{n}-scale", 2, 3, 65, 16, scale=x, causal=True) for n, x in (("negative", -0.3), ("zero", 0.0))),
    _case("negative-scale-common-mean", 2, 3, 65, 16, scale=-0.3, special="common mean"),
    _case("causal-packed-negative-scale", 0, 3, 0, 16, lengths=(5, 0, 64, 1, 33), scale=-0.3, causal=True),
    _case("pad-right", 3, 2, 65, 16, padding="right"),
    _case("pad-scattered", 3, 2, 65, 16, padding="scattered"),
    _case("pad-row", 3, 2, 65, 16, padding="row"),
    _case("causal-pad-left", 3, 2, 65, 16, padding="left", causal=True),
    _case("causal-pad-row", 3, 2, 65, 16, padding="row", causal=True),
    *(
        _case(f"{name}pad-opposed", 2, 1, 65, 16, padding=kind, special="opposed padding", magnitude=0.1, **options)
        for name, kind, options in (
            ("", "scattered", {}),
            ("causal-", "right", {"causal": True}),
            ("dropout-", "scattered", {"dropout_p": 0.3}),
            ("threshold-", "scattered", {"phi": "threshold", "threshold": 0.03}),
        )
    ),
    _case("packed", 0, 3, 0, 16, lengths=(5, 0, 64, 1, 33)),
    _case("causal-packed", 0, 3, 0, 16, lengths=(5, 0, 64, 1, 33), causal=True),
    _case("packed-empty", 0, 3, 0, 16, lengths=(0, 0)),
    _case("dropout", 2, 3, 65, 16, dropout_p=0.3),
    _case("causal-dropout", 2, 3, 65, 16, dropout_p=0.3, causal=True),
    _case("dropout-packed", 0, 3, 0, 16, lengths=(5, 64, 33), dropout_p=0.3),
    _case("zero-tokens", 2, 3, 65, 16, special="zero token"),
    _case("mixed-norms", 2, 3, 65, 16, special="mixed norms"),
    _case("common-mean", 2, 3, 65, 16, special="common mean"),
    # Scores of 2600 that differ by a few: the mean multiplies the difference of two roundings of one weight.
    _case("high-mean", 2, 3, 65, 16, special="common mean", scale=10.0, magnitude=0.05),
    # One weight is all of its row, a token's own or another's: eager subtracts a product from itself.
    *(
        _case(f"{name}saturated", 1, 1, 70, 48, magnitude=40.0, special="mixed norms", **options)
        for name, options in (
            ("", {}),
            ("causal-", {"causal": True}),
            ("dropout-", {"dropout_p": 0.3}),
            ("causal-dropout-", {"dropout_p": 0.3, "causal": True}),
        )
    ),
    # Of unit variance most weight is a token's own; of 1.3 all of it, nearly, and the logsumexp is often above 16.
    *(
        _case(f"{name}{size}", 2, 1, 150, 64, magnitude=magnitude, **options)
        for size, magnitude in (("unit-variance", 1.0), ("tall", 1.3))
        for name, options in (("", {}), ("causal-", {"causal": True}), ("pad-", {"padding": "scattered"}))
    ),
    _case("threshold", 2, 3, 65, 16, phi="threshold", threshold=0.5, magnitude=2.0),
    _case("threshold-causal", 2, 3, 65, 16, phi="threshold", threshold=0.5, causal=True, magnitude=2.0),
    _case("relu", 2, 3, 65, 16, phi="relu", return_lse=False),
    _case("identity", 2, 3, 65, 16, **_IDENTITY),
    _case("identity-pad-row", 3, 2, 65, 16, **_IDENTITY, padding="row"),
    _case("identity-causal-pad", 2, 3, 65, 16, **_IDENTITY, causal=True, padding="right"),
    *(_case(f"{phi}-packed", 0, 3, 0, 16, lengths=(5, 0, 64, 1, 33), phi=phi, return_lse=False) for phi in _PLAIN),
    *(_case(f"{phi}-packed-empty", 0, 3, 0, 16, lengths=(0, 0), phi=phi, return_lse=False) for phi in _PLAIN),
    # The sums of w_id w_ie over tokens overflow fp16; eager's scores and outputs do not.
    *(
        _case(f"identity-large{name}", batch, 2, 129, 8, scale=2**-10, magnitude=24.0, padding=padding, **_IDENTITY)
        for name, batch, padding in (("", 1, ""), ("-pad", 2, "row"))
    ),
    _case("empty-batch", 0, 3, 65, 16),
)

# Tokens of unit variance are what PyTorch's attention is usually timed on; their scores are of the size that trained
# heads have, so that a backward that is slower on larger scores shows.
_timed = partial(timed_attention, "mssa", magnitude=1.0)
_TIMED = (
    *_timed("vit-197-d48", "CRATE-S, patch 16", (12, 197, 48), (8, 256)),
    *_timed("vit-197-d64", "CRATE-B, patch 16", (12, 197, 64), (8, 256), brief="full"),
    *_timed("vit-785-d64", "CRATE-B, patch 8", (12, 785, 64), (2, 64)),
    *_timed("vit-785-d128", "CRATE-B demo, patch 8", (6, 785, 128), (None, 64)),
    *_timed("lm-1024-d48", "CRATE-S width, 1024 tokens", (12, 1024, 48), (2, None)),
    *_timed("lm-1024-d64", "causal CRATE base", (12, 1024, 64), (2, 32), brief="causal"),
    *_timed("lm-4096-d48", "4096 tokens", (4, 4096, 48), (1, None)),
    *_timed("lm-4096-d64", "4096 tokens", (4, 4096, 64), (1, 32), brief="full"),
    *_timed("lm-4096-d128", "4096 tokens", (4, 4096, 128), (None, 16)),
    *_timed("long-16k-d64", "16384 tokens", (4, 16384, 64), (None, 8)),
    *_timed("long-16k-d128", "16384 tokens", (4, 16384, 128), (None, 4)),
    *_timed("long-64k-d64", "65536 tokens", (4, 65536, 64), (None, 1)),
)


def _draw(case: Case, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
    w, others = draw.tokens(case, dtype, device, generator)
    return Inputs({"w": w}, others)


def _excluded(case: Case, backend: str, dtype: torch.dtype) -> str | None:
    """Name what PyTorch's own attention, which ``composite`` is made of, does not do within the error tolerance."""
    if backend != "composite":
        return None
    if case.options.get("dropout_p"):
        return "PyTorch's attention draws its own dropout mask"
    if case.magnitude >= 30.0 and dtype == torch.float32:
        return (
            "PyTorch's attention rounds what cancels where one weight is all: float32 gradients err by |w|^2 scale ulp"
        )
    if case.shape[3] in (112, 128) and dtype == torch.float32:
        return "PyTorch's CPU attention has a 20-ulp exponential: float32 gradients reach 4.2x eager's error"
    return None


def published(w: Tensor, causal: bool = False) -> Tensor:
    """CRATE's ``Attention`` and causal CRATE's: every score, its softmax and its product, each a tensor."""
    scores = w @ w.transpose(-1, -2) * w.shape[-1] ** -0.5
    if causal:
        seqlen = w.shape[-2]
        future = torch.ones(seqlen, seqlen, dtype=torch.bool, device=w.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    return scores.softmax(dim=-1) @ w


def _work(case: Case) -> Work:
    """Count 4 N^2 D FLOP per head forward and 2.5 times that backward, half of it when causal, as FlashAttention does.

    Forms that need fewer products are faster at the same count. The backward pass reads the output too.
    """
    batch, nheads, seqlen, head_dim = case.shape
    forward = 4.0 * batch * nheads * seqlen**2 * head_dim * (0.5 if case.options.get("causal") else 1.0)
    tensor = float(batch * nheads * seqlen * head_dim)
    return Work((forward, 2.5 * forward), (2 * tensor, 4 * tensor))


def _tiny(device: torch.device, tracked: bool, backend: str) -> dict[str, Callable[[], Any]]:
    w = torch.randn(1, 2, 4, 32, device=device, requires_grad=tracked)
    options = MSSACall(scale=32**-0.5)
    return {"raw op": lambda: torch.ops.crate_kernels.mssa_fwd(w, *options, backend), "public": lambda: mssa(w)}


SPECS = (
    Spec(
        "mssa",
        package="mssa",
        outputs=("out", "lse"),
        cases=_CASES,
        draw=_draw,
        published=lambda case: partial(published, causal=bool(case.options.get("causal"))),
        work=_work,
        tiny=_tiny,
        timed=_TIMED,
        sweep=Sweep(
            "mssa: 1 x 8 heads of 64",
            Timed(Case("mssa", "base", (1, 8, 0, 64)), "", ()),
            (256, 1024),  # the scores of 4096 tokens would take all providers more than a minute
            Timed(Case("mssa", "base", (8, 12, 197, 64)), "", ()),
        ),
        excluded=_excluded,
        providers=baselines.PROVIDERS,
        decoding=baselines.DECODING,
        sampling=baselines.SAMPLING,
    ),
)
