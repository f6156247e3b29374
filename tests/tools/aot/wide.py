"""How wide a kernel's accesses to global memory are, from its machine code."""

from tests.tools.aot import harness

_GLOBAL = ("LDG", "STG", "LDGSTS")
_BITS = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128}  # of an access; others have 32


def accesses(launch, target):
    """List the instructions that load from global memory or store to it."""
    functions = harness.disassembled(harness.assemble(launch, target).compiled.asm["cubin"])
    (function,) = (each for each in functions if each.name == launch.function.__name__)
    return [one for one in function.instructions if one.name in _GLOBAL]


def widths(launch, target):
    """Return the bits that each access moves, by "load" and "store"; of a kernel that only does one, by that alone."""
    found = {}
    for one in accesses(launch, target):
        bits = next((_BITS[word] for word in one.modifiers if word in _BITS), 32)
        found.setdefault("store" if one.name == "STG" else "load", []).append(bits)
    return found
