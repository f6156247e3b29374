"""The training loop with a progress bar, checkpoints, and a Ctrl-C that loses no completed step."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from crate_kernels.experiments.common import interrupts
from crate_kernels.experiments.demo import checkpoint
from crate_kernels.experiments.demo.training import Training, steps_per_epoch


def train(training: Training, folder: Path, console: Console) -> float:
    """Train from the current step to the end; return the seconds that it took.

    Raises:
        KeyboardInterrupt: interrupted; the checkpoint in ``folder`` holds every step that was completed.
    """
    epoch = steps_per_epoch(training.settings, training.digits)
    bar = Progress(
        TextColumn("training"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}  {task.fields[state]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    start = perf_counter()
    with interrupts.deferred() as received, bar:
        task = bar.add_task("", total=training.total, completed=training.done, state="")
        while training.done < training.total:
            loss = training.step()
            if training.done % epoch == 0:
                accuracy = training.evaluate()
                checkpoint.save(training, folder)
                if not console.is_terminal:  # a log has no progress bar
                    console.print(f"  step {training.done}/{training.total}  loss {loss:.3f}  accuracy {accuracy:.4f}")
            seen = f"  test accuracy {training.accuracies[-1][1]:.4f}" if training.accuracies else ""
            bar.update(task, completed=training.done, state=f"loss {loss:.3f}{seen}")
            if received:
                checkpoint.save(training, folder)
                raise KeyboardInterrupt
    return perf_counter() - start
