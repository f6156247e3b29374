"""One run of an experiment: its folder, its console and its progress bar."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from crate_kernels._core import files
from crate_kernels.bench import drawing
from crate_kernels.experiments.common import machine


@dataclass(eq=False)
class Trial:
    """The argument of every experiment's job.

    Attributes:
        name: of the subcommand. folder: for output files. device, backend, seed, preset, fresh: as requested.
        ops: the operators of the experiment.
    """

    name: str
    folder: Path
    device: torch.device
    backend: str | None = None
    seed: int = 0
    preset: str = "default"
    fresh: bool = False
    ops: tuple[str, ...] = ()
    console: Console = field(default_factory=Console)

    def __post_init__(self) -> None:
        self.machine = machine.describe(self.device)
        self._start = perf_counter()

    def say(self, text: str) -> None:
        """Print a line."""
        self.console.print(text, highlight=False)

    @contextmanager
    def progress(self, what: str, total: int, done: int = 0) -> Iterator[Any]:
        """Show a bar; yield ``advance(state="")``, which moves the bar by one. A log gets only the first line."""
        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}  {task.fields[state]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        if not self.console.is_terminal:
            self.say(what)
        with bar:
            task = bar.add_task(what, total=total, completed=done, state="")
            yield lambda state="": bar.update(task, advance=1, state=state)

    def compare(self, rows: Sequence[Sequence[str]], header: Sequence[str] = ("", "paper", "measured")) -> None:
        """Print published values beside measured ones."""
        table = Table()
        for index, column in enumerate(header):
            table.add_column(column, justify="right" if index else "left")
        for row in rows:
            table.add_row(*row)
        self.console.print(table)

    def write(self, figures: Mapping[str, Figure], numbers: Mapping[str, Any], settings: Any) -> None:
        """Write each figure as a PNG, and the numbers and their origin as ``metrics.json``."""
        for name, figure in figures.items():
            files.put(self.folder / f"{name}.png", drawing.png(figure))
        seconds = perf_counter() - self._start
        facts = {
            "experiment": self.name,
            "preset": self.preset,
            "seed": self.seed,
            "machine": self.machine,
            "backend": machine.backends(self.ops, self.backend, self.device) if self.ops else None,
            "settings": asdict(settings),
            "seconds": seconds,
            **numbers,
        }
        files.put(self.folder / "metrics.json", (json.dumps(facts, indent=2) + "\n").encode())
        names = ", ".join(f"{name}.png" for name in figures)
        self.say(f"Wrote {names} and metrics.json into {self.folder} after {seconds:.0f} s")
