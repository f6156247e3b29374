"""Read nvdisasm's listing: the instructions of each function, its loops, and what of them takes time.

A loop is a natural one: a branch goes back to an instruction that every path to the branch has passed, and the loop
is all that lies on a path from there to the branch. Both sides of a branch inside it count. A short loop around a
barrier's test is a wait, not a loop: its instructions count once.
"""

import re
from collections import Counter
from dataclasses import dataclass

_SECTION = re.compile(r"^\.text\.(\S+):")
_LABEL = re.compile(r"^(\.L\S*):")
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*);")
_TARGET = re.compile(r"`\((\.L\w+)\)")
_WAIT = 8  # the most instructions of a loop around a barrier's test
_PRODUCTS = ("HGMMA", "QGMMA", "IGMMA", "HMMA", "IMMA", "QMMA", "UTCHMMA", "UTCQMMA")
_ACCESSES = ("LDG", "LDGSTS", "STG")


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
    """A loop's label, the indices of its instructions, those that are in no inner loop, and its depth from 0."""

    label: str
    first: int
    body: frozenset
    own: tuple[int, ...]
    depth: int


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
    following = _following(instructions, labels)
    starts = sorted({0} | {s for at, nexts in enumerate(following) for s in nexts if nexts != [at + 1]})
    names = {index: label for label, index in labels.items()}
    dominators = _dominators(starts, following)
    before = [[] for _ in instructions]
    for at, nexts in enumerate(following):
        for index in nexts:
            before[index].append(at)
    bodies = {}
    for at, nexts in enumerate(following):
        for head in nexts:
            if head <= at and head in dominators[_block(starts, at)]:
                bodies[head] = bodies.get(head, {head}) | _reaching(at, head, before)
    bodies = {head: body for head, body in bodies.items() if not _waits([instructions[i] for i in body])}
    for head, body in sorted(bodies.items()):
        inner = [other for start, other in bodies.items() if start != head and other < body]
        own = tuple(sorted(body.difference(*inner)))
        depth = sum(body < other for other in bodies.values())
        yield Loop(names.get(head, str(head)), head, frozenset(body), own, depth)


def _following(instructions, labels):
    """List, for each instruction, the indices of those that may run next."""
    every = []
    for at, one in enumerate(instructions):
        falls = at + 1 < len(instructions) and (one.conditional or one.name not in ("BRA", "EXIT", "RET", "BRX"))
        jumps = [labels[one.target]] if one.target in labels and labels[one.target] < len(instructions) else []
        every.append([*([at + 1] if falls else []), *jumps])
    return every


def _block(starts, at):
    """Return the first instruction of the straight run that ``at`` is in."""
    low, high = 0, len(starts)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if starts[middle] <= at else (low, middle)
    return starts[low]


def _dominators(starts, following):
    """Return, by the first instruction of each straight run, the runs that every path to it has passed."""
    ends = [*starts[1:], len(following)]
    nexts = {start: {n for n in following[end - 1]} for start, end in zip(starts, ends, strict=True)}
    before = {start: [other for other in starts if start in nexts[other]] for start in starts}
    every = set(starts)
    found = {start: ({start} if start == 0 else every) for start in starts}
    changed = True
    while changed:
        changed = False
        for start in starts[1:]:
            known = [found[other] for other in before[start]]
            new = {start} | (set.intersection(*known) if known else set())
            changed |= new != found[start]
            found[start] = new
    return found


def _reaching(at, head, before):
    """Return the instructions from which ``at`` is reached without passing ``head``."""
    body, todo = {head}, [at]
    while todo:
        index = todo.pop()
        if index not in body:
            body.add(index)
            todo.extend(before[index])
    return body


def _waits(body):
    return len(body) <= _WAIT and any(i.name in ("SYNCS", "NANOSLEEP", "UTCATOMSWS") for i in body)


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
