"""Options, refusals and exit status of ``demo``. Packages beyond PyTorch are imported when it runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from crate_kernels.bench import load
from crate_kernels.experiments.common import machine
from crate_kernels.experiments.common.command import INTERRUPTED, missing_packages, refuse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--output", type=Path, default=Path("demo-output"), help="folder to write (%(default)s)")
    parser.add_argument("--fresh", action="store_true", help="start anew, whatever checkpoint is in that folder")
    parser.add_argument("--quick", action="store_true", help="one epoch, to see every part; the model stays poor")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (%(default)s)")
    parser.add_argument("--backend", help="of the operators; by default the best available")
    parser.add_argument("--device", help="cuda where there is one, else cpu, by default")


def run(args: argparse.Namespace) -> int:
    """Train, compare, measure and draw.

    Returns:
        0; 1 if fused and naive losses disagree or the weights are not finite; 2 if it cannot run as asked;
        130 if interrupted.
    """
    if lacking := missing_packages():
        return refuse("demo", lacking)
    if args.seed < 0:
        return refuse("demo", f"--seed must be >= 0, got {args.seed}")
    try:
        device = machine.choose(args.device, ("mssa", "ista"), args.backend)
    except (RuntimeError, ValueError, NotImplementedError, AssertionError) as error:
        return refuse("demo", str(error).partition("\n")[0])
    if args.backend == "reference":
        return refuse("demo", "--backend must not be reference: that is what the others are compared with")
    load.share_cores(device, print)

    from crate_kernels.experiments.demo import checkpoint, job

    try:
        args.output.mkdir(parents=True, exist_ok=True)
        return job.run(args.output, device, args.backend, seed=args.seed, quick=args.quick, fresh=args.fresh)
    except checkpoint.Unusable as error:
        return refuse("demo", f"{error}; --fresh starts anew, --output writes elsewhere")
    except OSError as error:
        return refuse("demo", str(error))
    except KeyboardInterrupt:
        saved, again = args.output / checkpoint.NAME, " without --fresh" if args.fresh else ""
        print(f"\nInterrupted. The same command{again} goes on from {saved}." if saved.exists() else "\nInterrupted.")
        return INTERRUPTED
