"""Add up what a list of instructions costs each pipe of a multiprocessor: a bound, not a measurement.

Clocks are a multiprocessor's, per block and trip: each of its four quarters runs a quarter of the block's warps. Bank
conflicts, latencies and what waits for what are not in the sum; a real clock count is never lower than the largest
pipe, and often higher.
"""

import re
from collections import Counter
from dataclasses import dataclass, field, fields

from tests.tools.sass.rates import WARP

_PIPES = {
    "mufu": "MUFU",
    "fp32": "FADD FMUL FFMA FADD32I FMUL32I FFMA32I FADD2 FMUL2 FFMA2",
    "half": "HADD2 HMUL2 HFMA2 HADD2_32I HFMA2_32I",
    "double": "DADD DMUL DFMA DSETP DMNMX",
    "imad": "IMAD IDP XMAD",
    "alu": "IADD3 IADD IADD32I VIADD VIADDMNMX IMNMX VIMNMX VIMNMX3 IABS LOP3 LOP PLOP3 SHF SHL SHR LEA PRMT SEL FSEL "
    "FSETP FSET ISETP ISET FMNMX FMNMX3 HMNMX2 HSETP2 HSET2 SGXT BMSK F2F F2I I2F F2FP I2FP F2IP FRND FCHK",
    "shuffle": "SHFL",
}
_PIPE = {name: pipe for pipe, names in _PIPES.items() for name in names.split()}
_DOUBLE = ("FADD2", "FMUL2", "FFMA2")  # two results per lane
_SHARED = ("LDS", "STS", "LDSM", "STSM", "LDGSTS", "ATOMS")
_GLOBAL = ("LDG", "LDGSTS", "STG")
_TENSOR = ("HGMMA", "QGMMA", "IGMMA", "HMMA", "IMMA", "QMMA", "UTCHMMA", "UTCQMMA")
_NEVER = "!PT"
_PRODUCT = re.compile(r"(\d+)x(\d+)x(\d+)")
_SQUARE = {"16816": (16, 8, 16), "1688": (16, 8, 8), "1684": (16, 8, 4), "16832": (16, 8, 32)}


@dataclass
class Costs:
    """Clocks by pipe, and counts that say why they may not be reached.

    Attributes:
        clocks: "issue", "tensor", "shared", "memory" and the pipes of ``rates``. "memory" holds if every byte comes
            from the GPU's memory, not from its cache.
        instructions: issued per warp.
        bytes: loaded from global memory, per block; ``copied`` of them by asynchronous copies into shared memory.
        waits: waits for all warp-group products; ``serialised`` are those between two products of the same sum.
        narrow: copies of 4 bytes into shared memory, per thread; ``guarded`` are copies under a predicate.
        spills: loads and stores of local memory, per thread.
        unknown: tensor instructions whose shape the listing does not tell.
        mnemonics: instructions by name.
    """

    clocks: Counter = field(default_factory=Counter)
    instructions: int = 0
    bytes: int = 0
    copied: int = 0
    waits: int = 0
    serialised: int = 0
    barriers: int = 0
    narrow: int = 0
    guarded: int = 0
    spills: int = 0
    unknown: int = 0
    mnemonics: Counter = field(default_factory=Counter)

    @property
    def floor(self):
        """The clocks of the work itself, tensor products and special functions."""
        return max(self.clocks["tensor"], self.clocks["mufu"])

    @property
    def bound(self):
        """The largest pipe, in clocks; memory is not in it."""
        return max((clocks for pipe, clocks in self.clocks.items() if pipe != "memory"), default=0)


