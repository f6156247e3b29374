"""The experiment: train every model alike, and report the accuracy of each on digits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import matplotlib
import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional as F

from crate_kernels.bench.drawing import GREY, axes
from crate_kernels.experiments.classify.models import BUILDERS, fresh
from crate_kernels.experiments.classify.settings import ClassifySettings
from crate_kernels.experiments.common.fit import Fit, decayed, every, train
from crate_kernels.experiments.common.trial import Trial
from crate_kernels.experiments.demo import data
from crate_kernels.experiments.demo.settings import DemoSettings
from crate_kernels.experiments.demo.training import batch, steps_per_epoch


def run(trial: Trial, settings: ClassifySettings) -> int:
    """Train, test and draw."""
    digits = data.load()
    neighbours = data.nearest_neighbours(digits)
    trial.say(str(digits))
    fits = [_fit(name, trial, settings, digits) for name in settings.models or BUILDERS]
    rows, found = [], {}
    for fit in fits:
        train(fit, trial)
        accuracy = fit.watched[-1][1]
        seconds = "-" if fit.seconds is None else f"{fit.seconds:.0f} s"
        rows.append([fit.label, BUILDERS[fit.label].paper, f"{accuracy:.4f}", f"{fit.parameters:,}", seconds])
        found[fit.label] = {"accuracy": accuracy, "accuracies": fit.watched, **fit.facts()}
    rows.append(["3 nearest neighbours, on pixels", "-", f"{neighbours:.4f}", "-", "-"])
    header = ("", "paper, ImageNet", "measured, digits", "parameters", "training")
    trial.compare(rows, header)
    trial.say("Other images, other sizes, other training: the columns are not to be compared with each other")
    trial.write(
        {"classify": _draw_classify(fits, neighbours)},
        {"digits": digits.name, "nearest_neighbours": neighbours, "models": found},
        settings,
    )
    return 0


def _fit(name: str, trial: Trial, settings: ClassifySettings, digits: data.Digits) -> Fit:
    model = fresh(name, settings, digits, trial.backend, trial.seed).to(trial.device)
    drawing = DemoSettings(seed=trial.seed, batch_size=settings.batch_size)

    def loss(step: int) -> Tensor:
        images, labels = batch(drawing, digits, step)
        return F.cross_entropy(model(images.to(trial.device)), labels.to(trial.device), label_smoothing=0.1)

    epoch, rate = steps_per_epoch(drawing, digits), BUILDERS[name].pace * settings.rate
    return Fit(
        name,
        model,
        torch.optim.AdamW(decayed(model, settings.weight_decay), lr=rate),
        loss,
        settings.epochs * epoch,
        settings.warmup,
        {**asdict(settings), "models": [], "model": name, "seed": trial.seed, "digits": digits.name},
        lambda: digits.accuracy(model, trial.device),
        "accuracy",
        every(epoch, settings.epochs * epoch),
        clip=1.0,
    )


def _draw_classify(fits: Sequence[Fit], neighbours: float) -> Figure:
    """Draw test accuracy by step, and the last accuracy as bars in the colours of the lines."""
    figure, ((curves, bars),) = axes(12, 4.2, 1, 2)
    colours = matplotlib.colormaps["tab10"]
    for index, fit in enumerate(fits):
        steps, values = zip(*fit.watched, strict=True)
        curves.plot(steps, values, "o-", markersize=3, linewidth=1.2, color=colours(index))
        bars.barh(index, values[-1], color=colours(index))
        bars.text(0.01, index, f"{values[-1]:.3f}", va="center", color="white", fontsize=8)  # clear of the dashes
    for ax, line in ((curves, "axhline"), (bars, "axvline")):
        getattr(ax, line)(neighbours, color=GREY, linestyle="--", linewidth=1, label="3 nearest neighbours")
    curves.set(xlabel="step", ylabel="test accuracy", ylim=(0, 1))
    curves.legend(frameon=False, fontsize=8, loc="lower right")
    bars.set(xlabel="test accuracy after the last step", xlim=(0, 1), yticks=range(len(fits)))
    bars.set_yticklabels([fit.label for fit in fits], fontsize=8)
    bars.invert_yaxis()
    return figure
