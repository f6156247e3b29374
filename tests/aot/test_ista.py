"""Every kind of kernel of ista compiles for every kind of GPU, within its budget; Hopper's has its own products."""

import pytest
import torch

from tests.aot import harness

harness.needs_compiler()

from tests.aot.ista import HALF, SINGLE, overcomplete, step  # noqa: E402  # only where Triton compiles

ALL, NVIDIA, HOPPER = tuple(harness.TARGETS), ("sm_80", "sm_90"), ("sm_90",)
COVERING = {
    "many-768": (step(12608, 768), ALL),
    "many-576-autocast": (step(12608, 576, SINGLE, HALF), NVIDIA),
    "many-fp16-soft": (step(12608, 1000, torch.float16, nonnegative=False), HOPPER),
    "few-768": (step(197, 768), HOPPER),
    "one-768": (step(1, 768), NVIDIA),
    "fp32": (step(12608, 768, SINGLE), HOPPER),
    "overcomplete-768": (overcomplete(12608, 768, 3072), HOPPER),
}
COMPILED = [pytest.param(name, target, id=f"{name}-{target}") for name, case in COVERING.items() for target in case[1]]


@pytest.mark.parametrize(("name", "target"), COMPILED)
def test_kernels_compile_within_budget(name, target):
    kernels = harness.compiled(COVERING[name][0], target)
    assert harness.over_budget(kernels, target, f"ista-{name}", True) == []
    products = [k for k in kernels if k.name == "_ista_product_kernel"]
    # float32 products are the library's.
    assert bool(products) == (name != "fp32")
    if target == "sm_90" and name != "one-768":  # whose 16 rows are fewer than a warp group's 64
        assert all(k.wgmma > 0 for k in products), products
