"""The reading of machine code, held to loops that are counted by hand."""

import subprocess

import pytest

from tests.tools.aot import harness

harness.needs_compiler()

import triton  # noqa: E402  # only where Triton compiles
import triton.language as tl  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from tests.tools.sass import costs, disassembler, kernel, listing, rates  # noqa: E402

H100 = rates.RATES["sm_90"]


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
    assert [(loop.label, loop.depth, len(loop.body), len(loop.own)) for loop in function.loops] == [
        (".L_outer", 0, 11, 7),
        (".L_inner", 1, 4, 4),
    ]
    assert len(function.instructions) == 13  # neither the trap nor what fills up the last line


def test_inner_loops_count_as_often_as_they_run():
    found = kernel.bounds(read(NESTED), kernel.Build("sm_90", 32, 0, 4), inner_trips=(3,))
    assert found.main.label == ".L_outer"
    assert found.main.costs.instructions == 7 + 3 * 4
    assert (found.main.costs.clocks["issue"], found.main.costs.clocks["fp32"]) == (7 + 3 * 4, 3 * 2)
    assert found.main.memory == pytest.approx(4 * 32 * 16 / H100.memory)


DEEP = """.text.deep:
.L_0:
FADD R1, R1, R4
.L_1:
FMUL R1, R1, R4
.L_2:
FFMA R1, R1, R4, R4
@!P2 BRA `(.L_2)
@!P1 BRA `(.L_1)
@!P0 BRA `(.L_0)
EXIT"""


@pytest.mark.parametrize(
    ("trips", "count"), [((), 2 + 2 + 2), ((4,), 2 + 4 * (2 + 2)), ((4, 1.5), 2 + 4 * (2 + 1.5 * 2))]
)
def test_loops_of_every_depth_count_as_often_as_they_run(trips, count):
    found = kernel.bounds(read(DEEP), kernel.Build("sm_90", 32, 0, 4), inner_trips=trips)
    assert found.loops[0].costs.instructions == count


# name: (instruction, warps, pipe, clocks)
SINGLE = {
    "special": ("MUFU.EX2 R1, R1", 4, "mufu", 8),
    "multiply-add": ("FFMA R1, R1, R1, R1", 4, "fp32", 1),
    "two-multiply-adds": ("FFMA2 R2, R2, R2, R2", 4, "fp32", 2),
    "comparison": ("FSETP.GEU.AND P0, PT, R1, R1, PT", 8, "alu", 4),
    "conversion": ("F2FP.BF16.F32.PACK_AB R1, R1, R1", 4, "alu", 2),
    "integer-multiply": ("IMAD R1, R1, R1, R1", 4, "imad", 2),
    "shuffle": ("SHFL.BFLY PT, R1, R1, 0x1, 0x1f", 4, "shuffle", 4),
    "load": ("LDS.128 R4, [R1]", 4, "shared", 16),
    "never": ("@!PT LDS RZ, [RZ]", 4, "shared", 0),
    "matrices": ("LDSM.16.M88.4 R4, [R1]", 4, "shared", 16),
    "copy": ("LDGSTS.E.BYPASS.LTC128B.128 [R1], desc[UR4][R2.64], P0", 4, "shared", 16),
    "narrow-copy": ("LDGSTS.E [R1], desc[UR4][R2.64], P0", 4, "shared", 4),
    "warp-product": ("HMMA.16816.F32.BF16 R4, R4, R8, R4", 4, "tensor", 4),
    "group-product": ("HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT", 4, "tensor", 64),
    "two-groups": ("HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT", 8, "tensor", 128),
    "tf32-product": ("HGMMA.64x128x8.F32.TF32 R24, gdesc[UR8], RZ, !UPT", 4, "tensor", 64),
    "both-in-shared": ("HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT", 4, "shared", 32),
    "one-in-registers": ("HGMMA.64x64x16.F32.BF16 R88, R120, gdesc[UR8].tnspB, R88", 4, "shared", 16),
}


@pytest.mark.parametrize(("text", "warps", "pipe", "clocks"), SINGLE.values(), ids=SINGLE)
def test_an_instruction_costs_its_lanes(text, warps, pipe, clocks):
    found = costs.add_up(read(f".text.one:\n{text}").instructions, warps, H100)
    assert found.clocks[pipe] == pytest.approx(clocks)
    assert found.clocks["issue"] == warps / 4


