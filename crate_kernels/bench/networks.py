"""Times whole models: forward passes and training steps, against the same model on the reference implementations."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from crate_kernels import models
from crate_kernels.bench import clock, interleaved, measuring
from crate_kernels.bench.gate import Deviation, Verdict, judge
from crate_kernels.bench.rows import DTYPES, INTERLEAVED, BenchRow
from crate_kernels.nn import ISTA, MSSA, TSSA, CausalMSSA, CausalTSSA, OvercompleteISTA
from crate_kernels.ops.ista import spec as ista
from crate_kernels.ops.mssa import spec as mssa
from crate_kernels.ops.tssa import spec as tssa
from crate_kernels.testing import FORWARD_FACTOR, GRADIENT_FACTOR

# Options of torch.compile, by the provider that is compiled; "graphed" ones are replayed from CUDA graphs.
_GRAPHED = {"mode": "reduce-overhead"}
_COMPILED = {"compile": {}, "default-compiled": {}, "compile-graphed": _GRAPHED, "default-graphed": _GRAPHED}
PROVIDERS = (
    *("eager", "compile", "timm-vit", "composite", "default-compiled", "default"),
    *("compile-graphed", "default-graphed"),
)
_OURS = ("default", "default-compiled", "default-graphed")
_PUBLISHED = ("eager", "compile", "compile-graphed")
_INTERLEAVED = ("eager", "compile", "composite", "default-compiled", "default")


@dataclass(frozen=True)
class Network:
    """A model worth timing.

    Attributes:
        name: name in ``models.create``.
        unit: unit of its inputs, for rates.
        cpu_batch, gpu_batch: images or sequences per step; None if not timed on that device.
        seqlen: tokens per sequence of a language model.
        brief: whether the default run times the model.
        vit: (width, depth, heads) of the transformer of the same size.
    """

    name: str
    unit: str
    cpu_batch: int | None
    gpu_batch: int | None
    seqlen: int = 0
    brief: bool = False
    vit: tuple[int, int, int] | None = None


NETWORKS = (
    Network("crate_small", "images", 8, 256, brief=True, vit=(576, 12, 12)),
    Network("crate_base", "images", 2, 256, vit=(768, 12, 12)),
    Network("tost_small_12", "images", 8, 256, vit=(384, 12, 8)),
    Network("crate_lm_base", "tokens", 1, 16, seqlen=1024),
    Network("tost_lm_base", "tokens", 1, 16, seqlen=1024),
)


class _Plain(nn.Module):
    """A module of the library in its reference implementation: the same parameters, eager PyTorch."""

    def __init__(self, source: nn.Module, form: Callable[..., Tensor]) -> None:
        super().__init__()
        self.source, self.form = source, form

    def heads(self, project: nn.Module, x: Tensor, heads: int) -> Tensor:
        return project(x).unflatten(-1, (heads, -1)).transpose(1, 2)

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        source = cast(Any, self.source)
        if isinstance(source, ISTA):
            return self.form(x, source.weight, source.step_size, source.lambd)
        if isinstance(source, OvercompleteISTA):
            return self.form(x, source.D, source.D1, source.step_size, source.lambd)
        if isinstance(source, (MSSA, TSSA)):
            w = self.heads(source.qkv, x, source.heads)
            out = self.form(w) if isinstance(source, MSSA) else self.form(w, source.temp)
            return source.to_out(out.transpose(1, 2).flatten(2))
        w = self.heads(source.c_attn, x, source.n_head)
        out = self.form(w) if isinstance(source, CausalMSSA) else self.form(w, source.temp, source.denom_bias)
        return source.resid_dropout(source.c_proj(out.transpose(1, 2).flatten(2)))


_FORMS: dict[type[nn.Module], Callable[..., Tensor]] = {
    ISTA: ista.published,
    OvercompleteISTA: ista.published_overcomplete,
    MSSA: mssa.published,
    TSSA: tssa.published,
    CausalMSSA: lambda w: mssa.published(w, causal=True),
    CausalTSSA: tssa.published_causal,
}


def published_form(model: nn.Module) -> nn.Module:
    """Return a copy of a model with every operator in its reference implementation."""
    plain = copy.deepcopy(model)
    for parent in list(plain.modules()):
        for name, child in list(parent.named_children()):
            if type(child) in _FORMS and not isinstance(parent, _Plain):
                setattr(parent, name, _Plain(child, _FORMS[type(child)]))
    return plain


def unavailable_reason(network: Network, provider: str, device: torch.device) -> str | None:
    """Say why a provider cannot run a network on a device; None if it can."""
    if _COMPILED.get(provider) == _GRAPHED and device.type != "cuda":
        return "CUDA graphs are for GPUs"
    if provider == "timm-vit":
        if network.vit is None:
            return "timm's ViT is no language model"
        if find_spec("timm") is None:
            return "timm is not installed"
    return None


def _model(network: Network, provider: str, dtype: torch.dtype, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    if provider == "timm-vit":
        from timm.models.vision_transformer import VisionTransformer  # pyright: ignore[reportMissingImports]

        assert network.vit is not None
        width, depth, heads = network.vit
        return VisionTransformer(embed_dim=width, depth=depth, num_heads=heads).to(device, dtype)
    model = models.create(network.name, backend=None if provider in _OURS else "composite").to(device)
    model = published_form(model) if provider in _PUBLISHED else model
    return model.to(dtype)


def _batch(network: Network, dtype: torch.dtype, device: torch.device, draw: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1 + draw)
    size = network.cpu_batch if device.type == "cpu" else network.gpu_batch
    assert size is not None
    if network.seqlen:
        text = torch.randint(50257, (size, network.seqlen + 1), generator=generator)
        return text[:, :-1].to(device), text[:, 1:].to(device)
    images = torch.randn(size, 3, 224, 224, generator=generator)
    return images.to(device, dtype), torch.randint(1000, (size,), generator=generator).to(device)


def _logits(model: nn.Module, x: Tensor) -> Tensor:
    result = model(x)
    return result[0] if isinstance(result, tuple) else result


def _loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(_logits(model, x).flatten(0, -2).float(), y.flatten())


def _logits_and_gradients(model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    """Return logits and all gradients, as float64; evaluation mode switches random layers off."""
    training = model.training
    model.eval()
    logits = _logits(model, x)
    loss = F.cross_entropy(logits.flatten(0, -2), y.flatten())
    used = [p for p in model.parameters() if p.requires_grad]
    grads = torch.autograd.grad(loss, used, allow_unused=True)
    flat = [(torch.zeros_like(p) if g is None else g).flatten() for p, g in zip(used, grads, strict=True)]
    model.train(training)
    return [logits.detach().double(), torch.cat(flat).double()]


_Outcomes = tuple[list[Tensor], list[Tensor]]
_last: dict[tuple[Network, torch.dtype, torch.device], dict[int, _Outcomes]] = {}


def _exact_and_eager(network: Network, dtype: torch.dtype, device: torch.device, draw: int) -> _Outcomes:
    """Return the reference implementation's outcomes in float64 and in ``dtype``; the last are kept for all."""
    key = network, dtype, device
    if key not in _last:
        _last.clear()
        _last[key] = {}
    if draw not in _last[key]:
        x, y = _two_samples(network, dtype, device, draw)
        exact = x.double() if x.is_floating_point() else x
        _last[key][draw] = (
            _logits_and_gradients(_model(network, "eager", torch.float64, device), exact, y),
            _logits_and_gradients(_model(network, "eager", dtype, device), x, y),
        )
    return _last[key][draw]


