"""Launch tables of mssa's Triton kernels: tile sizes, warps and stages by architecture.

Tiles, warps and stages of sm_90 up to 64 and from 113 to 128 channels, in 16 bits, were timed on an H200: the fastest
of some 10 each (benchmarks/results/nvidia-h200/). DERIVED 2 and 3 and maxnreg are newer: no GPU has timed them. The
other rows are the largest tiles that compile without spilling (``make aot``) and keep a second block of warps busy.
``python -m crate_kernels tune`` times the candidates on the user's GPU.
"""

from __future__ import annotations

from crate_kernels._triton.launch import INTERPRETER
from crate_kernels._triton.table import Config, LaunchRow, Table


def _bounded_registers(config: Config, programs: int) -> Config:
    """Give the threads of 8 warps the registers that leave a multiprocessor so many such programs.

    Left alone, the assembler may aim at one program more, and spill for it.
    """
    return {**config, "maxnreg": {1: 255, 2: 128}[programs]}


def _forward(m: int, n: int, warps: int, stages: int, bounded: int = 1) -> Config:
    """Return a configuration of the forward.

    BOUNDED takes the softmax without a running maximum where it is exact.
    """
    return {"BLOCK_M": m, "BLOCK_N": n, "num_warps": warps, "num_stages": stages, "BOUNDED": bounded}


_FORWARD_SINGLE = (  # products take the time, and both forms of the softmax the registers
    LaunchRow(_bounded_registers(_forward(64, 32, 8, 2, bounded=0), programs=2), head_dim=64),
    LaunchRow(_bounded_registers(_forward(32, 16, 8, 1, bounded=0), programs=2), head_dim=112),
    LaunchRow(_bounded_registers(_forward(16, 32, 8, 1, bounded=0), programs=2)),
)
# head_dim 72, 88 and 104 are padded: their masks take the registers that 80, 96 and 112 have left.
_FORWARD_AMPERE = (
    LaunchRow(_forward(64, 32, 4, 2, bounded=0), head_dim=64, seqlen=256, half=True),
    LaunchRow(_forward(128, 64, 8, 2, bounded=0), head_dim=64, causal=True, half=True),
    LaunchRow(_forward(128, 32, 8, 2), head_dim=48, half=True),
    LaunchRow(_forward(128, 64, 8, 2), head_dim=64, half=True),
    LaunchRow(_forward(128, 32, 8, 2, bounded=0), head_dim=80, half=True),
    LaunchRow(_forward(64, 32, 8, 2, bounded=0), head_dim=104, half=True),
    LaunchRow(_forward(128, 32, 8, 2, bounded=0), head_dim=128, half=True),
    LaunchRow(_forward(64, 16, 8, 2), head_dim=255, half=True),
    LaunchRow(_forward(64, 32, 8, 2), half=True),
    *_FORWARD_SINGLE,
)
_FORWARD_WIDE = (LaunchRow(_forward(128, 64, 8, 2, bounded=0), half=True), *_FORWARD_SINGLE)
# Programs of one warp group, several per multiprocessor: one multiplies while another takes its exponentials.
_FORWARD_HOPPER = (
    LaunchRow(_forward(64, 64, 4, 3, bounded=0), head_dim=64, seqlen=1024, half=True),
    LaunchRow(_forward(64, 64, 4, 3, bounded=0), head_dim=64, causal=True, half=True),
    LaunchRow(_forward(128, 64, 4, 3), head_dim=64, half=True),
    LaunchRow(_forward(128, 64, 8, 3, bounded=0), head_dim=72, half=True),
    LaunchRow(_forward(128, 64, 8, 3), head_dim=80, half=True),
    LaunchRow(_forward(128, 64, 8, 3, bounded=0), head_dim=88, half=True),
    LaunchRow(_forward(128, 64, 8, 3), head_dim=96, half=True),
    LaunchRow(_forward(128, 32, 8, 3, bounded=0), head_dim=104, half=True),
    LaunchRow(_forward(128, 64, 8, 3), head_dim=112, half=True),
    LaunchRow(_forward(64, 128, 4, 2, bounded=0), head_dim=128, half=True),
    *_FORWARD_WIDE,
)
# Its 512 columns of tensor memory hold two programs at a time. Its registers do, too, but not in all forms:
#   keys per tile                64: 127 registers     128: 254
#   causal, with the bounded softmax, which has the online one beside it: 217, without: 122
_FORWARD_BLACKWELL = (
    LaunchRow(_forward(64, 64, 4, 2, bounded=0), head_dim=64, seqlen=256, half=True),
    LaunchRow(_bounded_registers(_forward(128, 64, 8, 3, bounded=0), programs=2), head_dim=64, half=True),
    LaunchRow(_forward(128, 64, 8, 3, bounded=0), head_dim=96, half=True),
    LaunchRow(_forward(128, 32, 8, 3, bounded=0), head_dim=112, half=True),
    LaunchRow(_forward(128, 64, 8, 3, bounded=0), head_dim=128, half=True),
    *_FORWARD_WIDE,
)
FORWARD = Table(
    "mssa_forward",
    {
        # Not square: swapping M and N must fail a test. Small: a test crosses a few tiles.
        INTERPRETER: (LaunchRow(_forward(64, 32, 4, 1)),),
        "sm_80": _FORWARD_AMPERE,
        "sm_89": _FORWARD_AMPERE,
        "sm_90": _FORWARD_HOPPER,
        "sm_100": _FORWARD_BLACKWELL,
        "gfx942": (
            LaunchRow(_forward(128, 64, 4, 1), head_dim=128, half=True),
            LaunchRow(_forward(64, 32, 4, 1), half=True),
            LaunchRow(_forward(32, 32, 4, 1)),
        ),
    },
    candidates=tuple(
        _forward(m, n, warps, stages, bounded)
        for m, n in ((64, 32), (64, 64), (64, 128), (128, 32), (128, 64), (128, 128))
        for warps in (4, 8)
        for stages in (2, 3)
        for bounded in (0, 1)
    ),
)


