"""Every kind of kernel of tssa compiles for every kind of GPU, within its limits."""

import itertools

import pytest
import torch

from tests.tools.aot import harness

harness.needs_compiler()

from tests.ops.tssa.aot import causal, chosen, decode, full  # noqa: E402  # only where Triton compiles

ALL, HOPPER = tuple(harness.TARGETS), ("sm_90",)
LARGEST = ("DMEMBERS", "DW")  # of the causal backward: twice the registers of any other step
# name: (call, targets, what of it is compiled, all by default); ``make aot`` compiles all of it, by the same names.
COVERING = {
    "whole-8x48-bfloat16": (full(197, 8, 48), ALL, ()),
    "whole-packed-dropout": (full(197, 6, 80, packed=True, dropout_p=0.1), HOPPER, ()),
    "chunks-8x64": (full(4096, 8, 64), HOPPER, ()),
    "causal-12x64-bfloat16": (causal(1024, 12, 64, bias=False), ALL, LARGEST),
    "causal-12x64-steps": (causal(1024, 12, 64), HOPPER, ()),
    "decode-12x64-bfloat16": (decode(1, 12, 64), ALL, ()),
}


@pytest.mark.parametrize(("name", "target"), harness.covering(COVERING))
def test_kernels_compile_within_limits(name, target):
    call, _, steps = COVERING[name]
    kernels = [harness.compile_launch(launch, target) for launch in chosen(harness.launches(call, target), steps)]
    assert len(kernels) >= max(len(steps), 1)
    assert harness.over_limits(kernels, target, f"tssa-{name}", True) == []


def test_running_sums_need_no_exchange():
    """A thread has all tokens of its channels: scans are additions, and shuffles are for sums over channels alone."""
    for launch in harness.launches(causal(1024, 16, 64, bias=False), "sm_90"):
        if launch.arguments.get("TOTALS") or launch.arguments.get("DW"):
            ptx = harness.assemble(launch, "sm_90").compiled.asm["ptx"]
            dims = launch.arguments["DIMS"]
            elements = launch.arguments["BLOCK_N"] * dims.BLOCK_H * dims.BLOCK_D
            # One warp-wide scan would take two shuffles an element and more; reversed, ten more. There are four.
            assert ptx.count("shfl.sync") * 32 * launch.options["num_warps"] < 2 * elements, launch.arguments


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


@pytest.mark.parametrize("target", ALL)
@pytest.mark.parametrize(("form", "kernel"), [(causal, "_tssa_causal_bwd_kernel"), (full, "_tssa_bwd_kernel")])
def test_small_tokens_leave_no_thread_of_the_backward_without_an_element(form, kernel, target):
    """Triton 3.6 compiles no full form with dropout with one, and no causal form with a lane without a channel."""
    lanes = harness.TARGETS[target].warp_size
    for heads, head_dim, seqlen in itertools.product((1, 3, 33), (1, 4, 16), (1, 2, 33)):
        launches = harness.launches(form(seqlen, heads, head_dim, dropout_p=0.1), target)
        found = [launch for launch in launches if launch.function.__name__ == kernel]
        assert found
        for tile, threads in ((launch.arguments, lanes * launch.options["num_warps"]) for launch in found):
            channels = tile["DIMS"].BLOCK_H * tile["DIMS"].BLOCK_D
            assert tile["BLOCK_N"] * channels >= threads
            assert channels >= lanes or form is full


@pytest.mark.parametrize("target", ALL)
def test_tiles_of_wide_tokens_fit_shared_memory_in_any_dtype(target):
    for heads, head_dim in ((33, 100), (64, 256)):
        for launch in harness.launches(decode(3, heads, head_dim, torch.float32), target):
            tile = launch.arguments
            dims = tile["DIMS"]
            assert tile["BLOCK_N"] == 1 or tile["BLOCK_N"] * dims.BLOCK_H * dims.BLOCK_D <= 8192
