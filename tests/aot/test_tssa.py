"""Every kind of kernel of tssa compiles for every kind of GPU, within its budget."""

import pytest
import triton

from tests.aot import harness

harness.needs_compiler()

from tests.aot.tssa import SINGLE, causal, decode, full  # noqa: E402  # only where Triton compiles

ALL, HOPPER = tuple(harness.TARGETS), ("sm_90",)
# name: (call, targets, whether nothing may spill on sm_80 and sm_90)
COVERING = {
    "whole-8x48": (full(197, 8, 48), ALL, True),
    "whole-16x48": (full(197, 16, 48), HOPPER, True),
    "chunks-8x64": (full(4096, 8, 64), HOPPER, True),
    "whole-fp32": (full(197, 8, 48, SINGLE), HOPPER, False),
    "whole-dropout-padded": (full(197, 8, 48, padded=True, dropout_p=0.1), HOPPER, True),
    "whole-packed": (full(197, 6, 80, packed=True), HOPPER, True),
    "causal-12x64": (causal(1024, 12, 64), ("sm_90", "gfx942"), True),
    "causal-12x64-forward": (causal(1024, 12, 64, backward=False, bias=False), ("sm_80", "sm_100"), True),
    "causal-fp32": (causal(1024, 12, 64, SINGLE, bias=False), HOPPER, False),
    "causal-short-dropout-padded": (causal(32, 12, 64, padded=True, dropout_p=0.1), HOPPER, True),
    "decode-12x64": (decode(1, 12, 64), ALL, True),
}
COMPILED = [pytest.param(name, target, id=f"{name}-{target}") for name, case in COVERING.items() for target in case[1]]


@pytest.mark.parametrize(("name", "target"), COMPILED)
def test_kernels_compile_within_budget(name, target):
    call, _, strict = COVERING[name]
    assert harness.over_budget(harness.compiled(call, target), target, f"tssa-{name}", strict) == []


def test_running_sums_need_no_exchange():
    """A thread has all tokens of its channels: scans are additions, and shuffles are for sums over channels alone."""
    for launch in harness.launches(causal(1024, 16, 64, bias=False), "sm_90"):
        if launch.arguments.get("TOTALS") or launch.arguments.get("DW"):
            ptx = triton.compile(harness._source(launch), target=harness.TARGETS["sm_90"], options=launch.options).asm[
                "ptx"
            ]
            elements = launch.arguments["BLOCK_N"] * launch.arguments["BLOCK_H"] * launch.arguments["BLOCK_D"]
            # A warp-wide scan would take two shuffles an element and more; reversed, ten more.
            assert ptx.count("shfl.sync") * 32 * launch.options["num_warps"] < elements / 2, launch.arguments


def test_lengths_share_kernels():
    """Neither a length nor a number of sequences is compiled in."""
    for form in (full, causal):
        constants = [
            [
                {p.name: launch.arguments.get(p.name) for p in launch.function.params if p.is_constexpr}
                for launch in harness.launches(form(seqlen, 8, 64, batch=batch), "sm_90")
            ]
            for seqlen, batch in ((2048, 256), (3000, 256), (4096, 100))
        ]
        assert constants[0] == constants[1] == constants[2]
