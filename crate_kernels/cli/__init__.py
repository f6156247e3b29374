"""The command line: ``python -m crate_kernels VERB``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from crate_kernels import __version__

_VERBS = {
    "info": "what is installed, and which backend each operator can use",
    "verify": "hold every available backend against float64 on named cases",
    "bench": "time our backends beside PyTorch's own on this machine, or compare two such runs",
    "plot": "draw a file of benchmark results",
    "demo": "train a CRATE on real digits, compare it with the naive form, draw what is inside",
    "denoise": "SNR of a noisy mixture through attention-only layers, against AoT's theorem and figure",
    "icl": "linear regression in context, by attention alone and by a standard transformer",
    "redunet": "networks built forward by rate reduction: three Gaussians, and digits turned by any angle",
    "layers": "coding rate, sparsity, subspaces and tokens of a CRATE, layer by layer, as it is trained",
    "classify": "CRATE and its variants, CRATE-alpha, ToST and AoT, trained alike on real digits",
    "mae": "what a CRATE-MAE fills into real digits, and what a linear probe reads from it",
    "language": "causal CRATE, ToST and AoT on English, byte by byte",
    "build": "compile the C++ extension into the user's cache",
    "tune": "time the Triton kernels' configurations on this GPU and keep the fastest",
}
_PIPE_CLOSED = 141  # 128 + SIGPIPE, as shells have it


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit status.

    Args:
        argv: arguments without the program's name; those of the process by default.
    """
    parser = argparse.ArgumentParser(prog="crate_kernels", description="Fused operators for white-box transformers.")
    parser.add_argument("--version", action="version", version=f"crate_kernels {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, summary in _VERBS.items():
        verb = verbs.add_parser(name, help=summary, description=summary)
        module = import_module(f"{__name__}.{name}")
        module.add_arguments(verb)
        verb.set_defaults(run=module.run)
    try:
        args = parser.parse_args(argv)
        status = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has gone, as in `info | head`. Python flushes once more at exit: into nothing.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _PIPE_CLOSED
    return status
