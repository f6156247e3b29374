"""Options, refusals and exit status of an experiment. Packages beyond PyTorch are imported when it runs."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from crate_kernels._core import backends, files
from crate_kernels.bench import load
from crate_kernels.experiments.common import machine

INTERRUPTED = 130  # 128 + SIGINT, as shells have it
NEEDS = {"matplotlib": "matplotlib", "rich": "rich", "sklearn": "scikit-learn"}


def missing_packages() -> str | None:
    """Name the missing packages and the command that installs them; None if all are installed."""
    missing = [package for module, package in NEEDS.items() if find_spec(module) is None]
    if not missing:
        return None
    return f"not installed: {', '.join(missing)}; pip install {' '.join(missing)}"


def refuse(subcommand: str, reason: str) -> int:
    """Print why nothing was done; return the exit status."""
    print(f"{subcommand}: {reason}", file=sys.stderr)
    return 2


@dataclass(frozen=True)
class Experiment:
    """One subcommand that measures and draws.

    Its folder ``crate_kernels/experiments/<name>`` has ``job.run(trial, settings)`` and ``settings.PRESETS``: settings
    by name. ``"default"`` finishes in minutes on a small CPU, ``"paper"`` has the published sizes, ``"quick"`` runs
    every part. Without ``"paper"``, the option ``--quick`` takes the place of ``--preset``.

    Attributes:
        name: of the subcommand. summary: for ``--help``.
        lasts: how long ``"default"`` took on one core, for ``--help``.
        ops: the operators it needs. A backend that lacks one is refused.
        baseline: a backend with which the others are compared; refused too.
    """

    name: str
    summary: str
    lasts: str = ""
    ops: tuple[str, ...] = ()
    baseline: str = ""

    def presets(self) -> dict[str, Any]:
        """Return the settings by name."""
        return import_module(f"crate_kernels.experiments.{self.name}.settings").PRESETS

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options."""
        folder, presets = Path(f"{self.name}-output"), list(self.presets())
        parser.add_argument("--output", type=Path, default=folder, help="output folder (%(default)s)")
        if "paper" in presets:
            sizes = f"size of the experiment (%(default)s: {self.lasts} on one core of a Zen 4 processor)"
            parser.add_argument("--preset", choices=presets, default="default", help=sizes)
        else:
            quick = "one epoch: shows every part; the model stays inaccurate"
            parser.add_argument(
                "--quick", dest="preset", action="store_const", const="quick", default="default", help=quick
            )
        parser.add_argument("--fresh", action="store_true", help="start anew: ignore what was trained in that folder")
        parser.add_argument("--seed", type=int, default=0, help="seed of all random numbers (%(default)s)")
        if self.ops:
            parser.add_argument("--backend", help="backend of the operators; default: the best available")
        parser.add_argument("--device", help="default: cuda if there is a GPU, else cpu")

    def run(self, args: argparse.Namespace) -> int:
        """Run the experiment.

        Returns:
            0; 1 if one of the experiment's own checks fails; 2 if it cannot run as asked; 130 if interrupted.
        """
        if lacking := missing_packages():
            return refuse(self.name, lacking)
        if args.seed < 0:
            return refuse(self.name, f"--seed must be >= 0, got {args.seed}")
        backend = args.backend if self.ops else None
        if backend is not None and backend not in backends.names():
            return refuse(self.name, f"--backend must be one of {', '.join(backends.names())}, got {backend!r}")
        try:
            device = machine.choose(args.device, self.ops, backend)
        except (RuntimeError, ValueError, NotImplementedError) as error:
            return refuse(self.name, str(error).partition("\n")[0])
        if backend and backend == self.baseline:
            return refuse(self.name, f"--backend must not be {backend}: that is what the others are compared with")
        load.share_cores(device, print)

        from crate_kernels.experiments.common.fit import Unusable
        from crate_kernels.experiments.common.trial import Trial

        job = import_module(f"crate_kernels.experiments.{self.name}.job")
        try:
            args.output.mkdir(parents=True, exist_ok=True)
            with files.owned(args.output):
                trial = Trial(self.name, args.output, device, backend, args.seed, args.preset, args.fresh, self.ops)
                return job.run(trial, self.presets()[args.preset])
        except Unusable as error:
            return refuse(self.name, f"{error}; --fresh starts anew, --output writes elsewhere")
        except OSError as error:
            return refuse(self.name, str(error))
        except KeyboardInterrupt:
            saved, again = any(args.output.glob("*checkpoint*")), " without --fresh" if args.fresh else ""
            went_on = f" The same command{again} resumes from {args.output}." if saved else ""
            print(f"\nInterrupted.{went_on}")
            return INTERRUPTED
