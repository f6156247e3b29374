"""Read nvdisasm's listing: the instructions of each function, its loops, and what of them takes time.

A loop is a natural one: a branch goes back to an instruction that every path to the branch has passed, and the loop
is all that lies on a path from there to the branch. Both sides of a branch inside it count. A short loop around a
barrier's test is a wait, not a loop: its instructions count once.
"""

import re
from collections import Counter
from dataclasses import dataclass

import networkx as nx  # which PyTorch needs

_SECTION = re.compile(r"^\.text\.(\S+):")
_LABEL = re.compile(r"^(\.L\S*):")
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*);")
_TARGET = re.compile(r"`\((\.L\w+)\)")
_WAIT = 8  # the most instructions of a loop around a barrier's test
_PRODUCTS = ("HGMMA", "QGMMA", "IGMMA", "HMMA", "IMMA", "QMMA", "UTCHMMA", "UTCQMMA")
_ACCESSES = ("LDG", "LDGSTS", "STG")
_BITS = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128}  # of an access; others have 32


@dataclass(frozen=True)
class Instruction:
    """One instruction: what predicates it ("!P1", or ""), its name with modifiers, and its operands."""

    guard: str
    opcode: str
    operands: tuple[str, ...]

    @property
    def name(self):
        """The name without modifiers."""
        return self.opcode.partition(".")[0]

    @property
    def modifiers(self):
        return self.opcode.split(".")[1:]

    @property
    def target(self):
        """The label that a branch goes to, or None."""
        match = _TARGET.search(self.operands[-1]) if self.name == "BRA" and self.operands else None
        return match[1] if match else None

    @property
    def conditional(self):
        return bool(self.guard) or (self.name == "BRA" and len(self.operands) > 1)


@dataclass(frozen=True)
class Loop:
    """The indices of a loop's instructions, and of those that are in no inner loop."""

    body: frozenset
    own: tuple[int, ...]


@dataclass(frozen=True)
class Function:
    """A function's instructions, and its loops in the order of their first instructions."""

    name: str
    instructions: tuple[Instruction, ...]
    loops: tuple[Loop, ...]


def functions(text):
    """List the functions of a listing."""
    found, lines = [], None
    for line in text.splitlines():
        if section := _SECTION.match(line):
            lines = []
            found.append((section[1], lines))
        elif lines is not None:
            lines.append(line)
    return [_function(name, lines) for name, lines in found]


def _function(name, lines):
    instructions, labels = [], {}
    for line in lines:
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif match := _INSTRUCTION.match(line):
            guard, opcode, rest = match.groups()
            operands = tuple(part.strip() for part in rest.split(",")) if rest.strip() else ()
            instructions.append(Instruction(guard or "", opcode, operands))
    while instructions and (
        instructions[-1].name == "NOP" or labels.get(instructions[-1].target) == len(instructions) - 1
    ):
        instructions.pop()  # padding, and the trap in front of it
    return Function(name, tuple(instructions), tuple(_loops(instructions, labels)))


def _loops(instructions, labels):
    graph = nx.DiGraph(_edges(instructions, labels))
    graph.add_node(0)
    dominators = nx.immediate_dominators(graph, 0)
    bodies = {}
    for at, head in graph.edges:
        if head <= at and _dominates(head, at, dominators):
            before = nx.ancestors(nx.restricted_view(graph, [head], []), at) if at != head else ()
            bodies[head] = bodies.get(head, frozenset([head])) | {at, *before}
    bodies = {head: body for head, body in bodies.items() if not _waits([instructions[i] for i in body])}
    for _, body in sorted(bodies.items()):
        inner = [other for other in bodies.values() if other < body]
        yield Loop(body, tuple(sorted(body.difference(*inner))))


def _edges(instructions, labels):
    """Yield pairs of indices, of an instruction and one that may run next."""
    for at, one in enumerate(instructions):
        if at + 1 < len(instructions) and (one.conditional or one.name not in ("BRA", "EXIT", "RET", "BRX")):
            yield at, at + 1
        if labels.get(one.target, len(instructions)) < len(instructions):
            yield at, labels[one.target]


def _dominates(head, at, dominators):
    """Return whether every path from the first instruction to ``at`` passes ``head``."""
    while at not in (head, 0) and at in dominators:
        at = dominators[at]
    return at == head


def _waits(body):
    return len(body) <= _WAIT and any(i.name in ("SYNCS", "NANOSLEEP", "UTCATOMSWS") for i in body)


def accesses(function):
    """List the instructions that load from global memory or store to it."""
    return [one for one in function.instructions if one.name in _ACCESSES]


def widths(function):
    """Return the bits that each access to global memory moves, by "load" and "store"."""
    found = {}
    for one in accesses(function):
        bits = next((_BITS[word] for word in one.modifiers if word in _BITS), 32)
        found.setdefault("store" if one.name == "STG" else "load", []).append(bits)
    return found


def main_loop(function):
    """Return the instructions of the loop of the most products, or, without any, of the most accesses to memory.

    Of several forms of the same work, masked at an edge or not, it is the shortest. Without such a loop it is all.
    """
    bodies = [[function.instructions[index] for index in sorted(loop.body)] for loop in function.loops]
    return max((body for body in bodies if any(_work(body)[:2])), key=_work, default=list(function.instructions))


def _work(body):
    names = Counter(one.name for one in body)
    products, accesses = (sum(names[name] for name in kinds) for kinds in (_PRODUCTS, _ACCESSES))
    return products, 0 if products else accesses, -len(body)


def serialised(function):
    """Count the warp-group products in loops that wait for the one before, into the same sum."""
    return sum(_serialised([function.instructions[index] for index in loop.own]) for loop in function.loops)


def _serialised(instructions):
    last, waited, count = None, False, 0
    for one in instructions:
        if one.name == "WARPGROUP" and "DEPBAR" in one.modifiers and one.operands[-1] == "0x0":
            waited = last is not None
        elif one.name.endswith("GMMA"):
            count += waited and one.operands[0] == last and "RZ" not in one.operands
            last, waited = one.operands[0], False
    return count
