"""The job of ``demo``, from digits to report."""

from __future__ import annotations

from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn
from rich.table import Table

from crate_kernels.experiments.common.machine import describe
from crate_kernels.experiments.demo import checkpoint, compare, data, loop, report, whitebox
from crate_kernels.experiments.demo.training import Settings, Training, fresh_model

_SHOWN = (2, 3, 4, 5, 7, 8)
_ROUNDS, _QUICK_ROUNDS = 15, 3


def run(folder: Path, device: torch.device, backend: str | None, *, seed: int, quick: bool, fresh: bool) -> int:
    """Run all parts; return 1 if the fused losses are not the naive ones or the weights are not finite, else 0.

    Raises:
        checkpoint.Unusable: the checkpoint in ``folder`` is of another run, or cannot be read.
        KeyboardInterrupt: interrupted; what was trained is in the checkpoint.
    """
    console = Console()
    digits = data.load()
    neighbours = data.nearest_neighbours(digits)
    settings = Settings(seed=seed, epochs=1) if quick else Settings(seed=seed)
    training = Training(settings, digits, backend, device)
    machine = describe(device)
    console.print(f"{digits.name}: {len(digits.train_labels)} to learn from, {len(digits.test_labels)} to be tested on")
    console.print(f"3 nearest neighbours, on pixels: test accuracy {neighbours:.4f}")
    console.print(f"CRATE, operators of backend {training.fused}, on {machine['device']}", highlight=False)

    seconds = _train(training, folder, console, fresh=fresh)
    start = fresh_model(settings, training.config, device)
    with Progress(SpinnerColumn(), TextColumn("{task.description}"), console=console, transient=True) as progress:
        task = progress.add_task("")

        def doing(what: str) -> None:
            progress.update(task, description=what)
            if not console.is_terminal:
                console.print(what)

        doing("repeating the first steps with the naive equations")
        agreement = compare.agreement(training, quick)
        if not all(p.isfinite().all() for p in training.model.parameters()):
            console.print(_verdict(agreement))
            console.print(f"{training.done} steps left weights that are not finite: nothing to measure or draw")
            return 1
        checkpoint.save_model(training, folder)
        doing("timing a training step, naive and fused")
        costs = compare.costs(settings, digits, backend, device, _QUICK_ROUNDS if quick else _ROUNDS)
        doing("looking inside")
        outcome = report.Outcome(
            training=training,
            neighbours=neighbours,
            seconds=seconds,
            agreement=agreement,
            costs=costs,
            before=whitebox.measure(start, digits, device),
            after=whitebox.measure(training.model, digits, device),
            attention=whitebox.class_attention(training.model, digits, device, _SHOWN),
            machine=machine,
        )
        doing("drawing")
        paths = report.write(outcome, folder)
    _print(outcome, console)
    console.print(f"Wrote {len(paths)} files beside the model; open {folder / 'report.html'}", highlight=False)
    return 0 if agreement.agrees else 1


def _train(training: Training, folder: Path, console: Console, *, fresh: bool) -> float | None:
    """Train or resume; return the seconds of an uninterrupted training, else None."""
    if fresh or not checkpoint.resume(training, folder):
        return loop.train(training, folder, console)
    if training.done == training.total:
        console.print("Already trained: this is measured and drawn again; --fresh trains anew")
    else:
        console.print(f"Going on from step {training.done} of {training.total}")
        loop.train(training, folder, console)
    return None


def _verdict(agreement: compare.Agreement) -> str:
    verdict = "agrees with" if agreement.agrees else "[bold]DISAGREES[/bold] with"
    worst = torch.tensor(agreement.differences).max().item()  # nan if any is nan; Python's max depends on the order
    steps = len(agreement.naive)
    return f"Same model: the fused loss {verdict} the naive one over {steps} steps, at most {worst:.1e} apart"


def _print(outcome: report.Outcome, console: Console) -> None:
    table = Table()
    for column in ("", "naive", "fused", "ratio"):
        table.add_column(column, justify="left" if column == "" else "right")
    for row in report.cost_rows(outcome.costs):
        table.add_row(*row)
    console.print(table)
    depth = outcome.training.config.depth
    console.print(_verdict(outcome.agreement))
    before, after = outcome.before.summary(), outcome.after.summary()
    for name, key, places in (("coding rate after MSSA", "coding_rate", 1), ("nonzeros after ISTA", "nonzeros", 3)):
        change = ", ".join(f"{before[key][i]:.{places}f} to {after[key][i]:.{places}f}" for i in range(depth))
        console.print(f"White box: {name}, layers 1 to {depth}, before to after training: {change}")
    took = "" if outcome.seconds is None else f", trained in {outcome.seconds:.0f} s"
    console.print(f"Test accuracy {outcome.accuracy:.4f}{took}; 3 nearest neighbours {outcome.neighbours:.4f}")
