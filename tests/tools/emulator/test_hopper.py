"""Warp groups, barriers that count bytes and copies that land late: products in every layout, and faults that are seen.

A GPU would give wrong numbers now and then, or wait forever. The emulator must stop each.
"""

import re

import pytest
import torch

from crate_kernels._cuda import cubins, sources
from tests.cuda import compilers
from tests.ops.conftest import poisoned_memory  # noqa: F401
from tests.tools.emulator.test_mma import DTYPES, whole

HOPPER = {"capability": 90, "shared_limit": 227 * 1024}
WHEN = pytest.mark.parametrize("early", [False, True], ids=["at-the-wait", "at-the-issue"])
ORDERS = pytest.mark.parametrize("descending", [False, True], ids=["ascending", "descending"])
NONE, BYTES_128, BYTES_64, BYTES_32 = range(4)
# What the probe's kernel gets wrong, in the order of its enumeration, and what the emulator says; None: wrong numbers.
FAULTS = {
    "no-proxy-fence": "reads what no proxy fence and barrier have ordered before it",
    "fence-behind-barrier": "reads what no proxy fence and barrier have ordered before it",
    "no-barrier": "reads what no proxy fence and barrier have ordered before it",
    "weights-too-early": "reads what no proxy fence and barrier have ordered before it",
    "sums-too-early": None,
    "operand-too-early": "registers of an operand changed before the product was waited for",
    "no-product-fence": "a product is issued with no wgmma_fence since the last wait",
    "no-wait-for-tile": "an asynchronous operation reads what has not landed",
    "wrong-parity": "an asynchronous operation reads what has not landed",
    "tile-free-too-early": "is written while another thread or a product may read it",
    "no-wait-for-free": "more threads arrive at a barrier than it counts",
    "too-few-bytes": "threads wait for others that wait elsewhere or have returned",
    "too-many-bytes": "threads wait for others that wait elsewhere or have returned",
    "too-many-arrivals": "threads wait for others that wait elsewhere or have returned",
    "no-init-fence": "a barrier is used before the fence behind its initialisation",
    "not-initialised": "a barrier in shared memory is used before it is initialised",
    "wrong-swizzle": None,
    "wrong-stride": None,
    "wrong-major": "an asynchronous operation reads what has not landed",
    "wrong-count": "threads name different counts for one barrier",
    "bank-conflict": "rows of a matrix meet in a bank of shared memory",
    "no-store-fence": "reads what no proxy fence and barrier have ordered before it",
    "no-store-wait": "a block ended before its stores had read shared memory",
    "staging-too-early": "reads what no proxy fence and barrier have ordered before it",
    "too-few-registers-returned": "a warp group waits for registers that no other gives back",
    "no-registers-returned": "a warp group waits for registers that no other gives back",
}


@DTYPES
@WHEN
@pytest.mark.parametrize("columns", [64, 128])
@pytest.mark.parametrize("a", ["k", "mn", "registers"])
@pytest.mark.parametrize("b", ["k", "mn"])
@pytest.mark.parametrize("swizzle", [BYTES_128, BYTES_64, BYTES_32], ids=["128", "64", "32"])
def test_a_product_takes_operands_of_every_layout(swizzle, a, b, columns, early, dtype, library, device):
    device(**HOPPER, early=early)
    left, right = whole(64, 64, seed=1, dtype=dtype), whole(columns, 64, seed=2, dtype=dtype)
    out = torch.empty(64, columns)
    inputs = [x.t().contiguous() if major == "mn" else x for x, major in ((left, a), (right, b))]
    library.probe_warp_group(*inputs, swizzle, a == "mn", b == "mn", a == "registers", out)
    assert torch.equal(out.double(), left.double() @ right.double().t())


@DTYPES
@WHEN
def test_a_product_takes_operands_without_swizzle(early, dtype, library, device):
    device(**HOPPER, early=early)
    left, right = whole(64, 64, seed=1, dtype=dtype), whole(128, 64, seed=2, dtype=dtype)
    out = torch.empty(64, 128)
    library.probe_warp_group(left, right, NONE, False, False, False, out)
    assert torch.equal(out.double(), left.double() @ right.double().t())


def product_of_triton(columns, inner, mn_a, mn_b, dtype=torch.bfloat16):
    """Compile a product of (64, inner) and (inner, columns) for sm_90a."""
    return compiled_by_triton("kernel", {"COLUMNS": columns, "INNER": inner, "MN_A": mn_a, "MN_B": mn_b}, dtype)


def compiled_by_triton(name, sizes, dtype):
    """Compile a kernel of triton_product.py."""
    triton = pytest.importorskip("triton", reason="needs Triton: pip install triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tests.tools.emulator import triton_product

    pointer = "*bf16" if dtype == torch.bfloat16 else "*fp16"
    pointers = {"a_ptr": pointer, "b_ptr": pointer, "out_ptr": "*fp32"}
    source = ASTSource(
        fn=getattr(triton_product, name),
        signature={**pointers, **dict.fromkeys(sizes, "constexpr")},
        constexprs=sizes,
        attrs={(n,): [["tt.divisibility", 16]] for n in range(3)},
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})


