"""The fused operators against the naive equations: losses of the same model, and the cost of a step."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter

import torch
from torch.nn import functional as F

from crate_kernels.bench.memory import peak_bytes
from crate_kernels.experiments.common.draws import generator
from crate_kernels.experiments.demo.data import Digits
from crate_kernels.experiments.demo.settings import DemoSettings
from crate_kernels.experiments.demo.training import Training, fresh_model, model_config

STEPS, QUICK_STEPS = 20, 8
RELATIVE, ABSOLUTE = 1.3e-6, 1e-5  # torch.testing.assert_close's, for float32
CHAOS = 1e-3  # a comparison means nothing where rounding alone moves the loss this far
_PERTURBED_RUNS = 2
_TOKENS_A_STEP = 6000


@dataclass(frozen=True)
class Agreement:
    """The first losses of the run, and the same steps with the naive equations from the same seed.

    Attributes:
        fused, naive: losses, one per step.
        noise: effect of rounding alone on the naive losses: the largest deviation, up to that step, of the
            naive run in float64 and of naive runs whose initial weights are off by their last bit.
        bound: the largest allowed ``|fused - naive|``: three times the noise, at most ``CHAOS``, but no less than
            float32's customary tolerance.
    """

    fused: list[float]
    naive: list[float]
    noise: list[float]
    bound: list[float]

    @property
    def differences(self) -> list[float]:
        """``|fused - naive|`` per step."""
        return [abs(f - n) for f, n in zip(self.fused, self.naive, strict=True)]

    @property
    def largest(self) -> float:
        """The largest difference; NaN if any is, which Python's ``max`` would pass over, or without a step."""
        return torch.tensor(self.differences or [torch.nan], dtype=torch.float64).max().item()

    @property
    def agrees(self) -> bool:
        """True if every step is within its bound."""
        return all(d <= b for d, b in zip(self.differences, self.bound, strict=True))


def agreement(training: Training, quick: bool = False) -> Agreement:
    """Repeat the first steps of ``training`` with the naive equations."""
    steps = min(QUICK_STEPS if quick else STEPS, training.done)

    def repeat(change: Callable[[Training], object] = lambda _: None) -> torch.Tensor:
        run = Training(training.settings, training.digits, "reference", training.device)
        change(run)
        return torch.tensor([run.step() for _ in range(steps)], dtype=torch.float64)

    naive = repeat()
    others = [repeat(lambda run: run.model.double())]
    others += [repeat(lambda run, index=index: _perturb(run, index)) for index in range(_PERTURBED_RUNS)]
    noise = torch.stack([(other - naive).abs() for other in others]).amax(0).cummax(0).values
    bound = torch.maximum((3 * noise).clamp(max=CHAOS), ABSOLUTE + RELATIVE * naive.abs())
    return Agreement(training.losses[:steps], naive.tolist(), noise.tolist(), bound.tolist())


@torch.no_grad()
def _perturb(run: Training, index: int) -> None:
    """Move each weight by up to about a unit in its last place, differently for each ``index``."""
    draws = generator(run.settings.seed, 2, index)  # with the draws of the weights, all would move one way
    for p in run.model.parameters():
        unit = torch.rand(p.shape, generator=draws).to(p.device) * 2 - 1
        p.mul_(1 + unit * torch.finfo(p.dtype).eps)


@dataclass(frozen=True)
class Cost:
    """One training step of the model, naive and fused.

    Attributes:
        tokens: per image; ``batch_size``: images per step.
        seconds, peak_bytes: (naive, fused). The median of interleaved steps; the peak memory of tensors
            during a step beyond the model, its gradients and the optimiser's state.
    """

    patch_size: int
    tokens: int
    batch_size: int
    seconds: tuple[float, float]
    peak_bytes: tuple[int, int]


def costs(settings: DemoSettings, digits: Digits, backend: str | None, device: torch.device, rounds: int) -> list[Cost]:
    """Measure a training step at the demo's patch size and at finer ones: attention is quadratic in tokens."""
    found, few = [_cost(settings, digits, backend, device, rounds)], -(-rounds // 5)  # finer steps take seconds
    while digits.patch_size > 1:
        digits = replace(digits, patch_size=digits.patch_size // 2)
        found.append(_cost(settings, digits, backend, device, few))
    return found


def _cost(settings: DemoSettings, digits: Digits, backend: str | None, device: torch.device, rounds: int) -> Cost:
    tokens = digits.side**2 + 1
    size = min(settings.batch_size, _TOKENS_A_STEP // tokens)
    images = digits.crop(digits.train_images[:size]).contiguous().to(device)
    labels = digits.train_labels[:size].to(device)
    steps = [
        _training_step(settings, model_config(settings, digits, name), device, images, labels)
        for name in ("reference", backend)
    ]
    for step in steps:
        step()  # the first allocates the optimiser's state
    seconds: list[list[float]] = [[], []]
    for _ in range(rounds):
        for times, step in zip(seconds, steps, strict=True):
            start = perf_counter()
            step()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(perf_counter() - start)
    naive, fused = (statistics.median(times) for times in seconds)
    peaks = tuple(peak_bytes(step, device) for step in steps)
    return Cost(digits.patch_size, tokens, size, (naive, fused), (peaks[0], peaks[1]))


def _training_step(settings, config, device, images, labels) -> Callable[[], None]:
    model = fresh_model(settings, config, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)

    def step() -> None:
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)  # gradients stay allocated: the peak excludes them

    return step
