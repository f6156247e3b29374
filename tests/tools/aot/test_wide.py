"""Kernels move tokens by 16 bytes a thread; narrower are numbers by row, and kernels of these alone are named."""

import pytest

from tests.tools.aot import harness

harness.needs_compiler()

from tests.tools.aot import families, listing  # noqa: E402  # only where Triton compiles

# kernel: why no thread of it loads, or stores, 16 bytes at once. Neighbouring threads have neighbouring numbers in all.
NARROW = {
    ("_mssa_combine_kernel", "store"): "a program writes one row of out a head, which has fewer bytes than its threads",
    ("_mssa_norms_kernel", "store"): "a number by head and token",
    ("_tssa_causal_bwd_kernel", "store"): "its third step stores 16 numbers of a warp, by head and token, at once",
}
ONE_BY_ONE = {"_mssa_combine_kernel"}  # kernels that move numbers of 16 bits alone
QUICK = ("ista-d768", "tssa_forward-d64-n4096")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.exhaustive) for name in families.FAMILIES],
)
def test_kernels_move_16_bytes_of_a_thread_at_once(name):
    narrow, single, seen = set(), set(), False
    for each in families.launches(name, "sm_90", harness.launches):
        kernel, seen = each.function.__name__, True
        widths = listing.widths(harness.listed(each, "sm_90"))
        narrow |= {(kernel, way) for way, bits in widths.items() if max(bits) < 128}
        single |= {kernel for bits in widths.values() if min(bits) < 32}
    assert seen
    assert narrow <= NARROW.keys()
    assert single <= ONE_BY_ONE
