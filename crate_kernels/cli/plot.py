"""``plot``: the figures of a file of benchmark results."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("results", type=Path, nargs="+", help="JSON files of one device, of bench or the benchmarks")
    parser.add_argument("--output", type=Path, help="folder of the PNG files; the results' own by default")


def run(args: argparse.Namespace) -> int:
    """Draw every figure that the results have rows for; return 1 if there is none, 2 if a file cannot be."""
    from crate_kernels.bench import rows

    try:
        results = rows.read_all(args.results)
    except (OSError, ValueError) as error:
        print(f"plot: {error}")
        return 2
    try:
        from crate_kernels._core import files
        from crate_kernels.bench import drawing, figures
    except ImportError as error:
        print(f"plot: needs {error.name} (pip install {error.name})")
        return 2
    found = figures.every(results)
    folder = args.output or args.results[0].parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, figure in found.items():
            print(files.put(folder / f"{name}.png", drawing.png(figure)))
    except OSError as error:
        print(f"plot: {error}")
        return 2
    if not found:
        print(f"plot: {args.results[0]} has no row that a figure shows")
    return int(not found)
