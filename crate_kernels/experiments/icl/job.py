"""The experiment: train the three models on both tasks, and compare them with least squares."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from crate_kernels.bench.drawing import CYCLE, GREY, axes, smoothed, whole_numbers
from crate_kernels.experiments.common.draws import seeded
from crate_kernels.experiments.common.fit import Fit, every, train
from crate_kernels.experiments.common.trial import Trial
from crate_kernels.experiments.icl import opposite, prompts
from crate_kernels.experiments.icl.settings import ICLSettings
from crate_kernels.models.aot import AoTRegression, AoTRegressionConfig, start_as_derived

_TRAINING, _TESTING = 0, 1
_REPORTED = ("losses", "seconds", "parameters")
_OPPOSITE = "AoT-MSSA, opposite heads"
_PAPER = {"AoT-MSSA": "near the transformer", "AoT-MHSA": "near the transformer", "least squares": "0 once solvable"}


def run(trial: Trial, settings: ICLSettings) -> int:
    """Train, test and draw."""
    found: dict[str, dict[str, Any]] = {}
    for task in settings.tasks:
        xs, ys, weights = prompts.draw(settings, task, settings.tests, trial.seed, _TESTING)
        variance = float(settings.nonzeros if task == "sparse" else settings.dims)
        floors = {"least squares": prompts.errors(prompts.least_squares(xs, ys), ys, variance)}
        if task == "sparse":
            guesses = prompts.knowing_the_support(xs, ys, weights)
            floors["least squares on the weights that count"] = prompts.errors(guesses, ys, variance)
        fits = {name: _fit(trial, settings, task, name, (xs, ys), variance) for name in models(settings)}
        for fit in fits.values():
            train(fit, trial)
        found[task] = {
            "floors": floors,
            "models": {name: _test_errors(fit.model, xs, ys, variance, trial) for name, fit in fits.items()},
            **{what: {name: getattr(fit, what) for name, fit in fits.items()} for what in _REPORTED},
        }
    _print_errors(trial, settings, found)
    trial.write(
        {"error": _draw_error(found), "learning": _draw_learning(found)},
        {"tasks": found, "answer_variance_is": "the number of weights that are not zero"},
        settings,
    )
    return 0


def models(settings: ICLSettings) -> dict[str, dict[str, Any]]:
    """Return the arguments of each model, by name; the standard transformer has half the layers, as in the paper."""
    mssa = {"attention": "mssa", "depth": settings.depth, "eta": settings.eta}
    mhsa = {"attention": "mhsa", "depth": settings.depth}
    if settings.opposite:
        return {"AoT-MSSA": mssa, _OPPOSITE: mssa, "AoT-MHSA": mhsa}
    transformer = {"attention": "mhsa", "depth": max(1, settings.depth // 2), "mlp": True}
    return {"AoT-MSSA": mssa, "AoT-MHSA": mhsa, "transformer": transformer}


def fresh(trial: Trial, settings: ICLSettings, name: str) -> AoTRegression:
    """Build a model as it is before the first step."""
    config = AoTRegressionConfig(
        n_dims=settings.dims,
        dim=settings.dim,
        heads=settings.heads,
        n_positions=max(101, 2 * settings.examples),
        init_std=settings.init_std,
        backend=trial.backend,
        **models(settings)[name],
    )
    with seeded(trial.seed), torch.no_grad():
        model = AoTRegression(config)
        positions = model.wpe.weight.mul_(settings.position_scale)
        if settings.paired:
            kinds = settings.position_scale * settings.init_std * torch.randn(2, settings.dim)
            pairs = positions[: 2 * settings.examples].unflatten(0, (settings.examples, 2))
            pairs.copy_(pairs[:, :1] + kinds)
        if settings.derived:
            start_as_derived(model)
    if name == _OPPOSITE:
        opposite.negate_every_second_head(model)
    return model.to(trial.device)


def _fit(
    trial: Trial, settings: ICLSettings, task: str, name: str, tests: tuple[Tensor, Tensor], variance: float
) -> Fit:
    model = fresh(trial, settings, name)

    def loss(step: int) -> Tensor:
        xs, ys, _ = prompts.draw(settings, task, settings.batch_size, trial.seed, _TRAINING, step)
        xs, ys = xs.to(trial.device), ys.to(trial.device)
        return (model(xs, ys) - ys).square().mean()

    return Fit(
        f"{name}, {task}",
        model,
        torch.optim.Adam(model.parameters(), lr=settings.rate),
        loss,
        settings.steps,
        settings.warmup,
        {**asdict(settings), "task": task, "model": name, "seed": trial.seed},
        lambda: _test_errors(model, *tests, variance, trial)[-1],
        "error after the last example",
        every(max(1, settings.steps // 5), settings.steps),
        clip=1.0,
        file=f"{task}-{name.lower()}.checkpoint",
    )


@torch.no_grad()
def _test_errors(model: torch.nn.Module, xs: Tensor, ys: Tensor, variance: float, trial: Trial) -> list[float]:
    model.eval()
    parts = zip(xs.split(256), ys.split(256), strict=True)
    predictions = torch.cat([model(x.to(trial.device), y.to(trial.device)).cpu() for x, y in parts])
    return prompts.errors(predictions, ys, variance)


def _print_errors(trial: Trial, settings: ICLSettings, found: dict[str, dict[str, Any]]) -> None:
    """Print measured errors beside the paper's words; the paper tabulates no errors."""
    rows = []
    for task, result in found.items():
        exact = settings.dims if task == "linear" else settings.nonzeros
        for name, errors in {**result["floors"], **result["models"]}.items():
            published = _PAPER.get(name, "-")
            marks = dict.fromkeys((0, min(exact, len(errors) - 1), len(errors) - 1))
            rows.append([f"{task}: {name}", published, ", ".join(f"{errors[k]:.3f} after {k}" for k in marks)])
    trial.say("Squared error over the variance of the answers: 1 is what a constant guess gets")
    trial.compare(rows)
    for task, result in found.items():
        for name, errors in result["models"].items():
            if errors[-1] > 0.9:
                trial.say(f"{task}: {name} has not learned to use its examples in {settings.steps} steps")


