"""The machine code of the persistent kernels of the full form and the walking ones of the causal form, without a GPU.

What counts is the whole kernel: its passes are short, and their ends are as long as the passes.
"""

import json
from typing import NamedTuple

import pytest
import torch

from crate_kernels.cli import tune
from crate_kernels.ops.tssa.cuda import persistent, walking
from tests.cuda import compilers, resources
from tests.ops.tssa import walking as walks
from tests.ops.tssa.persistent import config
from tests.tools.aot import harness

harness.needs_compiler()

BF16, FP16 = torch.bfloat16, torch.float16
IMAGES = (4, 8, 16)  # heads of ToST's models of images that tuning times


class Case(NamedTuple):
    """A kernel: dtype, heads, channels, if there is a mask and which direction; its configuration; tokens."""

    sizes: tuple
    config: dict
    seqlen: int

    def launch(self):
        """Return the kernel, its bytes of shared memory."""
        _, nheads, head_dim, _, backward = self.sizes
        shared = persistent.shared_bytes(nheads, head_dim, self.seqlen, backward, self.config)
        return persistent.kernel(*self.sizes, self.config), shared


class Walk(NamedTuple):
    """A walking kernel: dtype, heads, channels, if there is a mask and which direction; its configuration."""

    sizes: tuple
    config: dict

    def launch(self):
        """Return the kernel and its bytes of shared memory."""
        return walking.kernel(*self.sizes, self.config), walking.shared_bytes(
            *self.sizes[1:3], self.sizes[-1], self.config
        )


CASES = {
    "forward-384-channels": Case((BF16, 8, 48, False, False), config(4, 2, 192), 196),
    "forward-384-channels-fp16": Case((FP16, 8, 48, False, False), config(4, 2, 192), 196),
    "forward-384-channels-padded": Case((BF16, 8, 48, True, False), config(4, 2, 192), 196),
    "forward-192-channels": Case((BF16, 4, 48, False, False), config(2, 2, 192), 196),
    "forward-512-channels": Case((BF16, 8, 64, False, False), config(4, 2, 192), 196),
    "forward-768-channels": Case((BF16, 12, 64, False, False), config(8, 2, 192), 196),
    "forward-768-channels-784-tokens": Case((BF16, 16, 48, False, False), config(8, 1, 384), 784),
    "backward-384-channels": Case((BF16, 8, 48, False, True), config(4, 1, 192), 196),
    "backward-384-channels-fp16": Case((FP16, 8, 48, False, True), config(4, 1, 192), 196),
    "backward-384-channels-padded": Case((BF16, 8, 48, True, True), config(4, 1, 192), 196),
    "backward-192-channels": Case((BF16, 4, 48, False, True), config(2, 2, 192), 196),
    "backward-512-channels": Case((BF16, 8, 64, False, True), config(8, 1, 192), 196),
    "backward-768-channels": Case((BF16, 12, 64, False, True), config(8, 2, 384), 196),
    "forward-768-channels-4096-tokens": Case((BF16, 16, 48, False, False), config(8, 1, 384, 4), 4096),
    "backward-768-channels-4096-tokens": Case((BF16, 16, 48, False, True), config(8, 1, 384, 12), 4096),
    "backward-768-channels-784-tokens": Case((BF16, 16, 48, False, True), config(8, 1, 384, 2), 784),
    "backward-768-channels-784-tokens-cluster-of-16": Case((BF16, 16, 48, False, True), config(16, 1, 384), 784),
    "backward-512-channels-1024-tokens": Case((BF16, 8, 64, False, True), config(8, 1, 384, 2), 1024),
    "backward-768-channels-1024-tokens": Case((BF16, 16, 48, False, True), config(8, 1, 384, 4), 1024),
    "forward-768-channels-cluster-of-16": Case((BF16, 12, 64, False, False), config(16, 2, 192), 784),
    "walking-768-channels": Walk((BF16, 12, 64, False, False), walks.EIGHT),
    "walking-768-channels-fp16": Walk((FP16, 12, 64, False, False), walks.config(8, 2, 384, 8)),
    "walking-768-channels-padded": Walk((BF16, 12, 64, True, False), walks.EIGHT),
    "walking-1024-channels": Walk((BF16, 16, 64, False, False), walks.EIGHT),
    "walking-384-channels": Walk((BF16, 8, 48, False, False), walks.config(4, 1, 192, 16)),
    "walking-back-768-channels": Walk((BF16, 12, 64, False, True), walks.BACK),
    "walking-back-768-channels-fp16": Walk((FP16, 12, 64, False, True), walks.config(8, 2, 384, 4)),
    "walking-back-768-channels-padded": Walk((BF16, 12, 64, True, True), walks.BACK),
    "walking-back-768-channels-192-threads": Walk((BF16, 12, 64, False, True), walks.config(8, 1, 192, 8)),
    "walking-back-1024-channels": Walk((BF16, 16, 64, False, True), walks.BACK),
}
# By NVRTC 13.0: registers and instructions, of which there may be no more; bytes of shared memory of a block, and
# blocks of a multiprocessor, of which there may be no fewer.
RECORDED = {
    "forward-384-channels": (72, 2613, 88416, 2),
    "forward-384-channels-fp16": (72, 2613, 88416, 2),
    "forward-384-channels-padded": (71, 3010, 88416, 2),
    "forward-192-channels": (72, 2564, 85872, 2),
    "forward-512-channels": (80, 2596, 117088, 1),
    "forward-768-channels": (79, 2702, 97488, 2),
    "forward-768-channels-784-tokens": (79, 2749, 179424, 1),
    "backward-384-channels": (79, 4183, 94592, 2),
    "backward-384-channels-fp16": (79, 4183, 94592, 2),
    "backward-384-channels-padded": (80, 4369, 94592, 2),
    "backward-192-channels": (77, 4144, 168112, 1),
    "backward-512-channels": (79, 4406, 72112, 3),
    "backward-768-channels": (79, 4358, 194528, 1),
    "forward-768-channels-4096-tokens": (99, 2814, 227536, 1),
    "backward-768-channels-4096-tokens": (125, 4621, 169216, 1),
    "backward-768-channels-784-tokens": (153, 4490, 188448, 1),
    "backward-768-channels-784-tokens-cluster-of-16": (80, 4637, 188448, 1),
    "backward-512-channels-1024-tokens": (128, 4402, 160304, 1),
    "backward-768-channels-1024-tokens": (143, 4508, 133968, 1),
    "forward-768-channels-cluster-of-16": (80, 2889, 175264, 1),
    "walking-768-channels": (71, 4205, 114080, 2),
    "walking-768-channels-fp16": (80, 4169, 131424, 1),
    "walking-768-channels-padded": (69, 4586, 114080, 2),
    "walking-1024-channels": (79, 4214, 120048, 1),
    "walking-384-channels": (64, 4023, 74144, 3),
    "walking-back-768-channels": (154, 6483, 178160, 1),
    "walking-back-768-channels-fp16": (154, 6612, 170160, 1),
    "walking-back-768-channels-padded": (154, 6746, 178160, 1),
    "walking-back-768-channels-192-threads": (154, 6684, 101520, 2),
    "walking-back-1024-channels": (156, 6424, 186288, 1),
}
EVERY_TIME = ("forward-384-channels", "backward-384-channels")


