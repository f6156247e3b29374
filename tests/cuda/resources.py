"""What kernels use of a GPU, as NVRTC's assembler reports it: ``python -m tests.cuda.resources`` records it.

``resources.json`` has registers, spilled bytes and static shared memory, by kernel and architecture, for one version
of NVRTC.
"""

import json
import re
from importlib import import_module
from pathlib import Path

from crate_kernels._core import backends
from crate_kernels._cuda import cubins, sources
from tests.cuda import compilers, report

RECORDED = Path(__file__).with_suffix(".json")
CAPABILITIES = (75, 80, 90)
PLANNED = tuple(op for op in backends.OPS if backends._is_there(f"crate_kernels.ops.{op}.cuda"))


def kernels(op):
    """List the kernels that an operator's planner launches."""
    return import_module(f"crate_kernels.ops.{op}.cuda").kernels()


def compiled(compiler, kernel, capability):
    """Compile a kernel; return the cubin, and the report on every kernel in it."""
    options = [*cubins.options(compiler), "--ptxas-options=-v"]
    texts = sources.headers(kernel.header)
    made = compiler.compile(sources.unit(kernel), compiler.architecture(capability), options, texts, [kernel.name])
    return made.binary, report.kernels(made.said)


def measured(compiler, op, capability):
    """Return registers, spilled bytes and static shared memory of an operator's kernels, by name."""
    found = {}
    for kernel in kernels(op):
        for one in compiled(compiler, kernel, capability)[1]:
            found[one.name] = [one.registers, one.spills, one.shared]
    return found


def main():
    compiler = compilers.found()
    made = {op: {f"sm_{arch}": measured(compiler, op, arch) for arch in CAPABILITIES} for op in PLANNED}
    text = json.dumps({"nvrtc": "{}.{}".format(*compiler.version), "kernels": made}, indent=1)
    RECORDED.write_text(re.sub(r"\[\s+(\d+),\s+(\d+),\s+(\d+)\s+\]", r"[\1, \2, \3]", text) + "\n")


if __name__ == "__main__":
    main()