def _two_samples(network: Network, dtype: torch.dtype, device: torch.device, draw: int) -> tuple[Tensor, Tensor]:
    """Return two samples of a batch; of texts, their first tokens."""
    x, y = _batch(network, dtype, device, draw)
    return (x[:2, :128], y[:2, :128]) if network.seqlen else (x[:2], y[:2])


_DRAWS = 5


def _verdict(network: Network, model: nn.Module, dtype: torch.dtype, device: torch.device) -> Verdict:
    """Compare a model with the reference implementation in float64: on two samples, and else by the median draw.

    A rounding that opens or shuts a gate of sparse coding makes a gradient jump: by 30 times its other error in one
    draw of four, in eager form too.
    """
    first = _verdict_on(0, network, model, dtype, device)
    if first.passed:
        return first
    verdicts = [first, *(_verdict_on(draw, network, model, dtype, device) for draw in range(1, _DRAWS))]
    return sorted(verdicts, key=lambda verdict: verdict.share)[_DRAWS // 2]


def _verdict_on(draw: int, network: Network, model: nn.Module, dtype: torch.dtype, device: torch.device) -> Verdict:
    """Compare logits and gradients of two samples with the reference implementation in float64, by norm."""
    exact, eager = _exact_and_eager(network, dtype, device, draw)
    actual = _logits_and_gradients(model, *_two_samples(network, dtype, device, draw))
    found = []
    names = (("logits", FORWARD_FACTOR), ("gradients", GRADIENT_FACTOR))
    for (name, factor), a, e, t in zip(names, actual, eager, exact, strict=True):
        found.append(Deviation(name, *(torch.linalg.vector_norm(v).item() for v in (a - t, e - t, t)), factor=factor))
    return judge(found, dtype)


def blank(network: Network, dtype: str, direction: str, provider: str) -> BenchRow:
    """Return the row of a network, without results; ``direction`` is "forward" or "step"."""
    return BenchRow("models", "model", network.name, dtype, direction, provider, unit=network.unit)


def measure(row: BenchRow, network: Network, device: torch.device, timer: measuring.Timer) -> BenchRow:
    """Time a forward pass, or a training step: loss, gradients and AdamW."""
    reason = unavailable_reason(network, row.provider, device)
    if reason is not None:
        row.skipped = reason
        return row
    return measuring.within_memory(row, device, lambda: _check_and_time(row, network, DTYPES[row.dtype], device, timer))


def _check_and_time(
    row: BenchRow, network: Network, dtype: torch.dtype, device: torch.device, timer: measuring.Timer
) -> None:
    model = _checked(row, network, dtype, device)
    if model is not None:
        torch._dynamo.reset()
        measuring.record_times(row, _call(row, network, model, dtype, device), tuple, device, timer)


def measure_interleaved(rows: Sequence[BenchRow], network: Network, device: torch.device, seconds: float) -> None:
    """Time the providers of a network interleaved; ``blank_interleaved`` makes the rows, of one dtype and direction."""
    dtype = DTYPES[rows[0].dtype]
    models = [_checked(row, network, dtype, device) for row in rows]
    torch._dynamo.reset()
    calls = [
        (row, _call(row, network, model, dtype, device))
        for row, model in zip(rows, models, strict=True)
        if model is not None
    ]
    interleaved.measure_calls(calls, seconds)


def blank_interleaved(network: Network, dtype: str, direction: str) -> list[BenchRow]:
    """Return the rows of all models of a network in one dtype and direction, without results."""
    return [
        BenchRow(INTERLEAVED, "model", network.name, dtype, direction, provider, unit=network.unit)
        for provider in _INTERLEAVED
    ]


def _checked(row: BenchRow, network: Network, dtype: torch.dtype, device: torch.device) -> nn.Module | None:
    """Return the model of a row, and fill in its errors; None if it may not be timed."""
    model = _model(network, row.provider, dtype, device).train(row.direction == "step")
    x, _ = _batch(network, dtype, device)
    row.shape, row.amount = list(x.shape), float(x.numel() if network.seqlen else len(x))
    if row.provider == "timm-vit":  # another model: there is no reference for it
        return model
    verdict = _verdict(network, model, dtype, device)
    measuring.record_verdict(row, verdict)
    return model if verdict.passed else None


def _call(row: BenchRow, network: Network, model: nn.Module, dtype: torch.dtype, device: torch.device) -> clock.Call:
    """Return the forward pass or the training step of a model; the first call compiles what is to be compiled."""
    x, y = _batch(network, dtype, device)
    if row.provider in _COMPILED:
        model = cast(nn.Module, torch.compile(model, dynamic=False, **_COMPILED[row.provider]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def forward() -> None:
        with torch.no_grad():
            _logits(model, x)

    def step() -> None:
        _loss(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)  # gradients stay allocated, so the peak does not count them

    return step if row.direction == "step" else forward