def measured(name, compiler):
    """Return spilled bytes, registers, instructions, shared memory and blocks of a case."""
    of = CASES[name]
    kernel, shared = of.launch()
    cubin, (said,) = resources.compiled(compiler, kernel, 90)
    (function,) = harness.disassembled(cubin)
    threads = persistent.threads_of(of.sizes[1] * of.sizes[2], of.config["THREADS"])
    blocks = resources.blocks_per_multiprocessor(said.registers, threads, shared)
    opcodes = [one.opcode for one in function.instructions]
    # Tokens come by bulk copies, and are read and written by 16 bytes a thread.
    assert {"LDS.128", "STG.E.128"} <= {*opcodes}
    assert any(opcode.startswith("UBLKCP") for opcode in opcodes)
    return said.spills, said.registers, len(opcodes), shared, blocks


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[] if one in EVERY_TIME else [pytest.mark.exhaustive]) for one in CASES]
)
def test_a_kernel_takes_no_more_than_recorded(name):
    compiler = compilers.needed()
    spills, *used, blocks = measured(name, compiler)
    assert spills == 0
    if compiler.version == (13, 0):
        *maxima, minimum = RECORDED[name]
        assert all(now <= before for now, before in zip(used, maxima, strict=True)), (used, maxima)
        assert blocks >= minimum


@pytest.mark.exhaustive
@pytest.mark.parametrize("nheads", IMAGES)
def test_no_kernel_that_is_ranked_spills(nheads):
    compiler, width, kernels = compilers.needed(), nheads * 48, set()
    for name, configs in json.loads((tune._RANKED / "sm_90.json").read_text()).items():
        if name.startswith("tssa_persistent") and f" head_dim {width} " in name:
            sizes = nheads, 48, False, "backward" in name
            kernels |= {persistent.kernel(BF16, *sizes, config) for config in configs}
    spills = {one.name: resources.compiled(compiler, one, 90)[1][0].spills for one in kernels}
    assert spills
    assert not any(spills.values()), spills
