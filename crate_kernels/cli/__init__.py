"""The command line: ``python -m crate_kernels SUBCOMMAND``."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module

from crate_kernels import __version__
from crate_kernels.experiments import EXPERIMENTS

_COMMANDS = {
    "info": "what is installed, and which backend each operator can use",
    "verify": "compare every available backend with float64 on named cases",
    "bench": "time our backends beside PyTorch's own on this machine, or compare two such runs",
    "plot": "draw a file of benchmark results",
    "build": "compile the C++ extension into the user's cache",
    "tune": "time configurations of the kernels on this GPU and keep the fastest",
}
_FORMER_OPTIONS = {"--least": "--min-change", "--most": "--max-configs"}
_PIPE_CLOSED = 141  # 128 + SIGPIPE, as in shells


def _refuse_unknown_options(parser: argparse.ArgumentParser, argv: Sequence[str]) -> None:
    """Name an option that is not there: argparse takes its value for a subcommand, or blames the whole program."""
    subcommands = next((action.choices for action in parser._actions if isinstance(action.choices, dict)), {})
    known = parser._option_string_actions
    for place, each in enumerate(argv, 1):
        name = each.partition("=")[0]
        before = known.get(argv[place - 2]) if place > 1 else None
        if each in subcommands and (before is None or before.nargs == 0):  # else it is the option's value
            return _refuse_unknown_options(subcommands[each], argv[place:])
        if name.startswith("--") and not any(option.startswith(name) for option in known):
            options = ", ".join(option for option in known if option.startswith("--"))
            parser.error(f"an option must be one of {options}, got {name}")
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status.

    Args:
        argv: arguments without the program's name; the process's arguments by default.
    """
    parser = argparse.ArgumentParser(prog="crate_kernels", description="Fused operators for white-box transformers.")
    parser.add_argument("--version", action="version", version=f"crate_kernels {__version__}")
    subcommands = parser.add_subparsers(dest="subcommand", required=True, metavar="SUBCOMMAND")
    commands = [(name, summary, import_module(f"{__name__}.{name}")) for name, summary in _COMMANDS.items()]
    for name, summary, command in (*commands, *((each.name, each.summary, each) for each in EXPERIMENTS)):
        subcommand = subcommands.add_parser(name, help=summary, description=summary)
        command.add_arguments(subcommand)
        subcommand.set_defaults(run=command.run)
    for each in sys.argv[1:] if argv is None else argv:
        if option := _FORMER_OPTIONS.get(each.partition("=")[0]):
            warnings.warn(f"{each.partition('=')[0]} is now {option}", FutureWarning, stacklevel=2)
    try:
        _refuse_unknown_options(parser, sys.argv[1:] if argv is None else argv)
        args = parser.parse_args(argv)
        status = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has closed the pipe, as in `info | head`. Python flushes again at exit: send that to devnull.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _PIPE_CLOSED
    return status
