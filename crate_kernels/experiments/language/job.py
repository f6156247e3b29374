"""The experiment: train every model alike, draw the losses, let each model write text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from crate_kernels._core import files
from crate_kernels.bench import clock
from crate_kernels.bench.drawing import CYCLE, axes, smoothed
from crate_kernels.experiments.common.draws import generator, seeded
from crate_kernels.experiments.common.fit import Fit, every, train
from crate_kernels.experiments.common.trial import Trial
from crate_kernels.experiments.language import text
from crate_kernels.experiments.language.settings import LanguageSettings
from crate_kernels.models import CRATELM, CRATELMConfig, ToSTLM, ToSTLMConfig
from crate_kernels.models._shared.language import LanguageModel
from crate_kernels.models.aot import AoTLM, AoTLMConfig

_TRAINING, _WRITING = 0, 1
_BYTES = 256
_PROMPT = "The "
_WARM_UP = 4  # bytes, before a speed is measured

# Published losses, nats per GPT-2 token, on OpenWebText or, where named, on LAMBADA without training on it: Buchanan,
# Pai, Wang and Ma (Learning Deep Representations of Data Distributions, 2025), "Causal Language Modeling", "Linear Time
# Complexity Transformers" (also ToST's repository, tost_lang/README.md) and "Attention-Only Transformers".
MODELS: dict[str, tuple[Callable[[dict[str, Any]], LanguageModel], str]] = {
    "causal CRATE": (lambda sizes: CRATELM(CRATELMConfig(**sizes)), "3.37 (base, 60M)"),
    "causal CRATE, overcomplete": (lambda sizes: CRATELM(CRATELMConfig(**sizes, overcomplete=True)), "-"),
    # The published layer scales start at 1e-5 for far longer trainings; small models start at 1.
    "ToST": (lambda sizes: ToSTLM(ToSTLMConfig(**sizes, bias=False, eta=1.0)), "3.20 (base, 110M)"),
    "AoT, MSSA": (lambda sizes: AoTLM(AoTLMConfig(**sizes, bias=False)), "LAMBADA 4.70 (base, 102M)"),
    "AoT, MHSA": (
        lambda sizes: AoTLM(AoTLMConfig(**sizes, bias=False, attention="mhsa")),
        "LAMBADA 4.42 (base, 122M)",
    ),
    "GPT-2": (
        lambda sizes: AoTLM(AoTLMConfig(**sizes, bias=False, attention="mhsa", mlp=True)),
        "2.84, LAMBADA 4.32 (base, 124M)",
    ),
}


def run(trial: Trial, settings: LanguageSettings) -> int:
    """Train, test, write and draw."""
    source = text.load()
    trial.say(f"{source.name}: the last tenth to be tested on")
    rows, found, samples, fits = [], {}, {}, []
    for name, (_, paper) in MODELS.items():
        fit = _fit(name, trial, settings, source)
        train(fit, trial)
        written, rates = _write_text(fit, trial, settings)
        samples[name] = written
        fits.append(fit)
        bits = fit.watched[-1][1]
        rows.append([name, paper, f"{bits:.3f}", f"{fit.parameters:,}", f"{rates[0]:.0f}, {rates[1]:.0f}"])
        found[name] = {
            "bits_per_byte": bits,
            "watched": fit.watched,
            **fit.facts(),
            "tokens_per_second": {"cached": rates[0], "recomputing": rates[1]},
            "sample": written,
        }
    header = ("", "paper, nats a token", "measured, bits a byte", "parameters", "bytes a second, cached and not")
    trial.compare(rows, header)
    trial.say("Other text, other tokens, other sizes: the columns are not to be compared with each other")
    shown = "\n\n".join(f"{name}:\n{written}" for name, written in samples.items())
    files.put(trial.folder / "samples.txt", (shown + "\n").encode())
    trial.write({"language": _draw_language(fits)}, {"text": source.name, "models": found}, settings)
    trial.say(f"What each writes is in {trial.folder / 'samples.txt'}")
    return 0


def fresh(trial: Trial, settings: LanguageSettings, name: str) -> LanguageModel:
    """Build a model as it is before the first step."""
    sizes = {
        "vocab_size": _BYTES,
        "block_size": settings.block,
        "n_layer": settings.layers,
        "n_head": settings.heads,
        "n_embd": settings.dim,
        "backend": trial.backend,
    }
    with seeded(trial.seed):
        return MODELS[name][0](sizes).to(trial.device)


def _fit(name: str, trial: Trial, settings: LanguageSettings, source: text.Corpus) -> Fit:
    model = fresh(trial, settings, name)

    def loss(drawn: int) -> Tensor:
        size = (settings.block, settings.batch_size)
        inputs, targets = text.batch(source.train, *size, trial.seed, _TRAINING, drawn)
        _, value = model(inputs.to(trial.device), targets.to(trial.device))
        assert value is not None
        return value

    def bits() -> float:
        """Return the mean test loss, in bits per byte; the first byte of each stretch has no context."""
        inputs, targets = text.stretches(source.test, settings.block)
        total = 0.0
        for x, y in zip(inputs.split(64), targets.split(64), strict=True):
            _, value = model(x.to(trial.device), y.to(trial.device))
            assert value is not None
            total += value.item() * len(x)
        return total / len(inputs) / math.log(2)

    return Fit(
        name,
        model,
        torch.optim.AdamW(model.parameter_groups(settings.weight_decay), lr=settings.rate, betas=(0.9, 0.95)),
        loss,
        settings.steps,
        settings.warmup,
        {**asdict(settings), "model": name, "seed": trial.seed, "text": source.name},
        bits,
        "bits a byte",
        every(max(1, settings.steps // 5), settings.steps),
        clip=1.0,
        pieces=settings.pieces,
    )


def _write_text(fit: Fit, trial: Trial, settings: LanguageSettings) -> tuple[str, tuple[float, float]]:
    """Let a model continue a prompt; return the text, and bytes per second with a cache and without.

    Speed is measured within the model's context, where the cache applies.
    """
    prompt = torch.tensor([list(_PROMPT.encode())], device=trial.device)
    count = max(1, settings.block - prompt.shape[1])
    ways = [partial(fit.model.generate, prompt, temperature=0, use_cache=cached) for cached in (True, False)]
    for way in ways:
        way(min(count, _WARM_UP))  # the first calls choose kernels, and may compile them
    rates = [count / clock.once(way, lambda: (count,), trial.device) for way in ways]
    draws = torch.Generator(trial.device)
    draws.manual_seed(generator(trial.seed, _WRITING).initial_seed())
    written = fit.model.generate(prompt, settings.sample, temperature=settings.temperature, generator=draws)
    return text.readable(written[0].cpu()), (rates[0], rates[1])


def _draw_language(fits: Sequence[Fit]) -> Figure:
    """Draw the losses by step, in bits per byte: in training, and on the test text."""
    figure, ((training, test),) = axes(10.5, 3.8, 1, 2, sharey=True)
    for fit, colour in zip(fits, CYCLE, strict=True):
        steps, nats = smoothed(fit.losses, 60)
        training.plot(steps, nats / math.log(2), color=colour, linewidth=1.2, label=fit.label)
        steps, bits = zip(*fit.watched, strict=True)
        test.plot(steps, bits, "o-", color=colour, markersize=3, label=f"{fit.label}: {bits[-1]:.2f}")
    # Untrained models are at 8 bits per byte: leave out the first fall.
    last = max(fit.watched[-1][1] for fit in fits)
    training.set(xlabel="step", ylabel="bits a byte", title="training", ylim=(None, max(5.0, 1.02 * last)))
    test.set(xlabel="step", title="test")
    test.legend(frameon=False, fontsize=8)
    return figure
