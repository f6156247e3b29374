"""Every kind of kernel of ista compiles for every kind of GPU, within its limits; Hopper's has other products."""

import pytest
import torch

from tests.tools.aot import harness

harness.needs_compiler()

from crate_kernels._triton.table import forced  # noqa: E402
from crate_kernels.ops.ista.triton import bits, tables  # noqa: E402
from crate_kernels.ops.ista.triton.product import Epilogue, product  # noqa: E402
from tests.cuda import compilers, resources  # noqa: E402
from tests.ops.ista.aot import HALF, SINGLE, step, streamed  # noqa: E402  # only where Triton compiles
from tests.tools.aot import listing  # noqa: E402

ALL, HOPPER = tuple(harness.TARGETS), ("sm_90",)
FORWARD, BACKWARD = slice(0, 1), slice(1, None)
# name: (call, targets, which of its launches are compiled); ``make aot`` compiles all of everything everywhere.
COVERING = {
    "many-768-forward": (step(12608, 768), ALL, FORWARD),
    "many-768-backward": (step(12608, 768), HOPPER, BACKWARD),
    "many-1000-autocast-soft": (step(12608, 1000, SINGLE, HALF, nonnegative=False), HOPPER, slice(0, 2)),
    "one-768": (step(1, 768), HOPPER, FORWARD),
}


@pytest.mark.parametrize(("name", "target"), harness.covering(COVERING))
def test_kernels_compile_within_limits(name, target):
    call, _, which = COVERING[name]
    kernels = [harness.compile_launch(launch, target) for launch in harness.launches(call, target)[which]]
    assert harness.over_limits(kernels, target, f"ista-{name}", True) == []
    products = [k for k in kernels if k.name == "_ista_product_kernel"]
    assert products
    if target == "sm_90" and name != "one-768":  # whose 16 rows are fewer than a warp group's 64
        assert all(k.wgmma > 0 for k in products), products


def test_products_of_float32_and_of_long_sums_are_the_librarys():
    for call in (step(12608, 768, SINGLE), step(12608, 4096), step(1, 3072)):
        assert {launch.function.__name__ for launch in harness.launches(call, "sm_80")} == {"_ista_update_kernel"}
    # On sm_90 wide tiles were as fast for many tokens.
    for call in (step(12608, 768, SINGLE), step(1, 3072)):
        assert {launch.function.__name__ for launch in harness.launches(call, "sm_90")} == {"_ista_update_kernel"}
    many = {launch.function.__name__ for launch in harness.launches(step(12608, 4096), "sm_90")}
    assert many == {"_ista_product_kernel", "_ista_update_kernel"}


# form of a product: whether its matrix is transposed, and the threshold.
STREAMS = {"forward": (False, 0.1), "backward": (True, None)}


@pytest.mark.parametrize("target", ["sm_90", pytest.param("sm_100", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(("transposed", "threshold"), STREAMS.values(), ids=STREAMS)
def test_two_programs_of_the_stream_are_on_a_multiprocessor(transposed, threshold, target):
    """Tiles come and go by the memory accelerator alone, in two halves; every sum is of the tensor cores."""
    tokens, matrix = (torch.empty(rows, 768, dtype=HALF, device="meta") for rows in (12608, 768))

    def call():
        product(tokens, matrix.t() if transposed else matrix, Epilogue(0.1, tokens, threshold=threshold))

    with forced(tables.PRODUCT, tables.STREAM):
        (launch,) = harness.launches(call, target)
    kernel = harness.compile_launch(launch, target)
    assert (kernel.name, kernel.stack) == ("_ista_stream_kernel", 0)
    assert 2 * kernel.shared <= harness.SHARED_LIMIT[target]
    assert 2 * 128 * kernel.registers <= 65536
    opcodes = [one.name for one in harness.listed(launch, target).instructions]
    moved = {name: opcodes.count(name) for name in ("UTMASTG", "LDG", "STG")}
    assert moved == {"UTMASTG": 2, "LDG": 0, "STG": 0}
    assert "UTMALDG" in opcodes
    assert opcodes.count("HGMMA" if target == "sm_90" else "UTCHMMA") == 8
    assert len(opcodes) < 1800  # 1240 to 1690 when it was written, by Triton 3.6 and 3.7


UPDATES = {
    "half": step(12608, 768),
    "float32": step(12608, 768, SINGLE),
    "autocast": step(12608, 768, SINGLE, HALF),
    "odd-rows": step(12607, 1000),
}


@pytest.mark.parametrize("call", UPDATES.values(), ids=UPDATES)
def test_the_update_moves_16_bytes_of_a_thread_at_once(call):
    launches = [one for one in harness.launches(call, "sm_90") if one.function.__name__ == "_ista_update_kernel"]
    assert launches
    functions = [harness.listed(launch, "sm_90") for launch in launches]
    assert {one.opcode for each in functions for one in listing.accesses(each)} == {"LDG.E.128", "STG.E.128"}


THRESHOLDS = {
    "product": step(12608, 768),
    "product-soft": step(12608, 768, nonnegative=False),
    "update": step(12608, 768, SINGLE),
    "update-soft": step(12608, 768, SINGLE, nonnegative=False),
    "stream": streamed(12608, 768),
    "stream-soft": streamed(12608, 768, nonnegative=False),
}


@pytest.mark.parametrize("call", THRESHOLDS.values(), ids=THRESHOLDS)
def test_a_threshold_takes_no_maximum(call):
    """That of a GPU is the other number where one is NaN; the interpreter's is NaN."""
    forward = harness.launches(call, "sm_90")[0]
    assert forward.arguments["ACTIVATION"] in (1, 2)
    opcodes = {one.name for one in harness.listed(forward, "sm_90").instructions}
    assert "FSETP" in opcodes
    assert not any("MNMX" in name for name in opcodes)


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_bits_are_read_by_16_bytes_of_a_thread_and_written_by_4(target):
    gate = torch.empty(25216, 3072, dtype=HALF, device="meta")
    (launch,) = harness.launches(lambda: bits.packed(gate), target)
    kernel = harness.compile_launch(launch, target)
    assert (kernel.name, kernel.stack) == ("_ista_bits_kernel", 0)
    opcodes = [one.opcode for one in listing.accesses(harness.listed(launch, target))]
    assert sorted(opcodes) == 4 * ["LDG.E.128"] + ["STG.E"]


@pytest.mark.parametrize("capability", [80, 90])
def test_the_cuda_update_moves_16_bytes_of_a_thread_at_once(capability):
    """Of each of four operands two packs of float32 or one of halves; such packs are stored."""
    update = next(kernel for kernel in resources.kernels("ista") if "update" in kernel.name)
    (function,) = harness.disassembled(resources.compiled(compilers.needed(), update, capability)[0])
    opcodes = [one.opcode for one in function.instructions]
    assert (opcodes.count("LDG.E.128"), opcodes.count("STG.E.128")) == (4 * 3, 3)