def add_up(instructions, warps, rates, before=()):
    """Return the costs of ``instructions``, which ``warps`` warps of a block execute.

    ``before`` are the instructions in front of them, where constants may have been set.
    """
    costs = Costs()
    quarters = warps / 4
    seen = list(before)
    for one in instructions:
        seen.append(one)
        costs.instructions += 1
        costs.mnemonics[one.name] += 1
        costs.clocks["issue"] += warps / rates.issue
        if one.guard == _NEVER:
            continue
        if pipe := _PIPE.get(one.name):
            results = WARP * (2 if one.name in _DOUBLE else 1)
            costs.clocks[pipe] += warps * results / rates.lanes[pipe]
        elif one.name in _TENSOR:
            _add_product(costs, one, quarters, rates, seen)
        if one.name in _SHARED:
            costs.clocks["shared"] += warps * WARP * width(one) / rates.shared
        if one.name in _GLOBAL:
            costs.clocks["memory"] += warps * WARP * width(one) / rates.memory
            costs.bytes += warps * WARP * width(one) if one.name != "STG" else 0
            costs.copied += warps * WARP * width(one) if one.name == "LDGSTS" else 0
        costs.narrow += one.name == "LDGSTS" and width(one) == 4
        costs.guarded += one.name == "LDGSTS" and bool(one.guard)
        costs.barriers += one.name == "BAR"
        costs.spills += one.name in ("LDL", "STL")
    _add_waits(costs, instructions)
    return costs


def total(own, inner, trips):
    """Return the costs of an outer loop's trip, whose inner loops run ``trips`` times."""
    result = Costs()
    for costs, times in ((own, 1), *((other, trips) for other in inner)):
        for field_ in fields(Costs):
            before, value = getattr(result, field_.name), getattr(costs, field_.name)
            if isinstance(value, Counter):
                before.update({key: count * times for key, count in value.items()})
            else:
                setattr(result, field_.name, before + value * times)
    return result


def width(instruction):
    """Return the bytes per thread that a load or store moves."""
    if instruction.name in ("LDSM", "STSM"):  # matrices of 8x8 16-bit numbers, 128 bytes each
        return 4 * next((int(m) for m in instruction.modifiers if m in ("2", "4")), 1)
    sizes = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}
    return next((sizes[m] for m in instruction.modifiers if m in sizes), 4)


def shape(instruction, seen=()):
    """Return (m, n, k) of a tensor instruction, or None where the listing does not tell."""
    if match := _PRODUCT.search(instruction.opcode):
        return tuple(map(int, match.groups()))
    for modifier in instruction.modifiers:
        if modifier in _SQUARE:
            return _SQUARE[modifier]
    return _described(instruction, seen) if instruction.name.startswith("UTC") else None


def _described(instruction, seen):
    """Read the shape of a fifth-generation product from the constant of its instruction descriptor."""
    register = next((re.search(r"UR\d+", o)[0] for o in instruction.operands if o.startswith("idesc")), None)
    for one in reversed(seen):
        if register and one.operands and one.operands[0] == register and one.name in ("UMOV", "UIADD3"):
            if one.name == "UMOV" and re.fullmatch(r"0x[0-9a-f]+", one.operands[-1]):
                word = int(one.operands[-1], 16)
                return (word >> 24 & 31) * 16, (word >> 17 & 63) * 8, 16 if instruction.name == "UTCHMMA" else 32
            return None
    return None


def _add_product(costs, one, quarters, rates, seen):
    found = shape(one, seen)
    if found is None:
        costs.unknown += 1
        return
    m, n, k = found
    bits = 32 if "TF32" in one.modifiers else 8 if one.name[0] in "QI" or one.name == "UTCQMMA" else 16
    # A block issues a fifth-generation product once, a warp group its own, and of HMMA each warp its own.
    times = 1 if one.name.startswith("UTC") else quarters if one.name.endswith("GMMA") else 4 * quarters
    costs.clocks["tensor"] += times * m * n * k * bits / 16 / rates.tensor
    if one.name.endswith("GMMA") or one.name.startswith("UTC"):
        operands = one.operands[0 if one.name.startswith("UTC") else 1]
        rows = n + (m if operands.startswith("gdesc") else 0)
        costs.clocks["shared"] += times * rows * k * bits / 8 / rates.shared


def _add_waits(costs, instructions):
    """Count waits for warp-group products; serialised ones are followed by another product into the same sum."""
    last, waited = None, False
    for one in instructions:
        if one.name == "WARPGROUP" and "DEPBAR" in one.modifiers and one.operands[-1] == "0x0":
            costs.waits += 1
            waited = last is not None
        elif one.name.endswith("GMMA"):
            continues = one.operands[0] == last and "RZ" not in one.operands
            costs.serialised += waited and continues
            last, waited = one.operands[0], False
