"""Token-statistics attention for tests, ``verify`` and benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from crate_kernels._core import draw
from crate_kernels._core.spec import (
    Case,
    Decoding,
    Inputs,
    Spec,
    Stepper,
    Sweep,
    Timed,
    TimedStep,
    Work,
    timed_attention,
)
from crate_kernels.ops.tssa.api import tssa
from crate_kernels.ops.tssa.cache import TokenStatsCache
from crate_kernels.ops.tssa.call import TSSACall

_case = partial(Case.of, "tssa", return_membership=True)

_CASES = (
    *(_case(f"n{n}", 2, 3, n, 16) for n in (1, 63, 64, 65)),
    *(_case(f"causal-n{n}", 2, 3, n, 16, causal=True) for n in (1, 63, 64, 65)),
    _case("vit", 1, 4, 197, 48),
    *(_case(f"d{d}", 1, 2, 50, d) for d in (64, 80, 128)),
    _case("causal-long", 1, 4, 257, 48, causal=True),
    _case("one-head", 2, 1, 33, 16),
    _case("contiguous", 2, 3, 65, 16, layout="contiguous"),
    _case("causal-contiguous", 2, 3, 65, 16, layout="contiguous", causal=True),
    _case("strided", 2, 3, 65, 16, layout="strided"),
    _case("pad-right", 3, 2, 65, 16, padding="right"),
    _case("pad-row", 3, 2, 65, 16, padding="row"),
    _case("causal-pad-right", 3, 2, 65, 16, padding="right", causal=True),
    _case("causal-pad-left", 3, 2, 65, 16, padding="left", causal=True),
    _case("causal-pad-row", 3, 2, 65, 16, padding="row", causal=True),
    _case("packed", 0, 3, 0, 16, lengths=(5, 0, 64, 1, 33)),
    _case("causal-packed", 0, 3, 0, 16, lengths=(5, 0, 64, 1, 33), causal=True),
    _case("packed-empty", 0, 3, 0, 16, lengths=(0, 0)),
    _case("causal-packed-empty", 0, 3, 0, 16, lengths=(0, 0), causal=True),
    _case("dropout", 2, 3, 65, 16, dropout_p=0.3),
    _case("causal-dropout", 2, 3, 65, 16, dropout_p=0.3, causal=True),
    _case("dropout-packed", 0, 3, 0, 16, lengths=(5, 64, 33), dropout_p=0.3),
    _case("dead-channel", 2, 3, 65, 16, special="dead channel"),
    _case("causal-dead-channel", 2, 3, 65, 16, special="dead channel", causal=True),
    _case("faint-channel", 2, 3, 65, 16, special="faint channel"),
    _case("mixed-norms", 2, 3, 65, 16, special="mixed norms"),
    _case("empty-batch", 0, 3, 65, 16),
    _case("causal-empty-batch", 0, 3, 65, 16, causal=True),
)

_TIMED = (
    *timed_attention("tssa", "vit-196-one", "ToST-S, one image", (8, 196, 48), (1, None)),
    *timed_attention("tssa", "vit-196", "ToST-S, patch 16", (8, 196, 48), (8, 256)),
    *timed_attention("tssa", "vit-196-many", "ToST-S, patch 16, large batch", (8, 196, 48), (64, None), brief="full"),
    *timed_attention("tssa", "vit-784", "ToST-M, patch 8", (8, 784, 64), (8, 128)),
    *timed_attention("tssa", "lm-1024", "ToST language base", (12, 1024, 64), (2, 32), brief="causal"),
    *timed_attention("tssa", "long-4096", "4096 tokens", (12, 4096, 64), (1, 16)),
    *timed_attention("tssa", "long-64k", "65536 tokens", (12, 65536, 64), (None, 1)),
)


def _draw(case: Case, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
    w, others = draw.tokens(case, dtype, device, generator)
    _, nheads, seqlen, _ = case.shape
    tensors = {"w": w, "temp": (1 + 0.2 * torch.randn(nheads, 1, generator=generator)).to(device, dtype)}
    if case.options.get("causal"):
        longest = max(case.lengths) if case.lengths else seqlen
        bias = torch.randn(nheads, longest + 3, 1, generator=generator)
        tensors["denom_bias"] = (0.02 * bias).to(device, dtype)
    return Inputs(tensors, others)


def published(w: Tensor, temp: Tensor) -> Tensor:
    """ToST's ``AttentionTSSA``: tokens normalised along the sequence, memberships, second moments."""
    normed = F.normalize(w, dim=-2)
    membership = ((normed**2).sum(-1) * temp.view(-1, 1)).softmax(dim=1)
    shares = membership / (membership.sum(-1, keepdim=True) + 1e-8)
    moments = shares.unsqueeze(-2) @ w**2
    return -(w * membership.unsqueeze(-1)) * (1 / (1 + moments))


