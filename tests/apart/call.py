"""One drawn call: the lines of Python that make it, and the equation that it is judged by."""

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

import crate_kernels

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HALF = ("bfloat16", "float16")
HOPPER = ("hopper", "pairs")  # emulated, where mssa takes the kernels of sm_90a; long backwards by rows, or by pairs
KERNELS = ("cpp", "triton", "emulated", *HOPPER)  # emulated: CUDA C++ on the emulator of tests/tools
HEAD = ["import math", "import torch", "from crate_kernels import *", "from crate_kernels import nn", ""]


@dataclass
class DrawnCall:
    """One call of a public function, as source, with what it must give.

    Attributes:
        kind: the class it was drawn from.
        op: function or module called.
        backend: as asked for.
        dtype: name of the dtype of its tokens.
        working: name of the dtype that autocast makes it compute in; "" without autocast or where it has no part.
        setup: lines that make the tensors.
        line: the call itself, an assignment to ``outputs``.
        outputs: names that ``line`` assigns.
        wrt: tensors to differentiate by.
        upstream: upstream gradient, by name of the output that has one.
        equation: ``equation(tensors, nudge)`` gives the outputs by name from the tensors of ``setup``.
        jumps: whether the call has a threshold, where results or gradients are discontinuous.
        lenient: whether a result need not be finite where the eager code's, in the same dtype, is not.
        mode: what is done around the call, for instance "no_grad"; "" for nothing.
        refusal: type and text of the documented error that must come, or None.
        merged: whether ``outputs[0].transpose(1, 2).flatten(2)`` must be a view.
        same_bits: whether one thread must give the same bits as those of mode "threads".
        check: ``check(call, namespace)`` gives the verdict where a call is more than one.
        steps: what a program on a cache does, one after the other.
        scale: of the scores of a program.
    """

    kind: str
    seed: int
    op: str = ""
    backend: str | None = None
    dtype: str = "float32"
    working: str = ""
    setup: list[str] = field(default_factory=list)
    line: str = ""
    outputs: tuple[str, ...] = ("out",)
    wrt: list[str] = field(default_factory=list)
    upstream: dict[str, str] = field(default_factory=dict)
    equation: Callable | None = None
    jumps: bool = False
    lenient: bool = False
    mode: str = ""
    context: str = ""
    refusal: tuple[type[Exception], str] | None = None
    merged: bool = False
    same_bits: bool = False
    check: Callable | None = None
    steps: list[dict] = field(default_factory=list)
    scale: float = 1.0

    def source(self):
        """Return the call as a program."""
        lines = [
            *HEAD,
            *self.setup,
            f"torch.manual_seed({self.seed})",
            self.call_line(),
            self.statements_after_the_call(),
        ]
        if self.wrt and self.upstream:
            lines.append(self.gradient_line())
        return "\n".join(line for line in lines if line)

    def call_line(self):
        """Return the call in its context."""
        return f"with {self.context}:\n    {self.line}" if self.context else self.line

    def statements_after_the_call(self):
        """Return what is done to the output before the backward."""
        return {
            "add": "out += 1",
            "double": "out *= 2",
            "part": "out[..., :1].zero_()",
            "second": f"{self.outputs[-1]}.mul_(2)",
        }.get(self.mode, "")

    def gradient_line(self):
        """Return the assignment of the gradients."""
        names = ", ".join(f"d{name}" for name in self.wrt)
        outputs, leaves, upstreams = (", ".join(group) for group in (self.upstream, self.wrt, self.upstream.values()))
        return f"{names}, = torch.autograd.grad([{outputs}], [{leaves}], [{upstreams}])"


class Draw:
    """The random choices of one call, and the lines that they become."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.lines = [f"g = torch.Generator().manual_seed({seed})"]

    def pick(self, *options):
        """Choose one, all alike."""
        return self.random.choice(options)

    def chance(self, p):
        """Return True with probability p."""
        return self.random.random() < p

    def integer(self, low, high):
        """Return an integer, both ends included."""
        return self.random.randint(low, high)

    def half(self, backend):
        """Return a dtype of autocast; Triton's interpreter computes bfloat16 wrong."""
        return "float16" if backend == "triton" else self.pick(*HALF)

    def length(self):
        """Return a number of tokens: few, or around the widths and heights of tiles."""
        return self.pick(
            self.integer(1, 9), self.integer(1, 40), self.pick(1, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 66, 95, 97),
            self.pick(96, 127, 128, 129, 130, 191, 192, 193, 197, 200, 257, self.integer(258, 900)),
        )  # fmt: skip

    def channels(self):
        """Return a head_dim from 1 to 256: few, or around the widths of vectors."""
        return self.pick(
            self.integer(1, 9), self.integer(1, 40), self.pick(8, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 64, 65),
            self.pick(72, 80, 96, 100, 112, 113, 127, 128, 128, 129, 160, 192, 255, 256),
        )  # fmt: skip

    def put(self, line):
        """Add a line."""
        self.lines.append(line)

    def uniform(self, low, high):
        """Return a number that prints short."""
        return float(f"{self.random.uniform(low, high):.3g}")

    def backend(self, forced):
        """Return a backend and a dtype for it, mostly one that it takes."""
        name = forced or self.random.choices(
            [None, "cpp", "composite", "reference", "triton"], [20, 42, 24, 11, 3]
        )[0]  # fmt: skip
        name = None if name == "none" else name
        if name == "triton":
            return name, self.pick("float32", "float32", "float16")
        odds = [1, 10, 9] if name in HOPPER else [10, 5, 5] if name in KERNELS else [8, 4, 4]
        if self.chance(0.02 if name in KERNELS else 0.15):
            return name, "float64"
        return name, self.random.choices(["float32", "bfloat16", "float16"], odds)[0]


@functools.cache
def has_cpp():
    """Whether the C++ extension is built, which ``backend=None`` then takes."""
    try:
        crate_kernels.mssa(torch.zeros(1, 1, 1, 1), backend="cpp")
    except RuntimeError:
        return False
    return True


def keywords(**options):
    """Write keyword arguments as source, less those that are left to their defaults."""
    return "".join(f", {name}={value}" for name, value in options.items() if value is not None)
