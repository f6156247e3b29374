"""The forms of mssa's backward beside each other, without a GPU: ``python -m tests.tools.aot.forms``.

It prints the table of docs/kernels.md. The forms of a row have the tiles that the launch table has for its GPU, and the
bound of registers that was chosen for the symmetric form is that form's alone.
"""

from dataclasses import dataclass

import torch
import triton

from crate_kernels._triton.table import forced
from crate_kernels.ops.mssa.triton import tables
from tests.ops.mssa import aot
from tests.tools.aot import harness, listing

SEQLEN, WIDTHS = 16384, (64, 128)
# By whether attention is causal, values of DERIVED. Without a second direction 1 is as 0.
FORMS = {False: (0, 1, 2), True: (0, 3)}
# Likewise: how many loops a form has, one after the other, and which of them take whole tiles without a mask.
LOOPS = {False: (2, (0,)), True: (4, (0, 2))}


@dataclass(frozen=True)
class Figures:
    """What a form compiles to: instructions of a warp for a tile, registers and bytes of stack of a thread."""

    instructions: int
    registers: int
    spills: int


def launch(head_dim, causal, derived, target):
    """Return the launch of the backward's main kernel, in bf16."""

    def call():
        config = tables.BACKWARD.config(torch.device("meta"), head_dim, SEQLEN, causal, torch.bfloat16)
        kept = {k: v for k, v in config.items() if k != "maxnreg" or derived > 1}
        with forced(tables.BACKWARD, {**kept, "DERIVED": derived}):
            aot.backward(SEQLEN, head_dim, batch=1, causal=causal)()

    (found,) = (one for one in harness.launches(call, target) if one.function.__name__ == "_mssa_bwd_kernel")
    return found


def _weight(loop):
    """Return a number that is large for the loops of a form, and small for those of heads that it leaves."""
    exponentials = sum(name == "MUFU.EX2" or name.startswith("v_exp") for name in loop)
    return exponentials * sum("MMA" in name or "mfma" in name for name in loop)


def instructions(text, causal):
    """Return how many instructions the whole tiles of a kernel take, one of each direction."""
    count, whole = LOOPS[causal]
    loops = [loop for loop in listing.loops(text) if _weight(loop)]
    runs = [loops[first : first + count] for first in range(len(loops) - count + 1)]
    run = max(runs, key=lambda run: sum(map(_weight, run)))
    return sum(len(run[n]) for n in whole)


def examine(head_dim, causal, derived, target):
    """Return the figures of a form."""
    found, gpu = launch(head_dim, causal, derived, target), harness.TARGETS[target]
    compiled = triton.compile(harness.source_of(found, gpu), target=gpu, options=found.options)
    kernel = harness.compile_launch(found, target)
    text = compiled.asm["amdgcn"] if gpu.backend == "hip" else harness.disassembly(compiled.asm["cubin"])
    return Figures(instructions(text, causal), kernel.registers, kernel.stack)


def row(target, head_dim):
    """Return a row of the table."""
    cells = [target, str(head_dim)]
    for causal, forms in FORMS.items():
        figures = [examine(head_dim, causal, derived, target) for derived in forms]
        cells += [", ".join(str(getattr(one, name)) for one in figures) for name in ("instructions", "registers")]
        assert not any(one.spills for one in figures), figures  # which the table has no column for
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    for target in harness.TARGETS:
        for head_dim in WIDTHS:
            print(row(target, head_dim), flush=True)