def test_a_product_of_the_fifth_generation_has_its_shape_in_a_constant():
    """2048 by 8208490 is m128 n128: bits 24 and on are m / 16, bits 17 and on n / 8."""
    text = "UMOV UR31, 0x8200490\nUTCHMMA gdesc[UR4], gdesc[UR6], tmem[UR9], tmem[UR30], idesc[UR31], UPT"
    found = costs.add_up(read(f".text.one:\n{text}").instructions, 4, rates.RATES["sm_100"])
    assert (found.clocks["tensor"], found.clocks["shared"], found.unknown) == (64, 64, 0)
    found = costs.add_up(read(f".text.one:\n{text.partition(chr(10))[2]}").instructions, 4, rates.RATES["sm_100"])
    assert (found.clocks["tensor"], found.unknown) == (0, 1)


FIRST, NEXT = "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT", "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24"
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0"
# name: (instructions, waits, serialised)
WAITS = {
    "one-wait-for-a-sum": ([FIRST, NEXT, NEXT, WAIT], 1, 0),
    "between-two-sums": ([FIRST, WAIT, FIRST, WAIT], 2, 0),
    "within-a-sum": ([FIRST, WAIT, NEXT, WAIT, NEXT, WAIT], 3, 2),
    "for-all-but-one": ([FIRST, "WARPGROUP.DEPBAR.LE gsb0, 0x1", NEXT, WAIT], 1, 0),
}


@pytest.mark.parametrize(("lines", "waits", "serialised"), WAITS.values(), ids=WAITS)
def test_waits_within_a_sum_are_serialised(lines, waits, serialised):
    found = costs.add_up(read("\n".join([".text.one:", *lines])).instructions, 4, H100)
    assert (found.waits, found.serialised) == (waits, serialised)


# name: (arch, registers, bytes of shared memory, warps, blocks)
RESIDENT = {
    "registers": ("sm_90", 128, 0, 8, 2),
    "one-register-more": ("sm_90", 129, 0, 8, 1),
    "shared": ("sm_90", 32, 113 * 1024, 4, 2),
    "a-byte-more": ("sm_90", 32, 113 * 1024 + 1, 4, 1),
    "ampere": ("sm_80", 32, 81 * 1024 + 1, 4, 1),
    "warps": ("sm_90", 32, 0, 8, 8),
    "blocks": ("sm_90", 16, 0, 1, 32),
}


@pytest.mark.parametrize(("arch", "registers", "shared", "warps", "resident"), RESIDENT.values(), ids=RESIDENT)
def test_blocks_fit_a_multiprocessor(arch, registers, shared, warps, resident):
    assert rates.blocks(rates.RATES[arch], registers, shared, warps) == resident


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
    (function,) = disassembler.functions(cubin.read_bytes())
    found = kernel.bounds(function, kernel.Build("sm_90", 16, 4096, 8))
    (loop,) = found.loops
    assert loop.costs.instructions == 3 + 3 + 1 + 3
    clocks = loop.costs.clocks
    assert (clocks["mufu"], clocks["fp32"], clocks["shared"]) == (3 * 16, 3 * 2, 8 * 32 * 16 / 128)
    assert (clocks["issue"], clocks["alu"] + clocks["imad"]) == (10 * 2, 2 * 4)


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
    """A trip: two products of 64x64x64, 4096 powers, and one copy of 8 KB, of which two are in flight."""
    signature = {"x_ptr": "*bf16", "y_ptr": "*bf16", "out_ptr": "*fp32", "n": "i32"}
    aligned = {(index,): [["tt.divisibility", 16]] for index in range(3)}
    compiled = triton.compile(
        ASTSource(_counted_kernel, signature, {}, aligned), target=harness.TARGETS["sm_90"], options={"num_warps": 4}
    )
    (function,) = disassembler.functions(compiled.asm["cubin"])
    main = kernel.bounds(function, kernel.Build("sm_90", 128, compiled.metadata.shared, 4)).main
    clocks = main.costs.clocks
    assert (clocks["tensor"], clocks["mufu"]) == (2 * 64**3 / 2048, 4096 / 16)
    assert main.costs.copied == main.costs.bytes == 64 * 64 * 2
    assert main.in_flight == 2 * 64 * 64 * 2 * 4  # registers leave room for four blocks
    # The copy, and the operands of the products: both of the first, at first, and the second's right one.
    assert 64 * 64 * 2 * 3 / 128 <= clocks["shared"] <= 64 * 64 * 2 * 5 / 128
    assert (main.costs.waits, main.costs.serialised) in ((1, 0), (2, 0))