def _draw_error(found: dict[str, dict[str, Any]]) -> Figure:
    """Draw the error against the number of examples, beside that of least squares."""
    figure, (row,) = axes(4.8 * len(found), 3.8, 1, len(found), sharey=True)
    for ax, (task, result) in zip(row, found.items(), strict=True):
        for (name, values), style in zip(result["floors"].items(), ("--", ":"), strict=False):
            ax.plot(range(len(values)), values, style, color=GREY, label=name)
        for (name, values), colour in zip(result["models"].items(), CYCLE, strict=False):
            style = "o--" if name == "transformer" else "o-"  # dashed: it may lie on another line
            ax.plot(range(len(values)), values, style, markersize=3, color=colour, label=name)
        # The minimum-norm solution of nearly as many examples as unknowns can be far off: it may leave the figure.
        ax.set(title=f"{task} regression", xlabel="examples in context", ylim=(-0.05, 1.6))
        whole_numbers(ax)
        ax.legend(frameon=False, fontsize=8)
    row[0].set_ylabel("squared error / variance of the answers")
    return figure


def _draw_learning(found: dict[str, dict[str, Any]]) -> Figure:
    """Draw the training losses, each a mean over a hundredth of the steps."""
    figure, (row,) = axes(4.8 * len(found), 3.4, 1, len(found))
    for ax, (task, result) in zip(row, found.items(), strict=True):
        for (name, losses), colour in zip(result["losses"].items(), CYCLE, strict=False):
            ax.plot(*smoothed(losses, 100), color=colour, label=name)
        ax.set(title=f"{task} regression", xlabel="step", ylabel="training loss", ylim=(0, None))
        ax.legend(frameon=False, fontsize=8)
    return figure
