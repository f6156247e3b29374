"""How wide a kernel's accesses to global memory are, from its machine code."""

from tests.tools.aot import harness

_GLOBAL = ("LDG", "STG", "LDGSTS")
_NARROW = ("U8", "S8", "U16", "S16")


def accesses(launch, target):
    """List the instructions that load from global memory or store to it."""
    functions = harness.disassembled(harness.assemble(launch, target).compiled.asm["cubin"])
    (function,) = (each for each in functions if each.name == launch.function.__name__)
    return [one for one in function.instructions if one.name in _GLOBAL]


def narrow(launch, target):
    """List the accesses that move one number of 16 bits or less: where tokens have 16 bits, these are theirs."""
    return [one.opcode for one in accesses(launch, target) if set(one.modifiers) & set(_NARROW)]
