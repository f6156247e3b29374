"""A bit of each number, which says whether it is not zero: the gate of a product, in a sixteenth of its bytes."""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# Triton's compiler reads these functions; their types are not Python's.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from crate_kernels._triton import launch

_WORDS = 128  # that a program writes


@triton.jit(do_not_specialize=("words",))
def _ista_bits_kernel(gate_ptr, bits_ptr, words, BLOCK: tl.constexpr):
    """Write ``words`` of 4 bytes; a byte has the bits of 8 numbers, that of the first number lowest.

    The compiler knows a word's numbers to be inside or outside together: a thread reads 16 bytes and writes 4 at once.
    """
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    within, order, mask = tl.arange(0, 4), tl.arange(0, 8), places < words
    places = places[:, None] * 4 + within[None, :]  # (BLOCK, 4), of bytes
    numbers = places[:, :, None] * 8 + order[None, None, :]  # (BLOCK, 4, 8)
    gate = tl.load(gate_ptr + numbers, mask=mask[:, None, None], other=0.0)  # (BLOCK, 4, 8)
    bits = tl.sum(tl.where(gate == 0, 0, 1) << order[None, None, :], 2)  # (BLOCK, 4)
    tl.store(bits_ptr + places, bits.to(tl.uint8), mask=mask[:, None])


def packed(gate: Tensor) -> Tensor:
    """Return the bits of contiguous numbers, which are whole words; a NaN is none of the zeros."""
    words = gate.numel() // 32
    bits = torch.empty(4 * words, dtype=torch.uint8, device=gate.device)
    launch.run(
        _ista_bits_kernel,
        triton.cdiv(words, _WORDS),
        gate_ptr=gate,
        bits_ptr=bits,
        words=words,
        BLOCK=_WORDS,
        num_warps=4,
    )
    return bits