# of a product: columns, inner size, whether M of A and N of B lie in consecutive elements, swizzles of both.
SIZES = {
    "k-major": (64, 64, False, False, (BYTES_128, BYTES_128)),
    "mn-major": (128, 64, True, True, (BYTES_128, BYTES_128)),
    "64-bytes": (64, 32, False, False, (BYTES_64, BYTES_64)),
    "mn-major-64-bytes": (32, 64, False, True, (BYTES_128, BYTES_64)),
    "32-bytes": (16, 16, False, True, (BYTES_32, BYTES_32)),
}


@pytest.mark.parametrize(("columns", "inner", "mn_a", "mn_b", "swizzles"), SIZES.values(), ids=SIZES)
def test_descriptors_and_majors_are_those_of_triton(columns, inner, mn_a, mn_b, swizzles, library):
    """The leading bytes of a K-major operand, and of one atom, are not used; Triton leaves them 0."""
    ptx = product_of_triton(columns, inner, mn_a, mn_b).asm["ptx"]
    products = re.findall(r"wgmma\.mma_async[^}]*}, (%rd\d+), (%rd\d+), [^,]*, 1, 1, (\d), (\d);", ptx)
    assert len(products) == inner // 16
    constants = dict(re.findall(r"(?:or|add)\.[bs]64\s+(%rd\d+), %rd\d+, (-?\d+);", ptx))
    for side, (rows, mn, swizzle) in enumerate(((64, mn_a, swizzles[0]), (columns, mn_b, swizzles[1]))):
        ours = torch.empty(inner // 16, dtype=torch.int64)
        library.probe_descriptors(ours, swizzle, mn, rows)
        assert {product[2 + side] for product in products} == {str(int(mn))}
        theirs = [int(constants[product[side]]) for product in products]
        one_atom = rows <= {BYTES_128: 64, BYTES_64: 32, BYTES_32: 16}[swizzle]
        used = ~(0x3FFF << 16) if not mn or one_atom else ~0
        assert [value & used for value in ours.tolist()] == theirs


PRODUCT = """
#include "common/cuda/hopper.cuh"
using namespace crate_kernels;
extern "C" __global__ void product(uint64_t a, uint64_t b, float* out) {
  float d[%(N)d / 2];
  wgmma_fence();
  for (int kk = 0; kk < %(PRODUCTS)d; ++kk)
    Wgmma<%(T)s, %(N)d>::ss<%(MN_A)s, %(MN_B)s>(d, advance(a, 32 * kk), advance(b, 32 * kk), kk > 0);
  wgmma_commit();
  wgmma_wait<0>();
  pin(d);
  for (int i = 0; i < %(N)d / 2; ++i) out[threadIdx.x * %(N)d / 2 + i] = d[i];
}
"""


@DTYPES
@pytest.mark.parametrize(
    ("columns", "inner", "mn_a", "mn_b"),
    [
        pytest.param(*sizes[:4], id=name, marks=() if name == "mn-major" else pytest.mark.exhaustive)
        for name, sizes in SIZES.items()
    ],
)
def test_instructions_are_those_of_triton(columns, inner, mn_a, mn_b, dtype):
    """Sizes, dtypes, majors, and which product of a chain has no sums to add to, in machine code."""
    compiler = compilers.needed()
    fields = {"N": columns, "T": "bf16" if dtype == torch.bfloat16 else "fp16", "PRODUCTS": inner // 16}
    fields |= {"MN_A": str(mn_a).lower(), "MN_B": str(mn_b).lower()}
    options, header = cubins.options(compiler), "common/cuda/hopper.cuh"
    made = compiler.compile(PRODUCT % fields, compiler.architecture(90), options, sources.headers(header), [])
    ours, theirs = map(_products, (made.binary, product_of_triton(columns, inner, mn_a, mn_b, dtype).asm["cubin"]))
    assert len(ours) == inner // 16
    assert ours == theirs


def _products(cubin):
    """List the products of a cubin's only function: the instruction, and whether it adds to sums."""
    from tests.tools.aot import harness

    (function,) = harness.disassembled(cubin)
    return [(one.opcode, "RZ" not in one.operands) for one in function.instructions if one.name.endswith("GMMA")]


CHAINED = """
#include "mssa/cuda/hopper_tile.cuh"
using namespace crate_kernels;
extern "C" __global__ void product(uint32_t a, uint32_t b, float* out) {
  float s[%(COLUMNS)d / 2], acc[%(INNER)d / 2];
  uint32_t p[%(COLUMNS)d / 16][4];
  wgmma_fence();
  mssa::add_scores<%(T)s, %(COLUMNS)d, %(INNER)d>(s, a, b, 0, false);
  wgmma_commit();
  wgmma_wait<0>();
  pin(s);
  mssa::pack_sums<%(T)s, %(COLUMNS)d>(p, s);
  wgmma_fence();
  mssa::add_tokens<%(T)s, %(INNER)d, %(COLUMNS)d / 16>(acc, p, b, 0, false);
  wgmma_commit();
  wgmma_wait<0>();
  pin(acc);
  for (int i = 0; i < %(INNER)d / 2; ++i) out[threadIdx.x * %(INNER)d / 2 + i] = acc[i];
}
"""


def left_operands(ptx):
    """List which sums of the first product each register of each left operand has, the lower half's first."""
    sums, *_ = re.findall(r"wgmma\.mma_async\S* \{([^}]*)}, %rd", ptx)
    places = {name: n for n, name in enumerate(re.split(r",\s*", sums))}
    pairs = re.findall(r"cvt\.rn\.(?:bf16|f16)x2\.f32\s+(%r\d+), (%\w+), (%\w+);", ptx)
    halves = {to: (places[lower], places[upper]) for to, upper, lower in pairs}
    operands = re.findall(r"wgmma\.mma_async\S* \{[^}]*}, \{([^}]*)}, %rd\d+, [^,]*, 1, 1, 1;", ptx)
    return [[halves[name] for name in re.split(r",\s*", one)] for one in operands]


@DTYPES
@pytest.mark.parametrize("columns", [32, 64])
def test_an_operand_from_registers_is_that_of_triton(columns, dtype):
    """Sums of one product are the left operand of the next, whose other operand is MN-major."""
    compiler, inner = compilers.needed(), 64
    theirs = compiled_by_triton("chained", {"COLUMNS": columns, "INNER": inner}, dtype).asm
    fields = {"COLUMNS": columns, "INNER": inner, "T": "bf16" if dtype == torch.bfloat16 else "fp16"}
    options, headers = cubins.options(compiler), sources.headers("mssa/cuda/hopper_tile.cuh")
    cubin, ptx = (
        compiler.compile(CHAINED % fields, to, options, headers, []).binary
        for to in (compiler.architecture(90), "compute_90a")
    )
    assert left_operands(ptx.decode()) == left_operands(theirs["ptx"])
    assert len(left_operands(theirs["ptx"])) == columns // 16
    assert _products(cubin) == _products(theirs["cubin"])


@ORDERS
@pytest.mark.parametrize("cluster", [1, 2])
def test_a_bulk_copy_brings_what_lies_there(cluster, descending, library, device):
    device(**HOPPER, descending=descending)
    source, out = torch.randn(256), torch.empty(256)
    library.probe_bulk(source, out, 256, 0, True, cluster)
    assert torch.equal(out, source)


@ORDERS
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"waits": False}, "a thread reads what has not landed"),
        ({"skipped": 4}, "bulk copies are of multiples of 16 bytes"),
        ({"size": 252}, "bulk copies are of multiples of 16 bytes"),
        ({"size": 0}, "bulk copies are of multiples of 16 bytes"),
        ({"size": 240}, "threads wait for others that wait elsewhere or have returned"),
    ],
    ids=["not-waited-for", "address", "bytes", "no-bytes", "too-few-bytes"],
)
def test_a_wrong_bulk_copy_is_seen(change, says, descending, library, device):
    device(**HOPPER, descending=descending)
    options = {"size": 256, "skipped": 0, "waits": True, **change}
    with pytest.raises(RuntimeError, match=f"emulator: .*{says}"):
        library.probe_bulk(torch.randn(256), torch.empty(192), *options.values(), 1)


def run_pipeline(library, fault, tiles=5):
    """Run the probe on drawn tokens; return its two results and those expected."""
    w = whole(64 * tiles, 64, seed=3, dtype=torch.bfloat16)
    rows, columns = torch.empty(128, 64), torch.zeros(64 * tiles, 64)
    library.probe_pipeline(w, rows, columns, fault)
    exact = w.double()
    weights = (exact[:128] @ exact.t()).bfloat16().double()
    return (rows.double(), columns.double()), (weights @ exact, weights.t() @ exact[:128])


@WHEN
@ORDERS
def test_a_pipeline_of_copies_products_and_stores(descending, early, library, device):
    device(**HOPPER, descending=descending, early=early)
    found, expected = run_pipeline(library, 0)
    assert all(map(torch.equal, found, expected))


@ORDERS
@WHEN
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault, early, descending, library, device):
    device(**HOPPER, descending=descending, early=early)
    message = FAULTS[fault]
    number = 1 + [*FAULTS].index(fault)
    if message is None:
        found, expected = run_pipeline(library, number)
        assert not all(map(torch.equal, found, expected))
    else:
        with pytest.raises(RuntimeError, match=f"emulator: .*{message}"):
            run_pipeline(library, number)
