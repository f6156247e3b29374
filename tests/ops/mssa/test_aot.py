"""Every kind of kernel of mssa compiles for every kind of GPU, within its limits; ``make aot`` compiles them all."""

import re

import pytest
import torch

from tests.tools.aot import harness

harness.needs_compiler()

from crate_kernels.ops.mssa.triton.tile import split_dims  # noqa: E402  # only where Triton compiles
from tests.ops.mssa.aot import HALF, SINGLE, backward, between, decode, delta, forward  # noqa: E402  # only where Triton compiles

PRODUCTS = ("_mssa_fwd_kernel", "_mssa_bwd_kernel", "_mssa_rectangular_bwd_kernel")
# name: (call, targets, whether nothing may spill on harness.STRICT: 16-bit tokens, head_dim <= 128)
ALL, NVIDIA, HOPPER = tuple(harness.TARGETS), harness.STRICT, ("sm_90",)
COVERING = {
    "forward-64": (forward(4096, 64), ALL, True),
    "forward-64-causal": (forward(4096, 64, causal=True), NVIDIA, True),
    "forward-128": (forward(4096, 128), NVIDIA, True),
    "forward-128-causal": (forward(4096, 128, causal=True), HOPPER, True),
    "forward-88": (forward(1024, 88), HOPPER, True),
    "forward-112": (forward(1024, 112), HOPPER, True),
    "forward-64-fp16": (forward(4096, 64, torch.float16), HOPPER, True),
    "forward-vit-64": (forward(197, 64), ALL, True),
    "forward-vit-48": (forward(197, 48), NVIDIA, True),
    "forward-vit-256": (forward(256, 48), HOPPER, True),
    "forward-vit-causal": (forward(197, 64, causal=True), HOPPER, True),
    "forward-few-heads": (forward(197, 64, batch=1), HOPPER, True),
    "forward-256": (forward(1024, 256), HOPPER, False),
    "forward-fp32": (forward(1024, 64, SINGLE), NVIDIA, False),
    "forward-dropout": (forward(1024, 64, dropout_p=0.1), HOPPER, True),
    "forward-padded": (forward(1024, 64, padded=True), HOPPER, True),
    "forward-packed-causal": (forward(1024, 64, packed=True, causal=True), HOPPER, True),
    "forward-threshold": (forward(1024, 64, threshold=0.6), HOPPER, True),
    "backward-64": (backward(4096, 64), ALL, True),
    "backward-64-causal": (backward(4096, 64, causal=True), NVIDIA, True),
    "backward-128": (backward(4096, 128), NVIDIA, True),
    "backward-128-causal": (backward(4096, 128, causal=True), NVIDIA, True),
    "backward-112": (backward(1024, 112), HOPPER, True),
    "backward-vit-48": (backward(197, 48), HOPPER, True),
    "backward-vit-88-causal": (backward(197, 88, causal=True), ("sm_80",), True),
    "backward-vit-128": (backward(197, 128), ("sm_80",), True),
    "backward-vit-128-causal": (backward(197, 128, causal=True), ("sm_80",), True),
    "backward-256": (backward(1024, 256), HOPPER, False),
    "backward-fp32": (backward(1024, 64, SINGLE), HOPPER, False),
    "backward-dropout": (backward(1024, 64, dropout_p=0.1), HOPPER, True),
    "backward-padded-causal": (backward(1024, 64, padded=True, causal=True), HOPPER, True),
    "backward-packed": (backward(1024, 64, packed=True), HOPPER, True),
    "backward-128-fp16": (backward(4096, 128, torch.float16, dlse=True), HOPPER, True),
    "backward-dropout-fp16": (backward(1024, 64, torch.float16, padded=True, dropout_p=0.1), HOPPER, True),
    "backward-lse": (backward(1024, 64, dout=False, dlse=True), HOPPER, True),
    "backward-threshold-lse": (backward(1024, 64, threshold=0.6, dlse=True), HOPPER, True),
    "between-64-causal": (between(False, 4096, 64, causal=True), ("sm_80", "sm_100"), True),
    "between-64-causal-backward": (between(True, 4096, 64, causal=True), ("sm_90", "gfx942"), True),
    "between-64-backward-fp16": (between(True, 4096, 64, torch.float16), HOPPER, True),
    "between-64-delta": (delta(4096, 64), HOPPER, True),
    "decode-64": (decode(1, 64), ALL, True),
    "decode-128-padded": (decode(8, 128, padded=True), HOPPER, True),
    "decode-blocks": (decode(512, 64), HOPPER, True),
}


# Each takes seconds, and a neighbour has the same branches: of d64 it is tests/tools/aot/test_report.py.
SELDOM = {
    *("forward-64", "forward-64-causal", "forward-128", "forward-88", "forward-64-fp16", "forward-vit-64"),
    *("forward-vit-256", "forward-vit-causal", "backward-64", "backward-64-causal", "backward-128"),
    *("backward-vit-88-causal", "backward-vit-128"),
    *("backward-128-fp16", "backward-dropout-fp16"),
}


@pytest.mark.parametrize(
    ("name", "target"),
    [
        pytest.param(*p.values, id=p.id, marks=pytest.mark.exhaustive if p.values[0] in SELDOM else p.marks)
        for p in harness.covering(COVERING)
    ],
)
def test_kernels_compile_within_limits(name, target):
    call, _, strict = COVERING[name]
    kernels = harness.compiled(call, target)
    assert harness.over_limits(kernels, target, name, strict) == []
    products = [k for k in kernels if k.name in PRODUCTS]
    if target == "sm_90" and strict:
        assert all(k.wgmma > 0 for k in products), products


@pytest.mark.parametrize("make", [forward, backward, lambda *args: decode(1, *args[1:])], ids=["out", "dw", "step"])
@pytest.mark.parametrize(("head_dim", "dtype"), [(64, HALF), (256, HALF)], ids=str)
def test_ada_has_the_shared_memory(make, head_dim, dtype):
    kernels = harness.compiled(make(1024, head_dim, dtype), "sm_89")
    assert all(kernel.shared <= harness.SHARED_LIMIT["sm_89"] for kernel in kernels), kernels


def test_lengths_share_kernels():
    """No length is compiled in: of one, only what its blocks leave at the end."""
    found = [
        [
            {p.name: launch.arguments[p.name] for p in launch.function.params if p.is_constexpr}
            for launch in harness.launches(make(seqlen, 64, causal=True), "sm_90")
        ]
        for seqlen in (1024, 1152, 4096 + 128)
        for make in (forward, backward)
    ]
    assert found[0] == found[2] == found[4]
    assert found[1] == found[3] == found[5]


@pytest.mark.parametrize("head_dim", [64, 80])
def test_fp32_sums_of_a_tile_do_not_continue_those_of_the_tiles_before(head_dim):
    """In one chain the roundings of 10,000 tokens add up; Triton makes one of ``acc + tl.dot(p, w)``."""
    (launch,) = (x for x in harness.launches(forward(1024, head_dim, SINGLE), "sm_90") if "fwd" in x.function.__name__)
    code = harness.assemble(launch, "sm_90").compiled.asm["ttgir"]
    started_from = re.findall(r"tt\.dot %\S+, %\S+, %(\S+)", code)
    parts = len(split_dims(head_dim).WIDTHS)
    values = [name for name in started_from if not name.startswith("s_")]  # but scores, summed over parts of channels
    assert len(values) >= 2 * parts  # of the loop, and of the last keys
    assert [name for name in values if not name.startswith("cst")] == []
