"""Times decoding: one new token on a cache, and the generation of whole texts."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from crate_kernels import models
from crate_kernels._core.spec import Decoding, TimedStep
from crate_kernels.bench import measuring, memory, networks
from crate_kernels.bench.gate import Deviation, judge
from crate_kernels.bench.providers import OURS, unavailable_reason
from crate_kernels.bench.rows import DTYPES, BenchRow
from crate_kernels.testing import FORWARD_FACTOR, SPECS

STEPS = tuple(step for spec in SPECS.values() if spec.decoding for step in spec.decoding.steps)


def _decoding_of(op: str) -> Decoding:
    decoding = SPECS[op].decoding
    if decoding is None:
        raise ValueError(f"{op} has no cache")
    return decoding


def providers_of(op: str) -> tuple[str, ...]:
    """Return the names of the providers that decode with an operator."""
    return *_decoding_of(op).providers, *OURS


def _unavailable_reason(step: TimedStep, provider: str, dtype: torch.dtype, device: torch.device) -> str | None:
    if provider == "flash-attn":
        if find_spec("flash_attn") is None:
            return "flash-attn is not installed"
        return None if device.type == "cuda" and dtype != torch.float32 else "flash-attn takes half precision on GPUs"
    return unavailable_reason(step.op, dtype, device, provider) if provider in OURS else None


def _draw(step: TimedStep, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    batch, nheads, cached, head_dim = step.shape
    w = torch.randn(batch, nheads, cached + 1, head_dim, generator=torch.Generator().manual_seed(0)) * 3**-0.5
    w = w.to(device, dtype)
    return w[:, :, :cached].contiguous(), w[:, :, cached:].contiguous()


def blank(step: TimedStep, dtype: str, provider: str) -> BenchRow:
    """Return the row of a step, without results."""
    row = BenchRow("decode", step.op, str(step), dtype, "forward", provider, shape=list(step.shape))
    row.bytes = _decoding_of(step.op).min_bytes(step, DTYPES[dtype])
    row.unit, row.amount = "tokens", float(step.shape[0])
    return row


@torch.no_grad()
def measure(row: BenchRow, step: TimedStep, device: torch.device, timer: measuring.Timer) -> BenchRow:
    """Time one decoding step after comparing its output with float64."""
    dtype, provider = DTYPES[row.dtype], row.provider
    reason = _unavailable_reason(step, provider, dtype, device)
    if reason is not None:
        row.skipped = reason
        return row
    make = _decoding_of(step.op).make
    past, new = _draw(step, dtype, device)
    call, rewind = make(step, provider, past, new)
    exact = make(step, "eager", past.double(), new.double())[0]()
    eager = make(step, "eager", past, new)[0]()
    off, eager_off, size = (t.abs().max().item() for t in (call().double() - exact, eager.double() - exact, exact))
    measuring.record_verdict(row, judge([Deviation("out", off, eager_off, size)], dtype))
    if not row.skipped:
        measuring.record_times(row, call, lambda: rewind() or (), device, timer, watch=False)
    return row


@dataclass(frozen=True)
class GeneratedText:
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
    *(
        GeneratedText(n, 1, 128, 64, "cpu", "fp32")
        for n in ("crate_lm_base", "crate_lm_overcomplete_12l", "tost_lm_base")
    ),
    *(
        GeneratedText(n, 8, 512, 256, "cuda", "bf16")
        for n in ("crate_lm_base", "crate_lm_overcomplete_12l", "tost_lm_base")
    ),
)
TEXT_PROVIDERS = ("recomputing", "composite", "default", "default-graphed")


def blank_text(text: GeneratedText, provider: str) -> BenchRow:
    """Return the row of a text, without results."""
    row = BenchRow("generation", "model", str(text), text.dtype, "forward", provider, unit="tokens")
    row.amount = float(text.batch * text.new)
    return row


@torch.no_grad()
def measure_text(row: BenchRow, text: GeneratedText, device: torch.device, timer: measuring.Timer) -> BenchRow:
    """Time the generation of a text. Each token must be the likeliest in float64, up to rounding.

    "recomputing" is the published code: the reference implementation on the whole window for every token.
    "default-graphed" replays a captured step.
    """
    dtype, provider = DTYPES[row.dtype], row.provider
    graphed = provider == "default-graphed"
    if graphed and device.type != "cuda":
        row.skipped = "CUDA graphs are for CUDA devices"
        return row
    torch.manual_seed(0)
    exact = models.create(text.model, backend="composite").eval()
    model: Any = copy.deepcopy(exact)
    if provider == "recomputing":
        model = networks.published_form(model)
    elif provider != "composite":
        torch.manual_seed(0)
        model = models.create(text.model).eval()
    model, exact = model.to(device, dtype), networks.published_form(exact).to(device, torch.float64)
    prompt = torch.randint(50257, (text.batch, text.prompt), generator=torch.Generator().manual_seed(1)).to(device)

    def write(prompt: Tensor = prompt) -> Tensor:
        use_cache = provider != "recomputing"
        return model.generate(prompt, text.new, temperature=0, use_cache=use_cache, cuda_graph=graphed)

    # A call without arguments would be captured itself, and a capture holds no other.
    prepare = (lambda: (prompt,)) if graphed else tuple
    with memory.limited(device):
        written = write()
        logits = networks._logits(exact, written[:, :-1])[:, text.prompt - 1 :]
        rounded = networks._logits(networks.published_form(exact).to(dtype), written[:, :-1])[:, text.prompt - 1 :]
        chosen = logits.gather(-1, written[:, text.prompt :, None])[..., 0]
        short = (logits.amax(-1) - chosen).max().item()
        size, eager_off = logits.abs().max().item(), (rounded.double() - logits).abs().max().item()
        # The choice of a token compares two logits, and each may be off: hence the factor 2.
        measuring.record_verdict(row, judge([Deviation("text", short, eager_off, size, 2 * FORWARD_FACTOR)], dtype))
        if not row.skipped:
            measuring.record_times(row, write, prepare, device, timer, watch=False)
    return row
