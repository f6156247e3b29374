"""Which kernels of a call have the lower bound, Triton's or those of CUDA C++, by the recorded figures.

The tables of docs/gpu.md say how well a loop uses what it does; backends are compared by what a call wants of them. So
the largest pipe's clocks are divided by those of the operator's own work: the products of a tile of scores (two
forward, five backward), or the bytes that have to move. What is multiplied twice or read again does not count.
"""

import re

from crate_kernels.ops.mssa.triton import tables
from tests.tools.aot import figures
from tests.tools.sass.rates import RATES

CLEARLY = 0.95  # of the other's clocks: the rest is within what the model leaves out
_ITEM = 2  # bytes of a bf16 number
_PIPES = ("issue", "tensor", "mufu", "alu", "fp32", "shared")
_PRODUCTS = {"forward": 2, "backward": 5}
# Family of Triton's kernels: that of the CUDA kernels that take the same calls. Two are left out: ista, whose products
# CUDA C++ leaves to cuBLAS, and mssa's forward at n197, of which the CUDA kernels have the pair form.
COMPARED = {
    "mssa_forward-d64-n16384": "cuda-mssa_forward-d64",
    "mssa_forward-d128-n16384": "cuda-mssa_forward-d128",
    "mssa_forward-d128-n197": "cuda-mssa_forward-d128",
    "mssa_backward-d64-n16384": "cuda-mssa_backward-d64",
    "mssa_backward-d64-n197": "cuda-mssa_backward-d64",
    "mssa_backward-d128-n16384": "cuda-mssa_backward-d128",
    "mssa_backward-d128-n197": "cuda-mssa_backward-d128",
    "mssa_decode-d64": "cuda-mssa_decode",
    "mssa_decode-d128": "cuda-mssa_decode",
    "tssa_forward-d64-n4096": "cuda-tssa_forward",
    "tssa_backward-d64-n4096": "cuda-tssa_backward",
    "tssa_causal_forward-d64-n4096": "cuda-tssa_causal_forward",
    "tssa_causal_backward-d64-n4096": "cuda-tssa_causal_backward",
}
_MSSA = re.compile(r"mssa_(forward|backward)-d(\d+)-n(\d+)")
_CUDA_MSSA = re.compile(r"mma_(forward|backward)_kernel<bf16, (\d+), (\d+), (\d+),")
_CUDA_CAUSAL = re.compile(r"tssa_causal_bwd_kernel<TssaFours, \(TssaCausalBackwardStep\)(\d)>")


def _multiplied(direction, rows, columns, head_dim, target):
    """Return the clocks that a tile of scores takes in the tensor cores."""
    return _PRODUCTS[direction] * rows * columns * head_dim / RATES[target].tensor


def _work_of_triton(name, figure, target):
    """Return the clocks of the work in a trip of the main loop."""
    found = _MSSA.match(name)
    if found is None:
        return figure["memory"]  # families.traffic: the bytes that have to move
    direction, head_dim, seqlen = found[1], int(found[2]), int(found[3])
    table, sides = {
        "forward": (tables.FORWARD, ("BLOCK_M", "BLOCK_N")),
        "backward": (tables.BACKWARD, ("BLOCK_J", "BLOCK_I")),
    }[direction]
    config = next(row.config for row in table.rows[target] if row.fits(head_dim, seqlen, False, True))
    return _multiplied(direction, *(config[side] for side in sides), head_dim, target)


def _work_of_cuda(figure, target):
    """Return the clocks of the work in a trip of the main loop."""
    if found := _CUDA_MSSA.search(figure["kernel"]):
        direction, (head_dim, rows, columns) = found[1], map(int, found.groups()[1:])
        # Four warps of `rows` times 16; the loop of the backward goes through a tile by 16.
        return _multiplied(direction, 64 * rows, 16 if direction == "backward" else columns, head_dim, target)
    if found := _CUDA_CAUSAL.search(figure["kernel"]):
        # Four tokens, four channels in each of 256 threads; csrc/tssa/cuda/causal_backward.cuh has the passes by step.
        passes = (1, 2, 2, 3)[int(found[1])]
        return passes * 4 * 4 * 256 * _ITEM / RATES[target].memory
    return figure["memory"]  # the bytes that are asked for: as many as have to move, or more, which spares it clocks


def cost(figure, work):
    """Return a loop's clocks over those of its work; the memory's are the least where it is the limit."""
    bound = max(figure[pipe] for pipe in _PIPES) / work
    return max(bound, 1.0) if figure["streams"] else bound


def costs(name, target):
    """Return the costs of a family by compiler: both recorded versions of Triton, and "cuda"."""
    found = {
        compiler: cost(figure, _work_of_triton(name, figure, target))
        for compiler in ("3.6", "3.7")
        for figure in [figures.recorded(compiler, target)[name]]
    }
    figure = figures.recorded("cuda", target)[COMPARED[name]]
    return {**found, "cuda": cost(figure, _work_of_cuda(figure, target))}


def cuda_wins(name, target):
    """Return whether the CUDA kernels are clearly better than those of either Triton."""
    found = costs(name, target)
    return found["cuda"] < CLEARLY * min(found["3.6"], found["3.7"])