def _backward(j: int, i: int, warps: int, stages: int, derived: int = 1) -> Config:
    """Return a configuration of the backward.

    DERIVED, where it is exact: 1 takes the second exponential of a tile from the first; 2 takes the symmetric form of
    symmetric.py where every token sees all, in 16 bits; 3 where attention is causal, too.
    """
    return {"BLOCK_J": j, "BLOCK_I": i, "num_warps": warps, "num_stages": stages, "DERIVED": derived}


# Left alone, the assembler keeps wide heads in 32 registers and 5 KB of stack. A second stage of the tiles that stream
# spills less in all wide cases but these.
_BACKWARD_SINGLE = (
    LaunchRow(_backward(32, 16, 8, 1), head_dim=64),
    LaunchRow(_bounded_registers(_backward(16, 16, 8, 1), programs=1), head_dim=128),
    LaunchRow(_bounded_registers(_backward(16, 16, 8, 2), programs=1), head_dim=160),
    LaunchRow(_bounded_registers(_backward(16, 16, 8, 1), programs=1), causal=False),
    LaunchRow(_bounded_registers(_backward(16, 16, 8, 2), programs=1)),
)
# Where 256 channels are padded, masks take the registers.
_BACKWARD_BROAD = (
    LaunchRow(_backward(32, 16, 8, 1), head_dim=255, half=True),
    LaunchRow(_backward(32, 32, 8, 2), half=True),
)
_BACKWARD_AMPERE = (
    LaunchRow(_backward(64, 16, 4, 2, derived=2), head_dim=64, seqlen=256, half=True),
    LaunchRow(_backward(128, 16, 8, 2, derived=2), head_dim=64, half=True),
    LaunchRow(_backward(64, 16, 8, 2), head_dim=72, half=True),
    LaunchRow(_backward(64, 16, 4, 2, derived=2), head_dim=80, half=True),
    LaunchRow(_backward(64, 16, 8, 1), head_dim=88, causal=True, half=True),
    LaunchRow(_backward(64, 16, 4, 1, derived=2), head_dim=96, half=True),
    LaunchRow(_backward(32, 16, 8, 1), head_dim=104, half=True),
    LaunchRow(_backward(64, 16, 4, 1, derived=2), head_dim=112, half=True),
    LaunchRow(_backward(64, 32, 8, 2, derived=2), head_dim=128, half=True),
    *_BACKWARD_BROAD,
    *_BACKWARD_SINGLE,
)
_BACKWARD_PADDED = (
    LaunchRow(_backward(128, 32, 8, 2), head_dim=96, half=True),
    LaunchRow(_backward(128, 16, 8, 2), head_dim=104, half=True),
    LaunchRow(_backward(128, 32, 8, 2), head_dim=112, half=True),
)
_BACKWARD_HOPPER = (
    LaunchRow(_backward(64, 32, 4, 2, derived=2), head_dim=64, seqlen=256, half=True),
    LaunchRow(_backward(64, 64, 4, 1), head_dim=64, causal=True, half=True),
    LaunchRow(_backward(64, 64, 4, 2, derived=2), head_dim=63, half=True),
    # Three programs a multiprocessor; narrower heads are padded, and would spill.
    LaunchRow({**_backward(64, 64, 4, 2, derived=2), "maxnreg": 168}, head_dim=64, half=True),
    *_BACKWARD_PADDED,
    LaunchRow(_backward(64, 64, 4, 2, derived=2), head_dim=128, half=True),
    *_BACKWARD_BROAD,
    *_BACKWARD_SINGLE,
)
_BACKWARD_BLACKWELL = (
    # Two stages: with three, Triton 3.6 serialises the products.
    LaunchRow(_backward(64, 64, 4, 2, derived=2), head_dim=64, seqlen=256, causal=False, half=True),
    LaunchRow(_backward(64, 32, 4, 3), head_dim=64, seqlen=256, half=True),
    LaunchRow(_backward(128, 64, 8, 2, derived=2), head_dim=64, causal=False, half=True),
    LaunchRow(_bounded_registers(_backward(128, 32, 8, 2), programs=1), head_dim=96, seqlen=256, half=True),
    *_BACKWARD_PADDED,
    LaunchRow(_backward(128, 64, 8, 2, derived=2), head_dim=128, causal=False, half=True),
    LaunchRow(_backward(128, 32, 8, 2), head_dim=128, half=True),
    *_BACKWARD_BROAD,
    *_BACKWARD_SINGLE,
)
BACKWARD = Table(
    "mssa_backward",
    {
        INTERPRETER: (LaunchRow(_backward(64, 32, 4, 1, derived=2)),),
        "sm_80": _BACKWARD_AMPERE,
        "sm_89": _BACKWARD_AMPERE,
        "sm_90": _BACKWARD_HOPPER,
        "sm_100": _BACKWARD_BLACKWELL,
        "gfx942": (
            LaunchRow(_backward(64, 32, 4, 1, derived=2), head_dim=96, half=True),
            LaunchRow(_backward(64, 32, 4, 1), head_dim=112, half=True),  # dividing fp16 spills there
            LaunchRow(_backward(64, 32, 4, 1, derived=2), head_dim=128, half=True),
            LaunchRow(_backward(32, 16, 4, 1)),
        ),
    },
    candidates=tuple(
        _backward(j, i, warps, stages, derived)
        for j, i in ((64, 32), (64, 64), (128, 32), (128, 64))
        for warps in (4, 8)
        for stages in (1, 2, 3)
        for derived in (1, 2, 3)
    ),
)


