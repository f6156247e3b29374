"""The job of ``demo``, from digits to report."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

from rich.progress import Progress, SpinnerColumn, TextColumn
from safetensors.torch import save as serialize

from crate_kernels._core.files import put
from crate_kernels.experiments.common.fit import train
from crate_kernels.experiments.common.trial import Trial
from crate_kernels.experiments.demo import compare, data, report, whitebox
from crate_kernels.experiments.demo.settings import DemoSettings
from crate_kernels.experiments.demo.training import Training, fresh_model

_SHOWN = (2, 3, 4, 5, 7, 8)
_ROUNDS, _QUICK_ROUNDS = 15, 3


def run(trial: Trial, settings: DemoSettings) -> int:
    """Run all parts; return 1 if the fused losses are not the naive ones or the weights are not finite, else 0."""
    quick, device, folder = trial.preset == "quick", trial.device, trial.folder
    digits = data.load()
    neighbours = data.nearest_neighbours(digits)
    settings = replace(settings, seed=trial.seed)
    training = Training(settings, digits, trial.backend, device)
    trial.say(f"{digits}\n3 nearest neighbours, on pixels: test accuracy {neighbours:.4f}")
    trial.say(f"CRATE, operators of backend {training.fused}, on {trial.machine['device']}")
    train(training, trial)
    start = fresh_model(settings, training.config, device)
    with Progress(SpinnerColumn(), TextColumn("{task.description}"), console=trial.console, transient=True) as progress:
        task = progress.add_task("")

        def doing(what: str) -> None:
            progress.update(task, description=what)
            if not trial.console.is_terminal:
                trial.say(what)

        doing("repeating the first steps with the naive equations")
        agreement = compare.agreement(training, quick)
        if not all(p.isfinite().all() for p in training.model.parameters()):
            trial.say(_verdict(agreement))
            trial.say(f"{training.done} steps left weights that are not finite: nothing to measure or draw")
            return 1
        config = {**asdict(training.config), "backend": None}  # the next machine may have a better backend
        put(folder / "crate.safetensors", serialize(training.model.state_dict(), {"config": json.dumps(config)}))
        doing("timing a training step, naive and fused")
        costs = compare.costs(settings, digits, trial.backend, device, _QUICK_ROUNDS if quick else _ROUNDS)
        doing("looking inside")
        outcome = report.Outcome(
            training=training,
            neighbours=neighbours,
            agreement=agreement,
            costs=costs,
            before=whitebox.measure(start, digits, device),
            after=whitebox.measure(training.model, digits, device),
            attention=whitebox.class_attention(training.model, digits, device, _SHOWN),
        )
        doing("drawing")
        report.write(outcome, trial)
    _print(outcome, trial)
    trial.say(f"Open {folder / 'report.html'}")
    return 0 if agreement.agrees else 1


def _verdict(agreement: compare.Agreement) -> str:
    verdict = "agrees with" if agreement.agrees else "[bold]DISAGREES[/bold] with"
    steps = len(agreement.naive)
    return (
        f"Same model: the fused loss {verdict} the naive one over {steps} steps, at most {agreement.largest:.1e} apart"
    )


def _print(outcome: report.Outcome, trial: Trial) -> None:
    trial.compare(report.cost_rows(outcome.costs), ("", "naive", "fused", "ratio"))
    depth = outcome.training.config.depth
    trial.say(_verdict(outcome.agreement))
    before, after = outcome.before.summary(), outcome.after.summary()
    for name, key, places in (("coding rate after MSSA", "coding_rate", 1), ("nonzeros after ISTA", "nonzeros", 3)):
        change = ", ".join(f"{before[key][i]:.{places}f} to {after[key][i]:.{places}f}" for i in range(depth))
        trial.say(f"White box: {name}, layers 1 to {depth}, before to after training: {change}")
    seconds = outcome.training.seconds
    took = "" if seconds is None else f", trained in {seconds:.0f} s"
    trial.say(f"Test accuracy {outcome.accuracy:.4f}{took}; 3 nearest neighbours {outcome.neighbours:.4f}")
