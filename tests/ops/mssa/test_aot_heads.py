"""The machine code of the kernels of whole heads and of long rows, read without a GPU.

The walks of whole heads are unrolled: what counts is the whole kernel, not a loop.
"""

from itertools import groupby, pairwise

import pytest

from crate_kernels.ops.mssa.cuda import heads, long_pairs, long_rows
from tests.cuda import compilers, resources
from tests.tools.aot import harness

harness.needs_compiler()

PRODUCT, POWER, WAIT = "HGMMA", "MUFU.EX2", "WARPGROUP.DEPBAR"
# By NVRTC 13.0: instructions, of which there may be no more, and how often their order goes from products to powers or
# back, which may not become less: one waits while the other works.
RECORDED = {
    "forward_kernel<bf16, 64, 208, false>": (2237, 16),
    "forward_kernel<bf16, 64, 208, true>": (3819, 56),
    "backward_kernel<bf16, 64, 208, false, false>": (2843, 13),
    "backward_kernel<bf16, 64, 208, false, true>": (5408, 35),
}
# By the same: instructions, and products.
LONG = {
    "forward_kernel<bf16, 64, false>": (1710, 40),
    "forward_kernel<bf16, 64, true>": (1905, 40),
    "forward_kernel<bf16, 128, false>": (1905, 48),
    "forward_kernel<bf16, 128, true>": (2101, 48),
}

# Of the backward, by whether keys and queries have a walk each.
LONG_BACKWARD = {
    "backward_kernel<bf16, 64, false>": (1520, 40),
    "backward_kernel<bf16, 64, true>": (2424, 56),
    "backward_kernel<bf16, 128, false>": (1800, 64),
    "backward_kernel<bf16, 128, true>": (2768, 88),
}
# Of the backward by pairs, by whether a pair has both directions.
LONG_PAIRS = {
    "pairs_kernel<bf16, 64, true>": (1973, 72),
    "pairs_kernel<bf16, 64, false>": (1740, 48),
    "pairs_kernel<bf16, 128, true>": (2258, 96),
    "pairs_kernel<bf16, 128, false>": (1894, 64),
}


def read(kernel, compiler):
    """Return a kernel's opcodes in their order, and what the assembler says of it."""
    cubin, (said,) = resources.compiled(compiler, kernel, 90)
    (function,) = harness.disassembled(cubin)
    return [one.opcode for one in function.instructions], said


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", RECORDED)
def test_a_kernel_is_no_longer_and_its_products_and_powers_take_turns(name):
    compiler = compilers.needed()
    header = heads._FORWARD if name.startswith("forward") else heads._BACKWARD
    opcodes, said = read(heads.Kernel(header, f"mssa::head_{name}"), compiler)
    turns = [opcode.startswith(PRODUCT) for opcode in opcodes if opcode.startswith((PRODUCT, POWER))]
    assert {True, False} == {*turns}
    assert said.spills == 0
    if compiler.version == (13, 0):
        most, least = RECORDED[name]
        assert len(opcodes) <= most
        assert sum(a != b for a, b in pairwise(turns)) >= least


def kinds_of(name, header, recorded, powers):
    """Return the order of products, powers and waits of a kernel of long rows, and hold their numbers."""
    compiler = compilers.needed()
    opcodes, said = read(long_rows.Kernel(header, f"mssa::long_{name}"), compiler)
    kinds = [one for opcode in opcodes for one in (PRODUCT, POWER, WAIT) if opcode.startswith(one)]
    assert kinds.count(POWER) == powers
    assert said.spills == 0
    if compiler.version == (13, 0):
        most, products = recorded
        assert len(opcodes) <= most
        assert kinds.count(PRODUCT) == products
    return [kind for kind, _ in groupby(kinds)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", LONG)
def test_the_powers_of_long_rows_run_beside_products(name):
    """Those of a tile lie between the wait for its scores and that for the sums of the tile before."""
    first_tile, tile, end = (PRODUCT, WAIT, POWER), (PRODUCT, WAIT, POWER, WAIT), (PRODUCT, WAIT)
    order = kinds_of(name, long_rows._FORWARD_HEADER, LONG[name], 128)
    assert order == [*first_tile, *tile, *end]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", LONG_BACKWARD)
def test_the_powers_of_their_backward_do_too(name):
    walks = 2 if name.endswith("true>") else 1
    order = kinds_of(name, long_rows._BACKWARD_HEADER, LONG_BACKWARD[name], 64 * walks)
    assert order == [*(PRODUCT, WAIT, POWER, WAIT) * 2, PRODUCT, WAIT] * walks


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", LONG_PAIRS)
def test_the_powers_of_pairs_do_too(name):
    """Beside every product of a tile: those for A, own rows' sums and those of the rows of the tile before."""
    order = kinds_of(name, long_pairs._HEADER, LONG_PAIRS[name], 64)
    assert order == [*(PRODUCT, WAIT), *(PRODUCT, POWER, WAIT), *(PRODUCT, WAIT, POWER, WAIT), PRODUCT, WAIT]
