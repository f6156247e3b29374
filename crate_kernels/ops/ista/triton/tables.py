"""Launch tables of ista's Triton kernels: the tiles of a product, its way (fused or library), and the form of a step.

Those of sm_90 in 16 bits were timed on an H200 (benchmarks/results/nvidia-h200/), the others counted and
compiled (``make aot``). ``python -m crate_kernels tune`` times the candidates on the user's GPU.
"""

from __future__ import annotations

from crate_kernels._triton.launch import INTERPRETER
from crate_kernels._triton.table import Config, LaunchRow, Table


def _product(m: int, n: int, k: int, warps: int, stages: int, library: int = 0, **more: int) -> Config:
    """LIBRARY takes PyTorch's product with one elementwise kernel behind it; the tile then goes unused.

    PERSISTENT, which configurations may lack, takes the stream where it serves (``stream.py``).
    """
    sizes = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "num_warps": warps, "num_stages": stages}
    return {**sizes, "LIBRARY": library, **more}


# The library's product costs 3 more passes over the result: it is written and read again, and the epilogue reads an
# operand of the product again. That is 6 bytes per element, 2 ps at an H100's 3 TB/s. A kernel that multiplies at 80%
# of the library's 700 TFLOP/s loses 0.7 fs per element and term of its sum: as much where the sums have 2800 terms.
# On an H200 wide tiles won even with 3072: 204 us for 25216 tokens and 768 columns, by the library 225.
_LONGEST_FUSED = 2560
_LIBRARY = _product(128, 128, 32, 8, 2, library=1)
_BY_LIBRARY = LaunchRow(_LIBRARY)
STREAM = _product(128, 128, 64, 4, 2, PERSISTENT=1)  # two programs a multiprocessor

# Keyed by the length of the sums (inner) and by the number of tokens, in the places of head_dim and seqlen; half:
# 16-bit tokens (float32 ones are rounded on the way to the product, and take twice the shared memory).
PRODUCT = Table(
    "ista_product",
    {
        INTERPRETER: (LaunchRow(_product(128, 64, 32, 4, 1)),),
        "sm_80": (
            LaunchRow(_product(16, 32, 64, 4, 4), _LONGEST_FUSED, seqlen=16),
            LaunchRow(_product(64, 64, 64, 4, 3), _LONGEST_FUSED, seqlen=1024),
            LaunchRow(_product(128, 128, 32, 8, 4), _LONGEST_FUSED, half=True),
            LaunchRow(_product(128, 128, 32, 8, 3), _LONGEST_FUSED),
            _BY_LIBRARY,
        ),
        "sm_90": (
            LaunchRow(_product(16, 32, 128, 4, 4), _LONGEST_FUSED, seqlen=16),
            LaunchRow(_product(64, 64, 64, 4, 4), _LONGEST_FUSED, seqlen=1024),
            # Three stages leave shared memory for two programs a multiprocessor: one multiplies while one finishes.
            LaunchRow(_product(128, 128, 64, 8, 3), _LONGEST_FUSED),
            LaunchRow(_LIBRARY, seqlen=1024),
            LaunchRow(_product(128, 256, 64, 8, 3), half=True),
            _BY_LIBRARY,
        ),
        "gfx942": (
            LaunchRow(_product(16, 32, 64, 4, 2), _LONGEST_FUSED, seqlen=16),
            LaunchRow(_product(64, 64, 64, 4, 2), _LONGEST_FUSED, seqlen=1024, half=True),
            LaunchRow(_product(128, 128, 32, 8, 2), _LONGEST_FUSED),
            _BY_LIBRARY,
        ),
    },
    candidates=(
        _product(128, 128, 32, 8, 2, library=1),
        STREAM,
        _product(128, 128, 64, 8, 3, PERSISTENT=1),
        *(_product(16, n, k, 4, stages) for n in (32, 64) for k in (64, 128) for stages in (3, 5)),
        *(
            _product(m, n, k, warps, stages)
            for m, n, warps in ((64, 64, 4), (64, 128, 4), (128, 128, 4), (128, 128, 8), (128, 256, 8))
            for k in (32, 64)
            for stages in (2, 3, 4)
        ),
    ),
)


def _form(name: str) -> Table:
    """Return the table of a choice between forms: one product with the tokens, and K = W - W^T W, or two.

    ONE is the number of tokens from which it is one product, in percent of the number from which that is fewer FLOP.
    """
    always, by_flop, never = ({"ONE": percent} for percent in (0, 100, 1 << 40))
    keys = ("sm_80", "sm_90", "gfx942", INTERPRETER)
    return Table(name, dict.fromkeys(keys, (LaunchRow(by_flop),)), candidates=(always, never))


def _lt(name: str) -> Table:
    """Return the table of a choice, keyed as PRODUCT: LT takes cuBLASLt."""
    keys, (never, always) = ("sm_80", "sm_90", "gfx942", INTERPRETER), ({"LT": 0}, {"LT": 1})
    return Table(name, dict.fromkeys(keys, (LaunchRow(never),)), candidates=(never, always))


# Of products without a threshold: they may add a tensor of the tokens' size; those of GATED are zero where another is.
LINEAR, GATED = _lt("ista_linear"), _lt("ista_gated")
FORWARD_FORM, BACKWARD_FORM = _form("ista_forward_form"), _form("ista_backward_form")
TABLES = (PRODUCT, LINEAR, GATED, FORWARD_FORM, BACKWARD_FORM)
