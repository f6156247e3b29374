"""Bounds of one kernel from its machine code: its loops, its main loop, and what limits the blocks in flight."""

from dataclasses import dataclass, replace

from tests.tools.sass import costs
from tests.tools.sass.rates import RATES, blocks


@dataclass(frozen=True)
class Build:
    """How a kernel was built: its architecture, registers per thread, shared bytes and warps per block, and stack."""

    arch: str
    registers: int
    shared: int
    warps: int
    stack: int = 0


@dataclass(frozen=True)
class Bound:
    """A loop, or all of a kernel without one.

    Attributes:
        label, depth: the loop's; "all", 0 for the whole kernel.
        costs: of a trip, inner loops included as often as they run per trip.
        memory: clocks that the bytes of a trip take from the GPU's memory.
        in_flight: the most bytes that a multiprocessor has asked for and not yet received.
    """

    label: str
    depth: int
    costs: costs.Costs
    memory: float
    in_flight: int

    @property
    def ratio(self):
        """Issue clocks over the clocks of the work, tensor products or special functions; None without any."""
        return self.costs.clocks["issue"] / self.costs.floor if self.costs.clocks["tensor"] else None

    @property
    def pressure(self):
        """The largest pipe's clocks over the memory's: above 1, the bandwidth is not reached. None without memory."""
        return self.costs.bound / self.memory if self.memory else None


@dataclass(frozen=True)
class Bounds:
    """The bounds of a kernel: what it was built as, the blocks a multiprocessor holds, and every loop's bound."""

    name: str
    build: Build
    blocks: int
    instructions: int
    spills: int
    main: Bound
    loops: tuple[Bound, ...]


def bounds(function, build, inner_trips=(), traffic=None):
    """Return the bounds of a disassembled function.

    ``inner_trips`` is how often the loops of depth 1, 2, ... run per trip of the loop around them, on average, once by
    default; ``traffic`` the bytes that a trip of the main loop has to move, by default every byte that it asks for.
    """
    rates = RATES[build.arch]
    resident = blocks(rates, build.registers, build.shared, build.warps)
    whole = costs.add_up(function.instructions, build.warps, rates)
    own = {
        loop.label: costs.add_up(
            [function.instructions[i] for i in loop.own], build.warps, rates, function.instructions[: loop.first]
        )
        for loop in function.loops
    }
    found, totals = [], {}
    for loop in sorted(function.loops, key=lambda loop: -loop.depth):
        inner = [other for other in function.loops if other.body < loop.body and other.depth == loop.depth + 1]
        trips = inner_trips[loop.depth] if loop.depth < len(inner_trips) else 1.0
        total = costs.total(own[loop.label], [totals[other.label] for other in inner], trips)
        totals[loop.label] = total
        in_flight = _in_flight([function.instructions[i] for i in loop.own], own[loop.label])
        found.append(Bound(loop.label, loop.depth, total, total.clocks["memory"], round(in_flight * resident)))
    found.sort(key=lambda bound: list(own).index(bound.label))
    every = Bound("all", 0, whole, whole.clocks["memory"], whole.bytes * resident)
    chosen = main([*found, every])
    if traffic is not None:
        chosen = replace(chosen, memory=traffic / rates.memory)
    return Bounds(function.name, build, resident, whole.instructions, whole.spills, chosen, tuple(found))


def main(found):
    """Return the loop that most of the time is spent in.

    It has the most products per trip; without products, the outermost loop that reads the most memory; without that, it
    is all of the kernel. Of several forms of the same work (masked at an edge or not, exact or bounded), it is the
    one of the fewest instructions: the others run at edges or as a fallback.
    """
    *loops, every = found

    def work(bound):
        clocks = bound.costs.clocks
        return round(clocks["tensor"]), (round(clocks["memory"]) if not clocks["tensor"] else 0)

    loops = [bound for bound in loops if any(work(bound))]
    if not loops:
        return every
    tensor = any(bound.costs.clocks["tensor"] for bound in loops)
    if every.costs.clocks["tensor"] and not tensor:
        return every
    return max(loops, key=lambda bound: (*work(bound), -bound.costs.instructions))


def _in_flight(instructions, own):
    """Return the bytes per block that a loop has asked for and not received, at most."""
    groups = sum(one.name == "LDGDEPBAR" for one in instructions)
    if not groups:
        return own.bytes
    waits = [
        int(one.operands[-1], 16) for one in instructions if one.opcode == "DEPBAR.LE" and one.operands[0] == "SB0"
    ]
    left = min(waits, default=0)
    return own.copied * (left + groups) / groups + (own.bytes - own.copied)
