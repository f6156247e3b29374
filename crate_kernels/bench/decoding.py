"""Decoding: one new token against what is cached, and whole texts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from crate_kernels import SubspaceCache, TokenStatsCache, models, mssa, tssa
from crate_kernels._core import backends
from crate_kernels.bench import measuring, memory, networks, published
from crate_kernels.bench.gate import Verdict
from crate_kernels.bench.providers import OURS
from crate_kernels.bench.rows import DTYPES, Row
from crate_kernels.testing import FORWARD_FACTOR


@dataclass(frozen=True)
class Step:
    """One token of every sequence, with ``cached`` before it.

    Attributes:
        op: "mssa" or "tssa".
        shape: (batch, nheads, cached, head_dim).
        devices: where it is timed.
        brief: whether the default run times it.
    """

    op: str
    shape: tuple[int, int, int, int]
    devices: tuple[str, ...]
    brief: bool = False

    def __str__(self) -> str:
        batch, nheads, cached, head_dim = self.shape
        return f"{batch}x{nheads}x{head_dim}-cached-{cached}"


STEPS = (
    Step("mssa", (1, 12, 64, 64), ("cpu",)),
    Step("mssa", (1, 12, 1024, 64), ("cpu", "cuda"), brief=True),
    Step("mssa", (8, 12, 1024, 64), ("cpu",)),
    Step("mssa", (1, 12, 8192, 64), ("cpu",)),
    Step("mssa", (64, 12, 4096, 64), ("cuda",)),
    Step("mssa", (16, 16, 16384, 128), ("cuda",)),
    Step("mssa", (1, 16, 65536, 128), ("cuda",)),
    Step("tssa", (1, 12, 1024, 64), ("cpu", "cuda"), brief=True),
    Step("tssa", (8, 12, 1024, 64), ("cpu",)),
    Step("tssa", (64, 12, 1024, 64), ("cuda",)),
)
PROVIDERS = {
    "mssa": ("eager", "sdpa", "flash-attn", *OURS),
    "tssa": ("eager", *OURS),
}
# Returns (step, rewind): the step gives the new token's output, rewind takes it out of the cache again.
Stepper = tuple[Callable[[], Tensor], Callable[[], Any]]


def _why_not(step: Step, provider: str, dtype: torch.dtype, device: torch.device) -> str | None:
    if provider == "flash-attn":
        if find_spec("flash_attn") is None:
            return "flash-attn is not installed"
        return None if device.type == "cuda" and dtype != torch.float32 else "flash-attn takes half precision on GPUs"
    if provider == "triton" and device.type == "cpu":
        return "Triton's kernels are for GPUs; its interpreter is not worth timing"
    if provider in OURS:
        try:
            backends.resolve(step.op, provider, device, dtype)
        except (RuntimeError, NotImplementedError) as error:
            return str(error)
    return None


def _draw(step: Step, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    batch, nheads, cached, head_dim = step.shape
    w = torch.randn(batch, nheads, cached + 1, head_dim, generator=torch.Generator().manual_seed(0)) * 3**-0.5
    w = w.to(device, dtype)
    return w[:, :, :cached].contiguous(), w[:, :, cached:].contiguous()


def _subspace_step(step: Step, provider: str, past: Tensor, new: Tensor) -> Stepper:
    batch, nheads, cached, head_dim = step.shape
    scale = head_dim**-0.5
    room = past.new_zeros(batch, nheads, cached + 1, head_dim)
    room[:, :, :cached] = past
    if provider == "eager":  # what a user without a cache of fixed size writes

        def grow() -> Tensor:
            every = torch.cat([past, new], 2)
            return (new @ every.transpose(-1, -2) * scale).softmax(-1) @ every

        return grow, tuple
    if provider == "sdpa":  # two caches, as everywhere where key and value differ
        keys, values = room, room.clone()

        def attend() -> Tensor:
            keys[:, :, cached:] = new
            values[:, :, cached:] = new
            return F.scaled_dot_product_attention(new, keys, values)

        return attend, tuple
    if provider == "flash-attn":
        from flash_attn import flash_attn_with_kvcache  # pyright: ignore[reportMissingImports]

        keys, values = (room.transpose(1, 2).contiguous() for _ in range(2))
        token = new.transpose(1, 2).contiguous()
        lengths = torch.full((batch,), cached, dtype=torch.int32, device=new.device)

        def flash() -> Tensor:
            return flash_attn_with_kvcache(token, keys, values, token, token, cache_seqlens=lengths).transpose(1, 2)

        return flash, tuple
    cache = SubspaceCache(batch, nheads, cached + 1, head_dim, past.dtype, past.device)
    mssa(past, causal=True, cache=cache, backend="composite")
    return lambda: mssa(new, causal=True, cache=cache, backend=provider), lambda: cache.truncate(cached) or ()


def _stats_step(step: Step, provider: str, past: Tensor, new: Tensor) -> Stepper:
    batch, nheads, cached, head_dim = step.shape
    temp = torch.ones(nheads, 1, dtype=new.dtype, device=new.device)
    bias = torch.zeros(nheads, cached + 1, 1, dtype=new.dtype, device=new.device)
    if provider == "eager":  # the published generation runs the whole window again
        every = torch.cat([past, new], 2)
        return lambda: published.tssa_causal(every, temp, bias)[:, :, -1:], tuple
    state = TokenStatsCache(batch, nheads, head_dim, device=new.device)
    tssa(past, temp, causal=True, denom_bias=bias, cache=state, backend="composite")
    cache = state.clone()

    def rewind() -> tuple[()]:
        # In place: a CUDA graph reads and writes what it was captured with.
        for held, before in zip(cache._tensors(), state._tensors(), strict=True):
            held.copy_(before)
        cache._bound = state._bound
        return ()

    return lambda: tssa(new, temp, causal=True, denom_bias=bias, cache=cache, backend=provider), rewind


def blank(step: Step, dtype: str, provider: str) -> Row:
    """Return the row of a step before anything is known of it."""
    row = Row("decode", step.op, str(step), dtype, "forward", provider, shape=list(step.shape))
    batch, nheads, cached, head_dim = step.shape
    tokens = cached if step.op == "mssa" else 4  # tssa reads and writes two sums of fp32, whatever is cached
    row.bytes = float(batch * nheads * tokens * head_dim * (DTYPES[dtype].itemsize if step.op == "mssa" else 4))
    row.unit, row.amount = "tokens", float(batch)
    return row


@torch.no_grad()
def measure(row: Row, step: Step, device: torch.device, timer: measuring.Timer) -> Row:
    """Time one decoding step, its output held against float64."""
    dtype, provider = DTYPES[row.dtype], row.provider
    reason = _why_not(step, provider, dtype, device)
    if reason is not None:
        row.skipped = reason
        return row
    make = _subspace_step if step.op == "mssa" else _stats_step
    past, new = _draw(step, dtype, device)
    call, rewind = make(step, provider, past, new)
    exact = make(step, "eager", past.double(), new.double())[0]()
    eager = make(step, "eager", past, new)[0]()
    off, eager_off, size = (t.abs().max().item() for t in (call().double() - exact, eager.double() - exact, exact))
    share = off / (FORWARD_FACTOR * (eager_off + torch.finfo(dtype).eps * size))
    measuring.fill(row, Verdict(off / size, off / eager_off if eager_off else 0.0, share, "out"))
    if not row.skipped:
        measuring.observe(row, call, lambda: rewind() or (), device, timer, watch=False)
    return row


@dataclass(frozen=True)
class Text:
    """A text to generate: ``new`` tokens after a prompt of ``prompt``, greedily."""

    model: str
    batch: int
    prompt: int
    new: int
    device: str
    dtype: str

    def __str__(self) -> str:
        return f"{self.model}-{self.batch}x{self.prompt}+{self.new}"


TEXTS = (
    *(Text(n, 1, 128, 64, "cpu", "fp32") for n in ("crate_lm_base", "crate_lm_overcomplete_12l", "tost_lm_base")),
    *(Text(n, 8, 512, 256, "cuda", "bf16") for n in ("crate_lm_base", "crate_lm_overcomplete_12l", "tost_lm_base")),
)
TEXT_PROVIDERS = ("recomputing", "composite", "default")


def blank_text(text: Text, provider: str) -> Row:
    """Return the row of a text before anything is known of it."""
    row = Row("generation", "model", str(text), text.dtype, "forward", provider, unit="tokens")
    row.amount = float(text.batch * text.new)
    return row


@torch.no_grad()
def measure_text(row: Row, text: Text, device: torch.device, timer: measuring.Timer) -> Row:
    """Time the writing of a text, each of whose tokens must be the likeliest by float64, up to rounding.

    "recomputing" is what the published code does: the published form, the whole window for every token.
    """
    dtype, provider = DTYPES[row.dtype], row.provider
    torch.manual_seed(0)
    exact = models.create(text.model, backend="composite").eval()
    model: Any = copy.deepcopy(exact)
    if provider == "recomputing":
        model = networks.published_form(model)
    elif provider == "default":
        torch.manual_seed(0)
        model = models.create(text.model).eval()
    model, exact = model.to(device, dtype), networks.published_form(exact).to(device, torch.float64)
    prompt = torch.randint(50257, (text.batch, text.prompt), generator=torch.Generator().manual_seed(1)).to(device)

    def write() -> Tensor:
        return model.generate(prompt, text.new, temperature=0, use_cache=provider != "recomputing")

    with memory.limited(device):
        written = write()
        logits = networks._logits(exact, written[:, :-1])[:, text.prompt - 1 :]
        rounded = networks._logits(networks.published_form(exact).to(dtype), written[:, :-1])[:, text.prompt - 1 :]
        chosen = logits.gather(-1, written[:, text.prompt :, None])[..., 0]
        short = (logits.amax(-1) - chosen).max().item()
        size, eager_off = logits.abs().max().item(), (rounded.double() - logits).abs().max().item()
        # A token is chosen for being ahead of another: both logits may be off.
        budget = 2 * FORWARD_FACTOR * (eager_off + torch.finfo(dtype).eps * size)
        measuring.fill(row, Verdict(short / size, short / eager_off if eager_off else 0.0, short / budget, "text"))
        if not row.skipped:
            measuring.observe(row, write, tuple, device, timer, watch=False)
    return row
