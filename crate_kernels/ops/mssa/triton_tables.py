"""Launch tables of mssa's Triton kernels: tile sizes, warps and stages by architecture.

Forward: ``BOUNDED`` takes the softmax without a running maximum where it is exact, ``WHOLE`` one program a head.
"""

from __future__ import annotations

from crate_kernels._launch import INTERPRETER, Config, Row, Table


def _forward(m: int, n: int, warps: int, stages: int, bounded: int = 0, whole: int = 0) -> Config:
    sizes = {"BLOCK_M": m, "BLOCK_N": n, "num_warps": warps, "num_stages": stages}
    return {**sizes, "BOUNDED": bounded, "WHOLE": whole}


FORWARD = Table(
    "mssa_forward",
    {
        INTERPRETER: (Row(_forward(64, 32, 4, 1, bounded=1, whole=1)),),
        "sm_80": (
            Row(_forward(64, 64, 4, 2, bounded=1, whole=1), head_dim=64, seqlen=256, half=True),
            Row(_forward(128, 64, 4, 3, bounded=1), head_dim=64, half=True),
            Row(_forward(128, 64, 8, 2, bounded=1), head_dim=128, half=True),
            Row(_forward(64, 32, 8, 2), half=True),
            Row(_forward(64, 32, 4, 2), head_dim=64),
            Row(_forward(32, 32, 4, 1)),
        ),
        "sm_90": (
            Row(_forward(64, 64, 4, 2, bounded=1, whole=1), head_dim=64, seqlen=256, half=True),
            Row(_forward(128, 64, 4, 3, bounded=1), head_dim=64, causal=True, half=True),
            Row(_forward(128, 128, 8, 3, bounded=1), head_dim=64, half=True),
            Row(_forward(128, 128, 8, 2, bounded=1), head_dim=128, half=True),
            Row(_forward(64, 64, 8, 2), half=True),
            Row(_forward(64, 32, 4, 2), head_dim=64),
            Row(_forward(32, 32, 4, 1)),
        ),
        "gfx942": (
            Row(_forward(128, 64, 4, 1, bounded=1), head_dim=128, half=True),
            Row(_forward(64, 32, 4, 1)),
        ),
    },
)


def _backward(j: int, i: int, warps: int, stages: int, derived: int = 1) -> Config:
    return {"BLOCK_J": j, "BLOCK_I": i, "num_warps": warps, "num_stages": stages, "DERIVED": derived}


BACKWARD = Table(
    "mssa_backward",
    {
        INTERPRETER: (Row(_backward(64, 32, 4, 1)),),
        "sm_80": (
            Row(_backward(64, 32, 4, 2), head_dim=64, seqlen=256, half=True),
            Row(_backward(128, 32, 8, 2), head_dim=64, half=True),
            Row(_backward(64, 32, 8, 2), head_dim=128, half=True),
            Row(_backward(32, 16, 4, 1)),
        ),
        "sm_90": (
            Row(_backward(64, 32, 4, 2), head_dim=64, seqlen=256, half=True),
            Row(_backward(128, 32, 8, 2), head_dim=64, half=True),
            Row(_backward(128, 64, 8, 2), head_dim=128, half=True),
            Row(_backward(32, 16, 4, 1)),
        ),
        "gfx942": (
            Row(_backward(64, 32, 4, 1), head_dim=128, half=True),
            Row(_backward(32, 16, 4, 1)),
        ),
    },
)


def _decode(m: int, n: int, warps: int, stages: int, resident: int = 2) -> Config:
    return {"BLOCK_M": m, "BLOCK_N": n, "num_warps": warps, "num_stages": stages, "RESIDENT": resident}


DECODE = Table(
    "mssa_decode",
    {
        INTERPRETER: (Row(_decode(16, 16, 4, 1)),),
        "sm_80": (
            Row(_decode(16, 64, 4, 3), seqlen=16, half=True),
            Row(_decode(64, 64, 4, 2), head_dim=128, half=True),
            Row(_decode(16, 32, 4, 2)),
        ),
        "sm_90": (
            Row(_decode(16, 128, 4, 3), head_dim=64, seqlen=16, half=True),
            Row(_decode(16, 64, 4, 3), seqlen=16, half=True),
            Row(_decode(64, 64, 4, 2), head_dim=128, half=True),
            Row(_decode(16, 32, 4, 2)),
        ),
        "gfx942": (Row(_decode(16, 32, 4, 1)),),
    },
)
