"""Read the report of NVRTC's assembler on every kernel."""

import re
import shutil
import subprocess
from dataclasses import dataclass


@dataclass(frozen=True)
class Kernel:
    """Resources of a kernel: registers, and bytes of stack, spills and static shared memory."""

    name: str
    registers: int
    stack: int
    spills: int
    shared: int


_ENTRY = re.compile(r"Compiling entry function '(\S+)' for")
_MEMORY = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers(.*)")
_SHARED = re.compile(r"(\d+) bytes smem")


def kernels(text):
    """List the kernels of the assembler's report, by their names in C++."""
    found, name, memory = [], None, None
    for line in text.splitlines():
        if entry := _ENTRY.search(line):
            name = entry[1]
        elif (m := _MEMORY.search(line)) and name is not None:
            memory = [int(n) for n in m.groups()]
        elif (used := _USED.search(line)) and memory is not None:
            shared = _SHARED.search(used[2])
            found.append((name, int(used[1]), memory[0], memory[1] + memory[2], int(shared[1]) if shared else 0))
            name = memory = None
    names = [_short(name) for name in _demangled([row[0] for row in found])]
    return [Kernel(name, *row[1:]) for name, row in zip(names, found, strict=True)]


def _demangled(names):
    tool = shutil.which("c++filt")
    if tool is None or not names:
        return names
    done = subprocess.run([tool], input="\n".join(names), capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def _short(name):
    """Drop the result, the namespaces and the arguments: void a::b<a::c>(d) is b<c>."""
    name = name.replace("(anonymous namespace)::", "").replace("crate_kernels::", "")
    name = re.sub(r"\((?:int|long|bool|unsigned int)\)(-?\d+)", r"\1", name)
    depth, end = 0, len(name)
    for place, letter in enumerate(name):
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and depth == 0:
            end = place
            break
    return name[:end].removeprefix("void ")