def published_causal(w: Tensor, temp: Tensor, denom_bias: Tensor) -> Tensor:
    """ToST's ``CausalSelfAttention_TSSA``: running sums in place of sums."""
    energy = w**2
    normed = energy / energy.cumsum(-2).clamp_min(1e-12) + denom_bias[:, : w.shape[2]]
    membership = (normed.sum(-1) * temp.view(-1, 1)).softmax(dim=1)
    moments = (energy * membership.unsqueeze(-1)).cumsum(-2) / (membership.cumsum(-1) + 1e-8).unsqueeze(-1)
    return -(w * membership.unsqueeze(-1)) * (1 / (1 + moments))


def _work(case: Case) -> Work:
    """Count no FLOP: memory is what such a call costs."""
    batch, nheads, seqlen, head_dim = case.shape
    tensor = float(batch * nheads * seqlen * head_dim)
    return Work(None, (2 * tensor, 3 * tensor))


def _tiny(device: torch.device, tracked: bool, backend: str) -> dict[str, Callable[[], Any]]:
    w, temp = torch.randn(1, 2, 4, 32, device=device, requires_grad=tracked), torch.ones(2, device=device)
    return {
        "raw op": lambda: torch.ops.crate_kernels.tssa_fwd(w, temp, *TSSACall(), backend),
        "public": lambda: tssa(w, temp),
    }


def _stats_step(step: TimedStep, provider: str, past: Tensor, new: Tensor) -> Stepper:
    batch, nheads, cached, head_dim = step.shape
    temp = torch.ones(nheads, 1, dtype=new.dtype, device=new.device)
    bias = torch.zeros(nheads, cached + 1, 1, dtype=new.dtype, device=new.device)
    if provider == "eager":  # the published generation runs the whole window again
        every = torch.cat([past, new], 2)
        return lambda: published_causal(every, temp, bias)[:, :, -1:], tuple
    state = TokenStatsCache(batch, nheads, head_dim, device=new.device)
    tssa(past, temp, causal=True, denom_bias=bias, cache=state, backend="composite")
    cache = state.clone()

    def rewind() -> tuple[()]:
        # In place: a CUDA graph reads and writes what it was captured with.
        for current, before in zip(cache._tensors(), state._tensors(), strict=True):
            current.copy_(before)
        cache._bound = state._bound
        return ()

    return lambda: tssa(new, temp, causal=True, denom_bias=bias, cache=cache, backend=provider), rewind


SPECS = (
    Spec(
        "tssa",
        package="tssa",
        outputs=("out", "membership"),
        cases=_CASES,
        draw=_draw,
        published=lambda case: published_causal if case.options.get("causal") else published,
        work=_work,
        tiny=_tiny,
        timed=_TIMED,
        sweep=Sweep(
            "tssa: 1 x 12 heads of 64",
            Timed(Case("tssa", "base", (1, 12, 0, 64)), "", ()),
            (256, 1024, 4096),
            Timed(Case("tssa", "base", (8, 8, 196, 48)), "", ()),
        ),
        decoding=Decoding(
            (
                TimedStep("tssa", (1, 12, 1024, 64), ("cpu", "cuda"), brief=True),
                TimedStep("tssa", (8, 12, 1024, 64), ("cpu",)),
                TimedStep("tssa", (64, 12, 1024, 64), ("cuda",)),
            ),
            _stats_step,
            ("eager",),
            lambda step, dtype: float(
                step.shape[0] * step.shape[1] * step.shape[3] * 4 * 8
            ),  # two fp64 sums, in and out
        ),
    ),
)
