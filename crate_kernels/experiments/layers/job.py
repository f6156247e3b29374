"""The experiment: train, measure at chosen epochs, draw the internals."""

from __future__ import annotations

from statistics import fmean

from crate_kernels.experiments.common.trial import Trial
from crate_kernels.experiments.demo import data
from crate_kernels.experiments.demo.settings import Settings as TrainingSettings
from crate_kernels.experiments.demo.training import Training
from crate_kernels.experiments.layers import figures, watching
from crate_kernels.experiments.layers.settings import Settings


def run(trial: Trial, settings: Settings) -> int:
    """Train, measure and draw."""
    digits = data.load()
    training = Training(training_settings(settings, trial.seed), digits, trial.backend, trial.device)
    trial.say(f"{digits.name}; a CRATE of {settings.depth} layers, backend {training.fused}")
    seen = watching.train(training, trial, settings.looks)
    tokens = watching.tokens(training, digits, settings.shown)
    first, last = seen[min(seen)], seen[max(seen)]
    trial.compare(
        [
            ["test accuracy", "-", f"{first['accuracy']:.4f} before, {last['accuracy']:.4f} after training"],
            ["coding rate Rc by layer, before training", "-", _series(first["coding_rate"], 1)],
            ["  after training", "falls layer by layer", _series(last["coding_rate"], 1)],
            ["  layers at which it falls", "most", _falls(last["coding_rate"])],
            ["nonzeros by layer, before training", "-", _series(first["nonzeros"], 3)],
            ["  after training", "fall layer by layer", _series(last["nonzeros"], 3)],
            ["  layers at which they fall", "most", _falls(last["nonzeros"])],
            [
                "overlap of two heads' subspaces, mean over layers",
                "small",
                f"{fmean(last['coherence_between_heads']):.2f} (random: {settings.dim_head / settings.dim:.2f})",
            ],
        ]
    )
    trial.write(
        {
            "epochs": figures.epochs(seen),
            "heatmaps": figures.heatmaps(tokens),
            "subspaces": figures.subspaces(tokens, settings.heads),
            "principal": figures.principal(tokens),
        },
        {"digits": digits.name, "epochs": seen, "principal_components_explain": tokens.explained},
        settings,
    )
    return 0


def training_settings(settings: Settings, seed: int) -> TrainingSettings:
    """Return the demo's training settings with another size and length."""
    own = ("epochs", "batch_size", "learning_rate", "dim", "depth", "heads", "dim_head")
    return TrainingSettings(seed=seed, **{name: getattr(settings, name) for name in own})


def _series(values: list[float], places: int) -> str:
    return ", ".join(f"{value:.{places}f}" for value in values)


def _falls(values: list[float]) -> str:
    falls = [index + 2 for index in range(len(values) - 1) if values[index + 1] < values[index]]
    return f"{', '.join(str(layer) for layer in falls) or 'none'} of 2-{len(values)}"
