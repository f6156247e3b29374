"""Options, refusals and exit status of ``demo``; what it needs beyond PyTorch is imported when it runs."""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

from crate_kernels import _backend

_NEEDS = {"matplotlib": "matplotlib", "rich": "rich", "safetensors": "safetensors", "sklearn": "scikit-learn"}
_INTERRUPTED = 130  # 128 + SIGINT, as shells have it


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
    missing = [package for module, package in _NEEDS.items() if find_spec(module) is None]
    if missing:
        return _refuse(f"not installed: {', '.join(missing)}; pip install 'crate-kernels[demo]' brings them")
    if args.seed < 0:
        return _refuse(f"--seed must be >= 0, got {args.seed}")
    try:
        device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(1, device=device).item()
        for op in ("mssa", "ista"):
            _backend.resolve(op, args.backend, device, torch.float32)
    except (RuntimeError, ValueError, NotImplementedError, AssertionError) as error:
        return _refuse(str(error).partition("\n")[0])
    if args.backend == "reference":
        return _refuse("--backend must not be reference: that is what the others are compared with")

    from crate_kernels.cli.demo import checkpoint, job

    try:
        args.output.mkdir(parents=True, exist_ok=True)
        return job.run(args.output, device, args.backend, seed=args.seed, quick=args.quick, fresh=args.fresh)
    except checkpoint.Unusable as error:
        return _refuse(f"{error}; --fresh starts anew, --output writes elsewhere")
    except OSError as error:
        return _refuse(str(error))
    except KeyboardInterrupt:
        saved, again = args.output / checkpoint.NAME, " without --fresh" if args.fresh else ""
        print(f"\nInterrupted. The same command{again} goes on from {saved}." if saved.exists() else "\nInterrupted.")
        return _INTERRUPTED


def _refuse(reason: str) -> int:
    print(f"demo: {reason}", file=sys.stderr)
    return 2
