"""Compile the CPU kernels with ThreadSanitizer, run every operator on four threads, and see that a race is reported."""

import argparse
import os
import shlex
import subprocess
import sys
from pathlib import Path

from tests.tools import compiling

HERE = Path(__file__).parent
STANDIN = HERE.parent / "standin"  # headers in place of PyTorch's
CSRC = HERE.parents[2] / "csrc"
LEVELS = ("portable", "avx2", "avx512", "avx512_bf16", "amx")
OPERATORS = ("mssa", "tssa", "ista")
FLAGS = (
    "-std=c++17", "-O1", "-g1", "-fsanitize=thread", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi",
    "-Wno-ignored-attributes", "-DTORCH_TARGET_VERSION=0", f"-I{STANDIN}",
)  # fmt: skip
REPLACED = {"parallel": ["-Dclock_gettime=frozen_clock"], "arena": ["-Dposix_memalign=patient_memalign"]}  # by main.cpp
REPORT = "WARNING: ThreadSanitizer: data race"


def main():
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.threads", description=__doc__)
    parser.add_argument("--level", action="append", choices=LEVELS, help="instruction sets (default: portable)")
    parser.add_argument("--out", type=Path, default=Path("build/threads"), help="folder of the build (%(default)s)")
    arguments = parser.parse_args()
    levels = arguments.level or ["portable"]
    program = build(arguments.out, levels)
    status = 0
    for level in levels:
        found = run(program, level)
        print(found.stdout + found.stderr, end="")
        status |= found.returncode
        planted = run(program, level, "race")
        seen = planted.returncode != 0 and REPORT in planted.stderr
        print(f"{level}: {'a race' if found.returncode else 'no race'}; a planted one is {'' if seen else 'NOT '}seen")
        status |= not seen
    return int(bool(status))


def run(program, *arguments):
    """Run the cases; the exit status is not 0 if a race was reported."""
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=1800)


def build(out, levels):
    """Compile the program for these levels and the portable one, which every table falls back on; return its path."""
    levels = ["portable", *(level for level in levels if level != "portable")]
    out.mkdir(parents=True, exist_ok=True)
    common = CSRC / "common" / "cpu"
    sources = [*HERE.glob("*.cpp"), *(common / f"{name}.cpp" for name in ("arena", "capability", "parallel"))]
    sources += [common / "isa" / f"{op}_{level}.cpp" for op in OPERATORS for level in levels if has(op, level)]
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    objects = compiling.objects([*compiler, *FLAGS], sources, out, lambda source: REPLACED.get(source.stem, []))
    program = out / "threads"
    # The table of a level that is not compiled is the portable one's; no case asks for it.
    absent = [(op, level) for op in OPERATORS for level in LEVELS[1:] if level not in levels and has(op, level)]
    names = [f"-Wl,--defsym={mangled(op, level)}={mangled(op, 'portable')}" for op, level in absent]
    compiling.run([*compiler, "-fsanitize=thread", *objects, *names, "-o", program])
    return program.resolve()


def has(op, level):
    """Whether an operator has other kernels at a level."""
    return (CSRC / "common" / "cpu" / "isa" / f"{op}_{level}.cpp").exists()


def mangled(op, level):
    """Return the symbol of an operator's table of kernels at a level."""
    name = f"{op}_{level}"
    return f"_ZN13crate_kernels{len(name)}{name}E"


if __name__ == "__main__":
    sys.exit(main())
