"""A plain product of matrices in Triton, to compare ista's with: the same tile, and nothing done to the result."""

import torch
import triton
import triton.language as tl

from tests.tools.aot import harness
from tests.tools.sass import costs, disassembler, kernel
from tests.tools.sass.rates import RATES


@triton.jit
def _plain_product_kernel(
    left_ptr, right_ptr, out_ptr, rows, columns, inner,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute one (BLOCK_M, BLOCK_N) tile of left (rows, inner) times right (inner, columns)."""
    nblocks = tl.cdiv(columns, BLOCK_N)
    offs_m = tl.program_id(0) // nblocks * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(0) % nblocks * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    mask_m, mask_n = offs_m[:, None] < rows, offs_n[None, :] < columns
    left_ptrs = left_ptr + offs_m[:, None] * inner + offs_k[None, :]
    right_ptrs = right_ptr + offs_k[:, None] * columns + offs_n[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for _ in range(0, inner, BLOCK_K):
        acc = tl.dot(tl.load(left_ptrs, mask=mask_m, other=0.0), tl.load(right_ptrs, mask=mask_n, other=0.0), acc)
        left_ptrs += BLOCK_K
        right_ptrs += BLOCK_K * columns
    at = out_ptr + offs_m[:, None] * columns + offs_n[None, :]
    tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=mask_m & mask_n)


def like(launch):
    """Return the launch of a plain product of the sizes, the tile, the warps and the stages of one of ista's."""
    sizes = {name: launch.arguments[name] for name in ("rows", "columns", "inner", "BLOCK_M", "BLOCK_N", "BLOCK_K")}
    m, n, k = (sizes[name] for name in ("rows", "columns", "inner"))
    names = {"left_ptr": (m, k), "right_ptr": (k, n), "out_ptr": (m, n)}
    tensors = {name: torch.empty(shape, dtype=torch.bfloat16, device="meta") for name, shape in names.items()}
    return harness.Launch(_plain_product_kernel, {**tensors, **sizes}, launch.options)


def clocks(launch, target):
    """Return the clocks of the largest pipe of one program: its loop once per BLOCK_K of the sum, the rest once."""
    compiled = harness.assemble(launch, target).compiled
    registers, stack = harness.nvidia_resources(compiled)
    build = kernel.Build(target, registers, compiled.metadata.shared, compiled.metadata.num_warps, stack)
    (function,) = [f for f in disassembler.functions(compiled.asm["cubin"]) if f.name == launch.function.__name__]
    whole = costs.add_up(function.instructions, build.warps, RATES[target])
    trips = -(-launch.arguments["inner"] // launch.arguments["BLOCK_K"])
    return costs.total(whole, [kernel.bounds(function, build).main.costs], trips - 1).bound
