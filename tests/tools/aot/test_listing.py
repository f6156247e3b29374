"""The reading of machine code, compared with instructions that are counted by hand."""

import pytest

from tests.tools.aot import harness

harness.needs_compiler()

import triton  # noqa: E402  # only where Triton compiles
import triton.language as tl  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from tests.tools.aot import listing  # noqa: E402


def read(*lines):
    """Return the only function of a listing, written without addresses."""
    (function,) = listing.functions("\n".join([".text.one:", *(f"        /*0000*/  {line} ;" for line in lines)]))
    return function


def test_instructions_have_names_modifiers_and_operands():
    function = read("@!P1 LDG.E.128 R4, desc[UR4][R2.64]", "EXIT", "BRA `(.L_1)", "NOP", "NOP")
    assert function.name == "one"
    assert [(one.name, one.modifiers, one.operands) for one in function.instructions] == [
        ("LDG", ["E", "128"], ("R4", "desc[UR4][R2.64]")),
        ("EXIT", [], ()),
    ]


FIRST, NEXT = "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT", "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24"
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0"
# name: (instructions, serialised)
WAITS = {
    "one-wait-for-a-sum": ([FIRST, NEXT, NEXT, WAIT], 0),
    "between-two-sums": ([FIRST, WAIT, FIRST, WAIT], 0),
    "within-a-sum": ([FIRST, WAIT, NEXT, WAIT, NEXT, WAIT], 2),
    "for-all-but-one": ([FIRST, "WARPGROUP.DEPBAR.LE gsb0, 0x1", NEXT, WAIT], 0),
}


@pytest.mark.parametrize(("lines", "serialised"), WAITS.values(), ids=WAITS)
def test_waits_within_a_sum_are_serialised(lines, serialised):
    assert listing.serialised(read(*lines)) == serialised


def test_accesses_have_widths():
    function = read(
        "LDG.E.128 R4, [R2]", "LDGSTS.E.64 [R2], [R4]", "LDG.E R1, [R2]", "STG.E.U16 [R2], R4", "LDS.128 R1"
    )
    assert listing.widths(function) == {"load": [128, 64, 32], "store": [16]}


@triton.jit
def _counted_kernel(x_ptr, y_ptr, out_ptr, n):
    rows, columns = tl.arange(0, 64), tl.arange(0, 64)
    at = rows[:, None] * 64 + columns[None, :]
    x, acc = tl.load(x_ptr + at), tl.zeros((64, 64), tl.float32)
    for block in tl.range(0, n):
        y = tl.load(y_ptr + block * 4096 + at)
        p = tl.exp2(tl.dot(x, tl.trans(y)))
        acc = tl.dot(p.to(x.dtype), y, acc)
    tl.store(out_ptr + at, acc)


def test_a_kernel_of_triton_is_counted():
    """Two products of 64x64x64, each of four instructions, 4096 powers of 128 threads, two tiles of 8 KB, one of 16."""
    signature = {"x_ptr": "*bf16", "y_ptr": "*bf16", "out_ptr": "*fp32", "n": "i32"}
    aligned = {(index,): [["tt.divisibility", 16]] for index in range(3)}
    compiled = triton.compile(
        ASTSource(_counted_kernel, signature, {}, aligned),
        target=harness.TARGETS["sm_90"],
        options={"num_warps": 4, "num_stages": 1},
    )
    (function,) = harness.disassembled(compiled.asm["cubin"])
    names = [one.name for one in function.instructions]
    assert (names.count("HGMMA"), names.count("MUFU")) == (2 * 4, 4096 // 128)
    assert listing.widths(function) == {"load": [128] * 8, "store": [128] * 8}
    assert listing.serialised(function) == 0
