"""Run the tests on every supported Python, PyTorch, Triton and compiler, each in a fresh environment.

``python -m tests.tools.ship.matrix`` prints one table. A cell that has passed or failed on these sources is not run
again; its environment stays, so that a second run is quick. What cannot be had on this machine says why. uv makes the
environments, and brings a Python that is not there.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from crate_kernels._core import files
from tests.tools.sources import ROOT, digest

FOLDER = ROOT / "matrix-output"
TOOLS = (
    "accelerate",
    "hypothesis",
    "matplotlib",
    "ninja",
    "pytest>=9",
    "pytest-xdist",
    "rich",
    "safetensors",
    "scikit-learn",
    "transformers",
)
PARTS = {
    "smoke": ("tests/ops/test_contract.py", "tests/ops/test_philox.py", "tests/test_house.py"),
    "main": (
        "tests/ops",
        "tests/nn",
        "tests/models",
        "tests/patch",
        "tests/core",
        "tests/launch",
        "tests/integrations",
    ),
    "whole": ("tests",),
}


@dataclass(frozen=True)
class Cell:
    """One environment: a Python, a PyTorch, a Triton if not PyTorch's own, and a C++ compiler."""

    python: str
    torch: str
    triton: str | None = None
    compiler: str = "g++"

    @property
    def name(self) -> str:
        """Name the cell's folder and its row."""
        triton = f"-triton{self.triton}" if self.triton else ""
        return f"python{self.python}-torch{self.torch}{triton}-{self.compiler}"


# Every Python on one PyTorch that has it, every PyTorch on one Python, the oldest of all, and the other compiler.
CELLS = (
    Cell("3.10", "2.11.0", "3.6.0"),
    *(Cell(python, "2.13.0", "3.7.1") for python in ("3.10", "3.11", "3.12", "3.13", "3.14")),
    Cell("3.12", "2.11.0", "3.6.0"),
    *(Cell("3.12", torch) for torch in ("2.12.1", "2.14.1", "2.15.0")),
    Cell("3.15", "2.15.0"),
    Cell("3.11", "2.13.0", "3.6.0"),
    Cell("3.11", "2.13.0", "3.7.1", "clang++"),
)


class Missing(RuntimeError):
    """The machine cannot make a cell's environment."""


def last_line(result: subprocess.CompletedProcess[str]) -> str:
    """Return what a command said last, errors first."""
    lines = (result.stderr.strip() or result.stdout.strip() or "no output").splitlines()
    return lines[-1][:200]


def summary(log: str) -> str:
    """Return what pytest counted in the end; libraries may print after it."""
    counts = re.findall(r"^=*\s*(\d+ (?:passed|failed|error|skipped|deselected).*?) in ", log, re.MULTILINE)
    return counts[-1] if counts else "no summary"


def uv(*arguments: object) -> None:
    """Run a command of uv."""
    result = subprocess.run(["uv", *map(str, arguments)], capture_output=True, text=True)
    if result.returncode:
        raise Missing(last_line(result))


def environment(cell: Cell, folder: Path) -> Path:
    """Make the environment of a cell, or bring it up to date; return its Python."""
    python, override = folder / "bin" / "python", folder / "override.txt"
    if not shutil.which(cell.compiler):
        raise Missing(f"there is no {cell.compiler}")
    uv("venv", "--allow-existing", "--python", cell.python, folder)
    pins = [f"triton=={cell.triton}"] if cell.triton else []  # in the place of the one that PyTorch asks for
    pins += ["numpy<2.4"] if cell.triton == "3.6.0" else []  # the interpreter of Triton 3.6 needs it
    override.write_text("\n".join(pins))
    uv("pip", "install", "--python", python, "--override", override, f"torch=={cell.torch}", "numpy", *pins, *TOOLS)
    return python


def run(cell: Cell, part: str, workers: str) -> dict[str, object]:
    """Build the extension in a cell's environment, and run the tests twice: as they are, and interpreting Triton."""
    start = time.perf_counter()
    try:
        python = environment(cell, FOLDER / "environments" / cell.name)
    except Missing as reason:
        return {"passed": None, "said": str(reason)}
    home = FOLDER / "environments" / cell.name / "home"  # the cache of built extensions is in it: one a cell
    home.mkdir(exist_ok=True)
    variables = {**os.environ, "CXX": cell.compiler, "HOME": str(home), "XDG_CACHE_HOME": ""}
    command = [str(python), "-m", "pytest", "-q", "-n", workers, "--dist", "worksteal", "-p", "no:cacheprovider"]
    steps = {
        "build": ([str(python), "-m", "crate_kernels", "build"], variables),
        "tests": ([*command, *PARTS[part]], variables),
        "interpreted": ([*command, "tests/ops", "-k", "triton"], {**variables, "TRITON_INTERPRET": "1"}),
    }
    if part == "smoke":
        del steps["interpreted"]
    said = []
    passed = True
    for name, (step, own) in steps.items():
        log = FOLDER / f"{cell.name}-{name}.log"
        with log.open("w") as file:
            passed &= subprocess.run(step, cwd=ROOT, env=own, stdout=file, stderr=subprocess.STDOUT).returncode == 0
        if name != "build":
            said.append(summary(log.read_text()))
    return {"passed": passed, "said": "; ".join(said), "seconds": round(time.perf_counter() - start)}


def main() -> int:
    """Run the cells that have no result yet, print the table, and fail if a cell failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, default="main", help="the tests to run (default: %(default)s)")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="cells whose name contains one of these")
    parser.add_argument("--workers", default="auto", help="processes of pytest (default: one per core)")
    args = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    sources = digest("crate_kernels", "csrc", "tests")
    console = Console(width=140)
    table = Table("cell", "passed", "said", "s")
    failed = False
    for cell in CELLS:
        if args.only and not any(text in cell.name for text in args.only):
            continue
        path = FOLDER / f"{cell.name}-{args.part}.json"
        result = json.loads(path.read_text()) if path.exists() else {}
        if result.get("sources") != sources or result["passed"] is None:
            console.print(f"{cell.name} ...", style="dim")
            result = {"sources": sources, **run(cell, args.part, args.workers)}
            files.put(path, f"{json.dumps(result, indent=1)}\n".encode())
        failed |= result["passed"] is False
        word = {True: "yes", False: "[red]no[/]", None: "not to be had"}[result["passed"]]
        table.add_row(cell.name, word, str(result["said"]), str(result.get("seconds", "")))
    console.print(table)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
