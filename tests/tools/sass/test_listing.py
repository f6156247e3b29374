"""The reading of machine code, held to loops that are counted by hand."""

import subprocess

import pytest

from tests.tools.aot import harness

harness.needs_compiler()

import triton  # noqa: E402  # only where Triton compiles
import triton.language as tl  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from tests.tools.sass import listing  # noqa: E402


def read(text):
    """Return the only function of a listing, written without addresses."""
    lines = [line if line.startswith(".") else f"        /*0000*/  {line} ;" for line in text.split("\n") if line]
    (function,) = listing.functions("\n".join(lines))
    return function


NESTED = """.text.nested:
MOV R1, RZ
.L_outer:
LDG.E.128 R4, desc[UR4][R2.64]
.L_inner:
FADD R1, R1, R4
@P0 BRA `(.L_skip)
FMUL R1, R1, R4
.L_skip:
@!P1 BRA `(.L_inner)
SYNCS.PHASECHK.TRANS64.TRYWAIT P2, [UR4], R4
@!P2 BRA `(.L_test)
.L_tested:
BRA.U UP0, `(.L_outer)
EXIT
.L_test:
SYNCS.PHASECHK.TRANS64.TRYWAIT P2, [UR4], R4
@!P2 BRA `(.L_test)
BRA `(.L_tested)
.L_trap:
BRA `(.L_trap)
NOP"""


def test_loops_nest_and_waits_are_none():
    """A loop is what lies between a label and the branch back, wherever the compiler put it; a wait is no loop."""
    function = read(NESTED)
    assert [(len(loop.body), len(loop.own)) for loop in function.loops] == [(11, 7), (4, 4)]
    assert len(function.instructions) == 13  # neither the trap nor what fills up the last line


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
    assert listing.serialised(read("\n".join([".text.one:", ".L_0:", *lines, "@P0 BRA `(.L_0)", "EXIT"]))) == serialised


LOADS, SUMS = ["LDG.E R1, desc[UR4][R2.64]"], ["FADD R1, R1, R4", "FMUL R1, R1, R4"]
# name: (loops, the main one)
LOOPS = {
    "most-products": ([[FIRST, NEXT, *LOADS * 9], [FIRST, NEXT, NEXT]], 1),
    "shortest-of-equal-products": ([[FIRST, *LOADS], [FIRST], [FIRST, *SUMS]], 1),
    "most-accesses-without-products": ([[*LOADS * 2, *SUMS], LOADS, SUMS], 0),
}


@pytest.mark.parametrize(("loops", "main"), LOOPS.values(), ids=LOOPS)
def test_the_main_loop_does_the_most(loops, main):
    lines = [line for n, loop in enumerate(loops) for line in (f".L_{n}:", *loop, f"@P0 BRA `(.L_{n})")]
    found = listing.main_loop(read("\n".join([".text.one:", *lines, "EXIT"])))
    assert [one.opcode for one in found] == [*(line.split()[0] for line in loops[main]), "BRA"]


def test_all_of_a_kernel_without_such_a_loop_is_its_main_loop():
    assert len(listing.main_loop(read(".text.one:\n" + "\n".join([*LOADS, *SUMS, "EXIT"])))) == 4


PTX = """.version 8.0
.target sm_90
.address_size 64
.visible .entry counted(.param .u64 to, .param .u32 trips) {
  .reg .pred %p; .reg .b32 %r<4>; .reg .f32 %f<8>; .reg .b64 %d<4>;
  .shared .align 16 .b8 memory[4096];
  ld.param.u64 %d1, [to]; cvta.to.global.u64 %d2, %d1; ld.param.u32 %r1, [trips];
  mov.u32 %r3, %tid.x; add.u32 %r1, %r1, %r3;  // by thread: a counter of all would be in the uniform pipe
  mov.u32 %r2, memory; mov.f32 %f1, 0f00000000; mov.f32 %f6, 0f00000000;
LOOP:
  .pragma "nounroll";
  ld.volatile.shared.v4.f32 {%f2, %f3, %f4, %f5}, [%r2];
  ex2.approx.ftz.f32 %f2, %f2; ex2.approx.ftz.f32 %f3, %f3; ex2.approx.ftz.f32 %f4, %f4;
  fma.rn.ftz.f32 %f1, %f2, %f3, %f1; fma.rn.ftz.f32 %f1, %f4, %f5, %f1;
  add.ftz.f32 %f6, %f6, %f1;
  sub.u32 %r1, %r1, 1; setp.ne.u32 %p, %r1, 0;
  @%p bra LOOP;
  add.ftz.f32 %f1, %f1, %f6;
  st.global.f32 [%d2], %f1; ret;
}
"""


def test_a_loop_in_assembly_is_counted(tmp_path):
    """A trip: three powers, three fp32 operations, one load of 16 bytes, one subtraction, comparison and branch."""
    source, cubin = tmp_path / "counted.ptx", tmp_path / "counted.cubin"
    source.write_text(PTX)
    subprocess.run([harness.nvidia_tool("ptxas"), "--gpu-name=sm_90", source, "-o", cubin], check=True)
    (function,) = harness.disassembled(cubin.read_bytes())
    (loop,) = function.loops
    assert len(loop.body) == 3 + 3 + 1 + 3


@triton.jit
def _counted_kernel(x_ptr, y_ptr, out_ptr, n):
    rows, columns = tl.arange(0, 64), tl.arange(0, 64)
    at = rows[:, None] * 64 + columns[None, :]
    x, acc = tl.load(x_ptr + at), tl.zeros((64, 64), tl.float32)
    for block in tl.range(0, n, num_stages=3):
        y = tl.load(y_ptr + block * 4096 + at)
        p = tl.exp2(tl.dot(x, tl.trans(y)))
        acc = tl.dot(p.to(x.dtype), y, acc)
    tl.store(out_ptr + at, acc)


def test_a_loop_in_triton_is_counted():
    """A trip: two products of 64x64x64, each of four instructions, 4096 powers of 128 threads, a copy of 8 KB."""
    signature = {"x_ptr": "*bf16", "y_ptr": "*bf16", "out_ptr": "*fp32", "n": "i32"}
    aligned = {(index,): [["tt.divisibility", 16]] for index in range(3)}
    compiled = triton.compile(
        ASTSource(_counted_kernel, signature, {}, aligned), target=harness.TARGETS["sm_90"], options={"num_warps": 4}
    )
    (function,) = harness.disassembled(compiled.asm["cubin"])
    names = [one.name for one in listing.main_loop(function)]
    assert (names.count("HGMMA"), names.count("MUFU"), names.count("LDGSTS")) == (2 * 4, 4096 // 128, 4)
    assert listing.serialised(function) == 0
