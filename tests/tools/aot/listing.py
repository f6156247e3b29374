"""Read nvdisasm's listing: the instructions of each function, and what of them waits or moves too little at once."""

import re
from dataclasses import dataclass

_SECTION = re.compile(r"^\.text\.(\S+):")
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);")
_LABEL = re.compile(r"^(\.L\w+):")
_LINE = re.compile(r"^\s+(?:/\*[0-9a-f]+\*/\s+)?(?:@!?U?P\w+\s+)?([A-Za-z][\w.]*)\s*([^;]*)")  # NVIDIA's or AMD's
_SOURCE = re.compile(r"^\s*//## File \"(.*)\", line (\d+)")
_GLOBAL = ("LDG", "LDGSTS", "STG")
_BITS = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128}  # of an access; others have 32


@dataclass(frozen=True)
class Instruction:
    """One instruction: its name with modifiers, its operands, and the file and line of what it does, if listed."""

    opcode: str
    operands: tuple[str, ...]
    source: tuple[str, int] | None = None

    @property
    def name(self):
        """The name without modifiers."""
        return self.opcode.partition(".")[0]

    @property
    def modifiers(self):
        return self.opcode.split(".")[1:]


@dataclass(frozen=True)
class Function:
    """A function's instructions, without those that fill up the end."""

    name: str
    instructions: tuple[Instruction, ...]


def functions(text):
    """List the functions of a listing."""
    found, source = [], None
    for line in text.splitlines():
        if section := _SECTION.match(line):
            found.append((section[1], []))
        elif at := _SOURCE.match(line):
            source = at[1], int(at[2])
        elif found and (match := _INSTRUCTION.match(line)):
            operands = tuple(part.strip() for part in match[2].split(",")) if match[2].strip() else ()
            found[-1][1].append(Instruction(match[1], operands, source))
    return [Function(name, tuple(_without_padding(instructions))) for name, instructions in found]


def _without_padding(instructions):
    """Drop the NOPs at the end, and the branch to itself in front of them."""
    while instructions and instructions[-1].name == "NOP":
        instructions = instructions[:-1]
    return instructions[:-1] if instructions and instructions[-1].name == "BRA" else instructions


def serialised(function):
    """Count the warp-group products that wait for the one before, into the same sum."""
    last, waited, count = None, False, 0
    for one in function.instructions:
        if one.name == "WARPGROUP" and "DEPBAR" in one.modifiers and one.operands[-1] == "0x0":
            waited = last is not None
        elif one.name.endswith("GMMA"):
            count += waited and one.operands[0] == last and "RZ" not in one.operands
            last, waited = one.operands[0], False
    return count


def accesses(function):
    """List the instructions that load from global memory or store to it."""
    return [one for one in function.instructions if one.name in _GLOBAL]


def width(access):
    """Return the bits that a thread moves by an access to global memory."""
    return next((_BITS[word] for word in access.modifiers if word in _BITS), 32)


def widths(function):
    """Return the bits that each access to global memory moves, by "load" and "store"."""
    found = {}
    for one in accesses(function):
        found.setdefault("store" if one.name == "STG" else "load", []).append(width(one))
    return found


def loops(text):
    """List the loops of one function's listing, inner ones alone, each as the names of its instructions.

    What is behind the last exit are waits that are repeated, with branches back into the code.
    """
    labels, names, found = {}, [], []
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(names)
        elif match := _LINE.match(line):
            names.append(match[1])
            to = re.search(r"\.L\w+", match[2])
            if to and to[0] in labels and match[1].startswith(("BRA", "s_cbranch", "s_branch")):
                found.append((labels[to[0]], len(names)))
    end = max(n for n, name in enumerate(names) if name in ("EXIT", "s_endpgm"))
    found = [(first, stop) for first, stop in found if stop <= end]
    inner = [one for one in found if not any(one[0] <= a and b <= one[1] and (a, b) != one for a, b in found)]
    return [names[first:stop] for first, stop in sorted(inner)]