def _decode(m: int, n: int, warps: int, stages: int, resident: int = 2) -> Config:
    """Return a configuration of decoding; sequences are split until a multiprocessor has RESIDENT programs."""
    return {"BLOCK_M": m, "BLOCK_N": n, "num_warps": warps, "num_stages": stages, "RESIDENT": resident}


# A warp per program: what passes from warp to warp costs a barrier, and the weights 9 of them per tile and 2 passes
# through shared memory. Registers leave a multiprocessor 7 or 8 such programs, with 112 KB in flight or more.
_DECODE = (
    LaunchRow(_decode(16, 32, 1, 4, resident=12), head_dim=48, seqlen=16, half=True),
    LaunchRow(_decode(16, 64, 1, 3, resident=8), head_dim=64, seqlen=16, half=True),
    LaunchRow(_decode(16, 32, 4, 4), head_dim=104, seqlen=16, half=True),  # with a warp, their parts or masks spill
    LaunchRow(_decode(16, 32, 8, 4), head_dim=112, seqlen=16, half=True),
    LaunchRow(_decode(16, 32, 1, 3, resident=8), head_dim=128, seqlen=16, half=True),
    LaunchRow(_decode(64, 64, 4, 2), head_dim=64, half=True),
    LaunchRow(_decode(32, 32, 8, 2), head_dim=104, half=True),
    LaunchRow(_decode(64, 32, 8, 2), head_dim=128, half=True),
    LaunchRow(_decode(16, 32, 4, 2), half=True),
    LaunchRow(_bounded_registers(_decode(16, 16, 8, 1), programs=2)),
)
_DECODE_HOPPER = (LaunchRow(_decode(16, 32, 1, 4, resident=12), head_dim=64, seqlen=16, half=True), *_DECODE)
DECODE = Table(
    "mssa_decode",
    {
        INTERPRETER: (LaunchRow(_decode(16, 16, 4, 1, resident=16)),),
        "sm_80": _DECODE,
        "sm_89": _DECODE,
        "sm_90": _DECODE_HOPPER,
        "sm_100": _DECODE,
        "gfx942": (LaunchRow(_decode(16, 32, 4, 1)),),
    },
    candidates=tuple(
        _decode(16, n, warps, stages, resident)
        for n in (32, 64, 128)
        for warps in (1, 2, 4, 8)
        for stages in (2, 3, 4)
        for resident in ((8, 12) if warps == 1 else (1, 2, 4))
    ),
)
TABLES = (FORWARD, BACKWARD, DECODE)
