"""What kernels use of a GPU, as NVRTC's assembler reports it: ``python -m tests.cuda.resources`` records it.

``--op`` and ``--arch`` record a part anew, and leave the rest as it is.

``resources.json`` has registers, spilled bytes and static shared memory, by kernel and architecture, for one version
of NVRTC.
"""

import argparse
import json
import os
import re
import tempfile
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

from crate_kernels._core import backends
from crate_kernels._cuda import cubins, sources
from tests.cuda import compilers, report

RECORDED = Path(__file__).with_suffix(".json")
CAPABILITIES = (75, 80, 90)
# Of a multiprocessor of sm_90; a block takes so many bytes of shared memory beside what it asks for.
REGISTERS, THREADS, BLOCKS, SHARED, RESERVED = 65536, 2048, 32, 233472, 1024
PLANNED = tuple(op for op in backends.OPS if backends._is_there(f"crate_kernels.ops.{op}.cuda"))


def kernels(op, capability=None):
    """List the kernels that an operator's planner launches on any GPU; with ``capability``, its GPU's too."""
    planner = import_module(f"crate_kernels.ops.{op}.cuda")
    own = getattr(planner, "hopper_kernels", list) if capability == 90 else list
    return [*planner.kernels(), *own()]


@contextmanager
def standard_error():
    """Collect what C code writes to the process's standard error; return a function that gives it."""
    with tempfile.TemporaryFile() as file:
        before = os.dup(2)
        os.dup2(file.fileno(), 2)

        def written():
            file.seek(0)
            return file.read().decode()

        try:
            yield written
        finally:
            os.dup2(before, 2)
            os.close(before)


def built(compiler, kernel, capability, *others):
    """Compile a kernel, and others of its header by their names.

    The assembler may not wait for products of warp groups where the program does not: it says so by C75xx. Where it
    works on functions apart, these lines are in no log, but in standard error.
    """
    options, names = [*cubins.options(compiler), "--ptxas-options=-v"], [kernel.name, *others]
    texts = sources.headers(kernel.header)
    with standard_error() as written:
        made = compiler.compile(sources.unit(kernel), compiler.architecture(capability), options, texts, names)
        said = made.said + written()
    assert "(C75" not in said, said
    return made


def compiled(compiler, kernel, capability):
    """Compile a kernel; return the cubin, and the report on every kernel in it."""
    made = built(compiler, kernel, capability)
    return made.binary, report.kernels(made.said)


def measured(compiler, op, capability):
    """Return registers, spilled bytes and static shared memory of an operator's kernels, by name."""
    found = {}
    for kernel in kernels(op, capability):
        for one in compiled(compiler, kernel, capability)[1]:
            found[one.name] = [one.registers, one.spills, one.shared]
    return found


def blocks_per_multiprocessor(registers, threads, shared):
    """Return how many blocks a multiprocessor of sm_90 has at once."""
    warps = REGISTERS // (-(-registers // 8) * 8 * 32)  # warps get registers in units of 256
    return min(warps // (threads // 32), SHARED // (shared + RESERVED), THREADS // threads, BLOCKS)


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m tests.cuda.resources", description=__doc__)
    parser.add_argument("--op", action="append", choices=PLANNED, help="an operator (default: all)")
    parser.add_argument("--arch", action="append", type=int, choices=CAPABILITIES, help="a GPU (default: all)")
    args = parser.parse_args(argv)
    ops, archs = args.op or PLANNED, args.arch or CAPABILITIES
    compiler = compilers.found()
    if compiler is None:
        parser.error("there is no NVRTC: pip install nvidia-cuda-nvrtc")
    version, found = "{}.{}".format(*compiler.version), json.loads(RECORDED.read_text())
    if found["nvrtc"] != version and (args.op or args.arch):
        parser.error(f"the rest is recorded of NVRTC {found['nvrtc']}, and this is {version}: record all")
    for op in ops:
        for arch in archs:
            found["kernels"].setdefault(op, {})[f"sm_{arch}"] = measured(compiler, op, arch)
    text = json.dumps({"nvrtc": version, "kernels": found["kernels"]}, indent=1)
    RECORDED.write_text(re.sub(r"\[\s+(\d+),\s+(\d+),\s+(\d+)\s+\]", r"[\1, \2, \3]", text) + "\n")


if __name__ == "__main__":
    main()
