"""The machine code of the kernels of whole heads, read without a GPU.

Their walks are unrolled: what counts is the whole kernel, not a loop.
"""

from itertools import pairwise

import pytest

from crate_kernels.ops.mssa.cuda import heads
from tests.cuda import compilers, resources
from tests.tools.aot import harness

harness.needs_compiler()

PRODUCT, POWER = "HGMMA", "MUFU.EX2"
# By NVRTC 13.0: instructions, of which there may be no more, and how often their order goes from products to powers or
# back, which may not become less: one waits while the other works.
RECORDED = {
    "forward_kernel<bf16, 64, 208, false>": (2207, 16),
    "forward_kernel<bf16, 64, 208, true>": (3770, 56),
    "backward_kernel<bf16, 64, 208, false, false>": (2833, 13),
    "backward_kernel<bf16, 64, 208, false, true>": (5399, 35),
}


def read(name, compiler):
    """Return a kernel's opcodes in their order, and what the assembler says of it."""
    header = heads._FORWARD if name.startswith("forward") else heads._BACKWARD
    cubin, (said,) = resources.compiled(compiler, heads.Kernel(header, f"mssa::head_{name}"), 90)
    (function,) = harness.disassembled(cubin)
    return [one.opcode for one in function.instructions], said


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", RECORDED)
def test_a_kernel_is_no_longer_and_its_products_and_powers_take_turns(name):
    compiler = compilers.needed()
    opcodes, said = read(name, compiler)
    turns = [opcode.startswith(PRODUCT) for opcode in opcodes if opcode.startswith((PRODUCT, POWER))]
    assert {True, False} == {*turns}
    assert said.spills == 0
    if compiler.version == (13, 0):
        most, least = RECORDED[name]
        assert len(opcodes) <= most
        assert sum(a != b for a, b in pairwise(turns)) >= least
