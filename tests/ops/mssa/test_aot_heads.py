"""The machine code of mssa's kernels of sm_90a, read without a GPU: the whole kernel, as many walks are unrolled."""

import itertools
import json

import pytest
import torch

from crate_kernels._cuda.launch import Kernel
from crate_kernels.ops.mssa.cuda import heads, hopper_kernels, long_pairs, long_rows
from tests.cuda import compilers
from tests.ops.mssa import aot_hopper
from tests.ops.mssa.aot_hopper import POWER, PRODUCT, RECORDED, WAIT
from tests.tools.aot import harness

harness.needs_compiler()

EVERY = json.loads(RECORDED.read_text())
EVERY_TIME = ("mssa::head_backward_kernel<bf16, 64, 208, false, false>", "mssa::long_scale_kernel<bf16, 64>")
# Products of a kernel of long rows, by channels, and by whether it is causal; has keys and queries apart; has both
# directions of a pair.
LONG = {("64", "false"): 40, ("64", "true"): 40, ("128", "false"): 48, ("128", "true"): 48}
LONG_BACKWARD = {("64", "false"): 40, ("64", "true"): 56, ("128", "false"): 64, ("128", "true"): 88}
LONG_PAIRS = {("64", "true"): 72, ("64", "false"): 48, ("128", "true"): 96, ("128", "false"): 64}
DTYPES = pytest.mark.parametrize("dtype", ["bf16", "fp16"])


@pytest.fixture(scope="module")
def launches():
    """Return the shapes of launches by the names of kernels, and these."""
    return {kernel.name: (kernel, shape) for kernel, shape in aot_hopper.launches().items()}


def test_the_record_is_of_every_kernel_but_those_of_whole_heads_that_differ_in_sizes(launches):
    assert EVERY["kernels"].keys() == launches.keys()
    assert {kernel.name for kernel in hopper_kernels()} - {kernel.name for kernel in heads.kernels()} < launches.keys()


def test_what_a_call_of_any_size_launches_is_listed():
    """In ``heads.every_kernel``, whose spills tests/cuda/test_resources.py counts."""
    for dim, seqlen, masked in itertools.product((8, 72, 128), (1, 66, 208), (False, True)):
        with aot_hopper.recording() as found:
            aot_hopper.call_both_ways(heads, torch.bfloat16, dim, seqlen, causal=True, masked=masked)
        of_heads = {kernel for kernel, _ in found if "head_" in kernel.name}
        assert len(of_heads) == 2
        assert of_heads <= {*heads.every_kernel(-(-dim // 16) * 16, causal=True)}


@pytest.mark.parametrize(
    "name",
    [pytest.param(one, marks=[] if one in EVERY_TIME else [pytest.mark.exhaustive]) for one in EVERY["kernels"]],
)
def test_a_kernel_is_no_longer_and_its_powers_run_beside_products(name, launches):
    compiler = compilers.needed()
    *found, beside, blocks = aot_hopper.measured(*launches[name], compiler)
    if "{}.{}".format(*compiler.version) == EVERY["nvrtc"]:
        *maxima, min_beside, min_blocks = EVERY["kernels"][name]
        assert all(now <= before for now, before in zip(found, maxima, strict=True)), (found, maxima)
        assert beside >= min_beside
        assert blocks >= min_blocks


def kinds_of(kernel, products, powers):
    """Return the order of products, powers and waits of a kernel of long rows, and hold their numbers."""
    compiler = compilers.needed()
    instructions, _ = aot_hopper.instructions_of(kernel, compiler)
    kinds = [one for each in instructions for one in (PRODUCT, POWER, WAIT) if each.opcode.startswith(one)]
    assert kinds.count(POWER) == powers
    if compiler.version == (13, 0):
        assert kinds.count(PRODUCT) == products
    return [kind for kind, _ in itertools.groupby(kinds)]


@pytest.mark.exhaustive
@DTYPES
@pytest.mark.parametrize(("dim", "causal"), LONG)
def test_the_powers_of_long_rows_run_beside_products(dim, causal, dtype):
    """Those of a tile lie between the wait for its scores and that for the sums of the tile before."""
    first_tile, tile, end = (PRODUCT, WAIT, POWER), (PRODUCT, WAIT, POWER, WAIT), (PRODUCT, WAIT)
    kernel = Kernel(long_rows._FORWARD_HEADER, f"mssa::long_forward_kernel<{dtype}, {dim}, {causal}>")
    assert kinds_of(kernel, LONG[dim, causal], 128) == [*first_tile, *tile, *end]


@pytest.mark.exhaustive
@DTYPES
@pytest.mark.parametrize(("dim", "apart"), LONG_BACKWARD)
def test_the_powers_of_their_backward_do_too(dim, apart, dtype):
    walks = 2 if apart == "true" else 1
    kernel = Kernel(long_rows._BACKWARD_HEADER, f"mssa::long_backward_kernel<{dtype}, {dim}, {apart}>")
    order = kinds_of(kernel, LONG_BACKWARD[dim, apart], 64 * walks)
    assert order == [*(PRODUCT, WAIT, POWER, WAIT) * 2, PRODUCT, WAIT] * walks


@pytest.mark.exhaustive
@DTYPES
@pytest.mark.parametrize(("dim", "both"), LONG_PAIRS)
def test_the_powers_of_pairs_do_too(dim, both, dtype):
    """Beside every product of a tile: those for A, own rows' sums and those of the rows of the tile before."""
    kernel = Kernel(long_pairs._HEADER, f"mssa::long_pairs_kernel<{dtype}, {dim}, {both}>")
    order = kinds_of(kernel, LONG_PAIRS[dim, both], 64)
    assert order == [*(PRODUCT, WAIT), *(PRODUCT, POWER, WAIT), *(PRODUCT, WAIT, POWER, WAIT), PRODUCT, WAIT]
