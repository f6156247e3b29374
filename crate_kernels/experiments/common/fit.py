"""Training that can stop anywhere: every draw is a function of the seed and the step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from crate_kernels.experiments.common import checkpoints, interrupts
from crate_kernels.experiments.common.trial import Trial


def decayed(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Sort parameters into matrices, which decay, and others, which do not."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


@dataclass(eq=False)
class Fit:
    """A model, its training options and its history so far.

    Attributes:
        name: of the run and its checkpoint. label: for people.
        model, optimizer: the learning rate is set at each step.
        loss: maps the number of a batch to its loss.
        pieces: batches per step, their gradients averaged: a large batch that does not fit in memory at once.
        total: steps. rate: the peak of the learning rate, after ``warmup`` steps; then it decays by a cosine.
        identity: values that two runs must share for one to resume the other.
        watch: measures ``watch_name`` of the model, in eval mode, every ``every`` steps and after the last.
        losses: one per step. watched: (step, value) pairs.
        seconds: time of all steps; None if some were taken in another run.
    """

    name: str
    label: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[int], Tensor]
    total: int
    rate: float
    warmup: int
    identity: dict[str, Any]
    watch: Callable[[], float] | None = None
    watch_name: str = ""
    every: int = 0
    clip: float | None = None
    pieces: int = 1
    losses: list[float] = field(default_factory=list)
    watched: list[tuple[int, float]] = field(default_factory=list)
    seconds: float | None = None

    @property
    def done(self) -> int:
        """Steps taken."""
        return len(self.losses)

    @property
    def parameters(self) -> int:
        """Number of trained parameters."""
        return sum(p.numel() for p in self.model.parameters())

    def step(self) -> float:
        """Take one step and return its loss."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * self._schedule()
        self.model.train()
        self.optimizer.zero_grad()
        mean = 0.0
        for piece in range(self.pieces):
            loss = self.loss(self.done * self.pieces + piece) / self.pieces
            loss.backward()
            mean += loss.item()
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.losses.append(mean)
        if self.watch is not None and (self.done == self.total or (self.every and self.done % self.every == 0)):
            self.look()
        return self.losses[-1]

    def look(self) -> None:
        """Measure the model and append the value to ``watched``."""
        assert self.watch is not None
        self.model.eval()
        with torch.no_grad():
            self.watched.append((self.done, self.watch()))

    def _schedule(self) -> float:
        if self.done < self.warmup:
            return (self.done + 1) / self.warmup
        return (1 + math.cos(math.pi * (self.done - self.warmup) / max(1, self.total - self.warmup))) / 2


def train(fit: Fit, trial: Trial) -> None:
    """Train to the end, from the checkpoint in the run's folder if there is one.

    Raises:
        checkpoints.Unusable: the checkpoint is of another run, or cannot be read.
        KeyboardInterrupt: interrupted; the checkpoint holds every step that was completed.
    """
    path = trial.folder / f"{fit.name}.checkpoint"
    if (
        not trial.fresh
        and (history := checkpoints.load_state(path, fit.model, fit.optimizer, fit.identity)) is not None
    ):
        fit.losses = history["losses"].tolist()
        fit.watched = [(int(step), value) for step, value in history["watched"].tolist()]
    if fit.done == fit.total:
        trial.say(f"{fit.label}: already trained; --fresh trains anew")
        return
    whole, start = fit.done == 0, perf_counter()
    if not whole:
        trial.say(f"{fit.label}: going on from step {fit.done} of {fit.total}")
    with interrupts.deferred() as received, trial.progress(fit.label, fit.total, fit.done) as advance:
        while fit.done < fit.total and not received:
            looks, loss = len(fit.watched), fit.step()
            seen = f"  {fit.watch_name} {fit.watched[-1][1]:.4f}" if fit.watched else ""
            advance(f"loss {loss:.3f}{seen}")
            if len(fit.watched) > looks:
                _save(fit, path)
                if not trial.console.is_terminal:  # a log has no progress bar
                    trial.say(f"  step {fit.done}/{fit.total}  loss {loss:.3f}{seen}")
    _save(fit, path)
    if fit.done < fit.total:
        raise KeyboardInterrupt
    fit.seconds = perf_counter() - start if whole else None


def _save(fit: Fit, path: Path) -> None:
    history = {
        "losses": torch.tensor(fit.losses, dtype=torch.float64),
        "watched": torch.tensor(fit.watched, dtype=torch.float64).reshape(-1, 2),
    }
    checkpoints.save_state(path, fit.model, fit.optimizer, history, fit.identity)
