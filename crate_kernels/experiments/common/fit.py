"""Training that can stop anywhere: every draw is a function of the seed and the step."""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from types import FrameType
from typing import Any, NamedTuple

import torch
from safetensors.torch import save as serialize
from torch import Tensor, nn

from crate_kernels._core.files import put
from crate_kernels.experiments.common.trial import Trial
from crate_kernels.models._shared import reading
from crate_kernels.models._shared.official import check, first_names


class Unusable(Exception):
    """A checkpoint from which this run cannot resume; the message says why."""


def decayed(model: nn.Module, weight_decay: float, max_dims: float = math.inf) -> list[dict[str, Any]]:
    """Sort parameters into those of 2 to ``max_dims`` dimensions, which decay, and others, which do not."""
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for p in model.parameters():
        groups[2 <= p.dim() <= max_dims].append(p)
    return [{"params": params, "weight_decay": weight_decay * decays} for decays, params in groups.items()]


@dataclass(eq=False)
class Fit:
    """A model, its training options and its history so far.

    Attributes:
        label: of the model, for people.
        model, optimizer: ``train`` sets the learning rate at each step. Its peak is the optimizer's own.
        loss: maps the number of a batch to its loss.
        total: steps. warmup: steps up to the peak of the learning rate, which then decays by a cosine.
        identity: values that two runs must share for one to resume the other.
        watch: measures ``watch_name`` of the model, in eval mode, after the steps in ``watch_at``.
        clip: the largest norm of the gradients; None for any.
        pieces: batches per step, their gradients averaged: a large batch that does not fit in memory at once.
        file: of the checkpoint, by default named after the label.
        losses: one per step. watched: (step, value) pairs.
        seconds: time of all steps; None if some were taken in another run.
    """

    label: str
    model: Any  # of any class
    optimizer: torch.optim.Optimizer
    loss: Callable[[int], Tensor]
    total: int
    warmup: int
    identity: dict[str, Any]
    watch: Callable[[], float] = lambda: math.nan
    watch_name: str = ""
    watch_at: Container[int] = ()
    clip: float | None = None
    pieces: int = 1
    file: str = ""
    losses: list[float] = field(default_factory=list)
    watched: list[tuple[int, float]] = field(default_factory=list)
    seconds: float | None = None

    def __post_init__(self) -> None:
        slug = "".join(c if c.isalnum() else "-" for c in self.label.lower())
        self.file = self.file or f"{slug}.checkpoint"

    @property
    def done(self) -> int:
        """Steps taken."""
        return len(self.losses)

    @property
    def parameters(self) -> int:
        """Number of trained parameters."""
        return sum(p.numel() for p in self.model.parameters())

    def facts(self) -> dict[str, Any]:
        """Return what every report says of a training."""
        return {"losses": self.losses, "parameters": self.parameters, "seconds": self.seconds}

    def step(self) -> float:
        """Take one step and return its loss."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.optimizer.defaults["lr"] * self._schedule()
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
        if self.done in self.watch_at:
            self.evaluate()
        return self.losses[-1]

    def evaluate(self) -> float:
        """Measure the model, append the value to ``watched`` and return it."""
        self.model.eval()
        with torch.no_grad():
            self.watched.append((self.done, self.watch()))
        return self.watched[-1][1]

    def _schedule(self) -> float:
        if self.done < self.warmup:
            return (self.done + 1) / self.warmup
        return (1 + math.cos(math.pi * (self.done - self.warmup) / max(1, self.total - self.warmup))) / 2


def every(count: int, total: int) -> set[int]:
    """Return every ``count``-th step, and the last."""
    return {*range(count, total, count), total}


@contextmanager
def deferred_interrupts() -> Iterator[list[int]]:
    """Note Ctrl-C and termination instead of raising: raised inside a step, they leave half the weights updated.

    A second signal raises as usual.
    """
    received: list[int] = []
    previous = {}

    def note(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        for each, handler in previous.items():
            signal.signal(each, handler)

    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:  # keep ignoring it in a background job
            previous[number] = signal.signal(number, note)
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def train(fit: Fit, trial: Trial) -> None:
    """Train to the end, from the checkpoint in the run's folder if there is one.

    Raises:
        Unusable: the checkpoint is of another run, or cannot be read.
        KeyboardInterrupt: as in ``advance``.
    """
    if not trial.fresh and resume(fit, trial.folder):
        if fit.done == fit.total:
            return trial.say(f"{fit.label}: already trained; --fresh trains anew")
        trial.say(f"{fit.label}: resuming after step {fit.done} of {fit.total}")
    advance(fit, trial)


def advance(fit: Fit, trial: Trial) -> None:
    """Train from the present step to the end.

    Raises:
        KeyboardInterrupt: interrupted; the checkpoint holds every step that was completed.
    """
    whole, start = fit.done == 0, perf_counter()
    with deferred_interrupts() as received, trial.progress(fit.label, fit.total, fit.done) as move:
        if fit.done in fit.watch_at and not fit.watched:
            fit.evaluate()
        while fit.done < fit.total and not received:
            watched, loss = len(fit.watched), fit.step()
            seen = f"  {fit.watch_name} {fit.watched[-1][1]:.4f}" if fit.watched else ""
            move(f"loss {loss:.3f}{seen}")
            if len(fit.watched) > watched:
                save(fit, trial.folder)
                if not trial.console.is_terminal:  # a log has no progress bar
                    trial.say(f"  step {fit.done}/{fit.total}  loss {loss:.3f}{seen}")
    save(fit, trial.folder)
    if fit.done < fit.total:
        raise KeyboardInterrupt
    fit.seconds = perf_counter() - start if whole else None


def save(fit: Fit, folder: Path) -> Path:
    """Write model, optimiser, history and identity; return the path."""
    first = first_names(fit.model)  # save a tied head once, as the embedding
    tensors = {f"model.{name}": value for name, value in fit.model.state_dict().items() if first[name] == name}
    for index, state in fit.optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{key}": value for key, value in state.items()}
    tensors["history.losses"] = torch.tensor(fit.losses, dtype=torch.float64)
    tensors["history.watched"] = torch.tensor(fit.watched, dtype=torch.float64).reshape(-1, 2)
    return put(folder / fit.file, serialize(tensors, {"run": json.dumps(fit.identity)}))


def resume(fit: Fit, folder: Path) -> bool:
    """Load model, optimiser and history from the checkpoint; return whether there was one.

    Raises:
        Unusable: the checkpoint cannot be read, or is of another run. ``fit`` is then unchanged.
    """
    path = folder / fit.file
    if not path.exists():
        return False
    try:
        tensors, metadata = reading.tensors(fit.label, reading.inside(fit.label, folder, fit.file))
        run = json.loads(metadata["run"])
        mine = json.loads(json.dumps(fit.identity))  # tuples become lists, as in the file
        differing = [f"{key} {run.get(key)!r}, now {mine[key]!r}" for key in mine if run.get(key) != mine[key]]
        if differing:
            raise Unusable(f"{path} is of a run with other settings ({'; '.join(differing)})")
        saved = _Saved.of(fit, tensors)
    except (OSError, KeyError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise Unusable(f"{path} cannot be read ({error})") from None
    fit.model.load_state_dict(saved.weights)
    fit.optimizer.load_state_dict({**fit.optimizer.state_dict(), "state": saved.moments})
    fit.losses, fit.watched = saved.losses, saved.watched
    return True


class _Saved(NamedTuple):
    """What a checkpoint holds of a training, checked to fit it."""

    weights: dict[str, Tensor]
    moments: dict[int, dict[str, Tensor]]
    losses: list[float]
    watched: list[tuple[int, float]]

    @classmethod
    def of(cls, fit: Fit, tensors: dict[str, Tensor]) -> _Saved:
        """Sort the tensors of a checkpoint; raise ValueError or KeyError if they do not fit ``fit``."""
        prefixed = _with_prefix("model.", tensors)
        weights = {name: prefixed[first] for name, first in first_names(fit.model).items()}
        check(fit.label, "model", fit.model, weights)
        moments: dict[int, dict[str, Tensor]] = {}
        parameters = [p for group in fit.optimizer.param_groups for p in group["params"]]
        for name, value in _with_prefix("optimizer.", tensors).items():
            index, key = name.split(".")
            if not 0 <= int(index) < len(parameters) or value.shape != (
                () if key == "step" else parameters[int(index)].shape
            ):
                raise ValueError(f"optimizer.{name} fits no parameter, got {tuple(value.shape)}")
            moments.setdefault(int(index), {})[key] = value
        if len({frozenset(state) for state in moments.values()}) > 1:
            raise ValueError("the optimizer's state must have the same parts for all parameters")
        losses, watched = tensors["history.losses"], tensors["history.watched"]
        if losses.dim() != 1 or len(losses) > fit.total or watched.dim() != 2 or watched.shape[1] != 2:
            shapes = f"{tuple(losses.shape)} and {tuple(watched.shape)}"
            raise ValueError(f"history must be of at most {fit.total} steps, got {shapes}")
        return cls(weights, moments, losses.tolist(), [(int(step), value) for step, value in watched.tolist()])


def _with_prefix(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
