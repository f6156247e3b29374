"""Launch tables of tssa's Triton kernels: tiles, chunks, and which sequences a program has to itself.

Those of sm_90 in 16 bits were timed on an H200 with 768 channels (benchmarks/results/nvidia-h200/), the others
counted and compiled (``make aot``). ``python -m crate_kernels tune`` times the candidates on the user's GPU.

Keyed by the channels of a token, all heads together, in the place of head_dim.

====== =========================================================================================================
TILE   elements per tile; a tile of 4096 takes 16 fp32 registers of 256 threads
TOKENS tokens per tile
LANE   numbers of a token per thread, at most: many where a program has all heads, few where it has some; 0: by TILE
CHUNK  tokens per program, at most, where it has not the whole sequence
WHOLE  kB of a sequence up to which one program has it: it is done before further launches would have begun
CROWD  the same where half of the multiprocessors get one: each keeps its own in its share of the L2 cache, which is
       50 MB by 132 on an H100
STAGES depth of the loads' pipeline
====== =========================================================================================================
"""

from __future__ import annotations

import itertools

from crate_kernels._triton.launch import INTERPRETER
from crate_kernels._triton.table import Config, LaunchRow, Table


def _every_arch(
    config: Config, interpreter: Config, **others: tuple[LaunchRow, ...]
) -> dict[str, tuple[LaunchRow, ...]]:
    """Return the rows of a table that no GPU has been measured for: one configuration, and the interpreter's.

    ``others`` come first on their architecture, where the one spills.
    """
    rows = {
        **dict.fromkeys(("sm_80", "sm_90", "sm_100", "gfx942"), (LaunchRow(config),)),
        INTERPRETER: (LaunchRow(interpreter),),
    }
    return rows | {arch: (*first, *rows[arch]) for arch, first in others.items()}


def _full(
    tile: int, chunk: int, stages: int, warps: int, lane: int = 40, whole: int = 256, crowd: int = 1024
) -> Config:
    limits = {"WHOLE": whole, "CROWD": crowd, "LANE": lane}
    return {"TILE": tile, "CHUNK": chunk, **limits, "STAGES": stages, "num_warps": warps}


def _causal(tokens: int, chunk: int, stages: int, lane: int) -> Config:
    return {"TOKENS": tokens, "CHUNK": chunk, "STAGES": stages, "LANE": lane}


# One program per sequence wherever its share of the cache may hold it, or chunks always.
_FULL_CANDIDATES = tuple(
    _full(tile, 256, stages, warps, 40, 256, 4096)
    for tile, stages, warps in itertools.product((2048, 4096, 8192), (2, 3), (4, 8))
) + tuple(
    _full(4096, chunk, stages, 4, lane, 0, 0)
    for chunk, stages, lane in itertools.product((64, 128, 256, 512), (2, 3), (0, 20, 40))
)
_FLOATS = LaunchRow(_full(2048, 256, 3, 8), half=False)
FULL_FORWARD = Table(
    "tssa_full_forward",
    _every_arch(
        _full(4096, 256, 3, 8),
        _full(1 << 14, 64, 1, 1, lane=0),
        **dict.fromkeys(("sm_80", "sm_100"), (_FLOATS,)),
        sm_90=(_FLOATS, LaunchRow(_full(4096, 256, 5, 4))),
    ),
    _FULL_CANDIDATES,
)
# Four warps: the fewest instructions a token. Tiles of 4096 make the fewest chunks, but a short sequence, which one
# program has, is in every step of the kernel at once: with 2048 three blocks fit a multiprocessor, and nothing spills.
_FEW_WARPS, _SHORT = _full(4096, 256, 3, 4), LaunchRow(_full(2048, 256, 3, 4), head_dim=1024, seqlen=256, half=True)
_SMALLER, _SINGLE = _full(2048, 256, 2, 8), _full(2048, 256, 2, 8, lane=20)
FULL_BACKWARD = Table(
    "tssa_full_backward",
    _every_arch(
        _full(4096, 256, 2, 8),
        _full(1 << 14, 64, 1, 1, lane=0),
        sm_80=(LaunchRow(_SINGLE, half=False), _SHORT, LaunchRow(_FEW_WARPS, half=True)),
        # By chunks, also where a program could have a short sequence: more programs at a time.
        sm_90=(
            LaunchRow(_SINGLE, half=False),
            LaunchRow(_full(2048, 64, 5, 4, lane=0, whole=0, crowd=0), head_dim=1024, seqlen=256, half=True),
            LaunchRow(_FEW_WARPS, half=True),
        ),
        sm_100=(LaunchRow(_SINGLE, half=False), LaunchRow(_SMALLER, half=True)),
    ),
    _FULL_CANDIDATES,
)

# Forward, one warp has a token with all its heads, and no barrier. A step of decoding is short: it takes more warps.
_DECODING = LaunchRow(_causal(4, 64, 3, lane=8), seqlen=16)
CAUSAL_FORWARD = Table(
    "tssa_causal_forward",
    _every_arch(
        _causal(1, 64, 3, lane=40),
        _causal(128, 128, 1, lane=1 << 20),
        **dict.fromkeys(("sm_80", "sm_100", "gfx942"), (_DECODING,)),
        sm_90=(_DECODING, LaunchRow(_causal(1, 32, 4, lane=40), half=True)),
    ),
    tuple(
        _causal(tokens, chunk, stages, lane)
        for tokens, chunk, stages, lane in itertools.product((1, 2), (32, 64, 128), (2, 3), (20, 40))
    ),
)
CAUSAL_BACKWARD = Table(
    "tssa_causal_backward",
    _every_arch(
        _causal(4, 32, 2, lane=8),
        _causal(128, 128, 1, lane=1 << 20),
        sm_80=(LaunchRow(_causal(4, 32, 3, lane=8), half=True),),
        sm_90=(LaunchRow(_causal(4, 32, 3, lane=16), half=True),),
    ),
    tuple(
        _causal(tokens, chunk, stages, lane)
        for tokens, chunk, stages, lane in itertools.product((2, 4, 8), (16, 32, 64), (1, 2), (4, 8))
    ),
)
TABLES = (FULL_FORWARD, FULL_BACKWARD, CAUSAL_FORWARD, CAUSAL_BACKWARD)
