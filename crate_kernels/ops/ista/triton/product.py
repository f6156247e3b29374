"""One product of tokens with a matrix, and everything that a sparse-coding step does to its result.

``product`` computes ``act(base + gate * gated + scale * left @ right)``, in one of two ways:

======= ======== ======================================================================================
way     launches passes over tensors of the tokens' size
======= ======== ======================================================================================
fused   1        reads ``left``, ``base``, ``gated`` and ``gate``, once each; writes the result
library 2        the same, and the product is written and read once more; a ``base`` that is ``left`` is
                 read twice
stream  1        as fused, without a gate: persistent programs, whose tiles the memory accelerator moves
linear  1        as fused, without a threshold: cuBLASLt, which reads a base where it is (``lt.py``), and a
                 gate as bits, a sixteenth of it, which a second launch writes (``bits.py``)
======= ======== ======================================================================================

The fused way is a Triton kernel with all of this in its epilogue. The library multiplies faster, but needs more passes
over the tokens. For sums of up to about 2500 terms these are expected to cost more than it gains (``tables.py``).
float32 products are the library's: without tensor cores they take ten times as long as the passes, and PyTorch's
setting for TF32 holds. No table takes the stream or cuBLASLt: no GPU has timed them.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportPossiblyUnboundVariable=false
# Triton's compiler reads these functions; their types are not Python's.

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from crate_kernels._triton import launch
from crate_kernels.ops.ista import lt
from crate_kernels.ops.ista.steps import scaled
from crate_kernels.ops.ista.triton import bits, stream
from crate_kernels.ops.ista.triton.tables import GATED, LINEAR, PRODUCT

_ELEMENTS = 2048  # per program of the elementwise kernel
_WIDTH = 8  # elements that the elementwise kernel knows to be inside or outside together, where it can
_NONE, _RELU, _SOFT = 0, 1, 2


@triton.jit
def _finish(
    acc,
    base_ptr,
    gated_ptr,
    gate_ptr,
    places,
    mask,
    threshold,
    GATE_ALL: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Add ``base``, and ``gated`` where ``gate`` is not zero, and take the threshold; each but ``acc`` may be None."""
    if base_ptr is not None:
        acc += tl.load(base_ptr + places, mask=mask, other=0.0).to(tl.float32)
    if gate_ptr is not None:
        closed = tl.load(gate_ptr + places, mask=mask, other=0.0) == 0
    if gated_ptr is not None:
        acc += tl.where(closed, 0.0, tl.load(gated_ptr + places, mask=mask, other=0.0).to(tl.float32))
    acc = stream.activate(acc, threshold, ACTIVATION)
    if GATE_ALL:
        acc = tl.where(closed, 0.0, acc)
    return acc


@triton.jit(do_not_specialize=("rows",))
def _ista_product_kernel(
    left_ptr,
    right_ptr,
    base_ptr,
    gated_ptr,
    gate_ptr,
    out_ptr,
    stride_rk,
    stride_rn,
    rows,
    columns,
    inner,
    scale,
    threshold,
    GATE_ALL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute one (BLOCK_M, BLOCK_N) tile of a product; programs that share rows of ``left`` are neighbours."""
    nblocks = tl.cdiv(columns, BLOCK_N)
    pid = tl.program_id(0)
    offs_m = (pid // nblocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = (pid % nblocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    mask_m, mask_n = offs_m[:, None] < rows, offs_n[None, :] < columns  # (BLOCK_M, 1), (1, BLOCK_N)
    left_ptrs = left_ptr + offs_m[:, None] * inner + offs_k[None, :]  # (BLOCK_M, BLOCK_K)
    right_ptrs = right_ptr + offs_k.to(tl.int64)[:, None] * stride_rk + offs_n.to(tl.int64)[None, :] * stride_rn
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, inner, BLOCK_K):
        if EVEN_K:
            left = tl.load(left_ptrs, mask=mask_m, other=0.0)  # (BLOCK_M, BLOCK_K)
            right = tl.load(right_ptrs, mask=mask_n, other=0.0)  # (BLOCK_K, BLOCK_N)
        else:
            left = tl.load(left_ptrs, mask=mask_m & (offs_k[None, :] < inner - k), other=0.0)  # (BLOCK_M, BLOCK_K)
            right = tl.load(right_ptrs, mask=mask_n & (offs_k[:, None] < inner - k), other=0.0)  # (BLOCK_K, BLOCK_N)
        acc = tl.dot(left.to(right.dtype), right, acc)  # (BLOCK_M, BLOCK_N)
        left_ptrs += BLOCK_K
        right_ptrs += BLOCK_K * tl.cast(stride_rk, tl.int64)
    places = offs_m[:, None] * columns + offs_n[None, :]  # (BLOCK_M, BLOCK_N)
    acc = _finish(acc * scale, base_ptr, gated_ptr, gate_ptr, places, mask_m & mask_n, threshold, GATE_ALL, ACTIVATION)
    tl.store(out_ptr + places, acc, mask=mask_m & mask_n)


@triton.jit(do_not_specialize=("groups",))
def _ista_update_kernel(
    product_ptr,
    base_ptr,
    gated_ptr,
    gate_ptr,
    out_ptr,
    groups,
    scale,
    threshold,
    GATE_ALL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Run the epilogue of ``_ista_product_kernel`` on a product in memory; all tensors are contiguous.

    They have ``groups`` of WIDTH elements, which the compiler knows to be inside or outside together: with 8, a thread
    moves 16 bytes at once.
    """
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    mask = places < groups.to(tl.int64) * WIDTH
    if product_ptr is None:
        acc = tl.zeros((BLOCK,), tl.float32)
    else:
        acc = tl.load(product_ptr + places, mask=mask, other=0.0).to(tl.float32) * scale
    acc = _finish(acc, base_ptr, gated_ptr, gate_ptr, places, mask, threshold, GATE_ALL, ACTIVATION)
    tl.store(out_ptr + places, acc, mask=mask)


class Epilogue(NamedTuple):
    """The work after a product; tensors are (rows, columns) and contiguous."""

    scale: float = 1.0  # factor of the product
    base: Tensor | None = None  # added
    gated: Tensor | None = None  # added where ``gate`` is not zero
    gate: Tensor | None = None  # without ``gated`` it clears the whole result where it is zero
    threshold: float | None = None  # of the activation; None for none
    nonnegative: bool = True  # activation by ReLU, else by the two-sided soft threshold

    @property
    def only_scales(self) -> bool:
        """True: it adds nothing and clears nothing."""
        return self.base is None and self.gate is None and self.threshold is None

    @property
    def is_linear(self) -> bool:
        """True: it may add ``base``, and may clear the whole, and does nothing else."""
        return self.gated is None and self.threshold is None

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of a kernel."""
        return {
            "base_ptr": self.base,
            "gated_ptr": self.gated,
            "gate_ptr": self.gate,
            "scale": self.scale,
            "threshold": self.threshold or 0.0,
            "GATE_ALL": self.gate is not None and self.gated is None,
            "ACTIVATION": _NONE if self.threshold is None else _RELU if self.nonnegative else _SOFT,
        }


def product(
    left: Tensor,
    right: Tensor,
    epilogue: Epilogue,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
    fused: bool = False,
) -> Tensor:
    """Return ``act(base + gated + scale * left @ right)``, accumulated in float32.

    Args:
        left: (rows, inner), contiguous; rounded to right's dtype for the product.
        right: (inner, columns), any strides; its dtype is that of the product.
        epilogue: base, gated, scale and act.
        out: where the result is put, contiguous; allocated by default.
        dtype: of the result where ``out`` is None, right's by default.
        fused: whether it is the fused way however long the sums are, where the library would round in between.
    """
    rows, columns, inner = left.shape[0], right.shape[1], left.shape[1]
    if out is None:
        out = left.new_empty(rows, columns, dtype=dtype or right.dtype)
    if out.numel() == 0:
        return out
    if epilogue.is_linear and not fused and _by_lt(left, right, epilogue, out):
        with launch.guard(left.device):
            gate = None if epilogue.gate is None else bits.packed(epilogue.gate)
            lt.product(left, right, epilogue.base, epilogue.scale, out, gate)
        return out
    # Widths that 16-byte loads do not divide need more pointers, which fill the registers where tiles are large or
    # threads few.
    even = inner % 16 == 0 and columns % 16 == 0
    terms = 0 if fused else inner
    config = dict(PRODUCT.config(left.device, terms, rows if even else min(rows, 1024), False, left.dtype))
    if not even:
        config["num_warps"] = 8
    with launch.guard(left.device):
        streamed = config.pop("PERSISTENT", 0)
        if (config.pop("LIBRARY") and not fused) or right.dtype == torch.float32:
            plain = scaled(left.to(right.dtype), right, epilogue.scale, out if out.dtype == right.dtype else None)
            if plain is not out or not epilogue.only_scales:
                _update(plain, out, epilogue._replace(scale=1.0))
            return out
        if streamed and epilogue.gate is None and stream.serves(left, right, epilogue.base, out):
            stream.product(left, right, out, epilogue.arguments(), config)
            return out
        programs = triton.cdiv(rows, config["BLOCK_M"]) * triton.cdiv(columns, config["BLOCK_N"])
        launch.run(
            _ista_product_kernel,
            programs,
            left_ptr=left,
            right_ptr=right,
            out_ptr=out,
            stride_rk=right.stride(0),
            stride_rn=right.stride(1),
            rows=rows,
            columns=columns,
            inner=inner,
            EVEN_K=inner % config["BLOCK_K"] == 0,
            **epilogue.arguments(),
            **config,
        )
    return out


def _by_lt(left: Tensor, right: Tensor, epilogue: Epilogue, out: Tensor) -> bool:
    """Return whether a product without a threshold is cuBLASLt's, by its table and where it serves."""
    is_gated = epilogue.gate is not None
    use_lt = (GATED if is_gated else LINEAR).config(left.device, left.shape[1], left.shape[0], False, right.dtype)["LT"]
    return bool(use_lt) and lt.serves(left, right, epilogue.base, out, is_gated)


def gated(t: Tensor, gate: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``t`` where ``gate`` is not zero, rounded to ``dtype``; all contiguous."""
    out = torch.empty_like(t, dtype=dtype)
    with launch.guard(t.device):
        _update(None, out, Epilogue(gated=t, gate=gate))
    return out


def _update(plain: Tensor | None, out: Tensor, epilogue: Epilogue) -> None:
    elements = out.numel()
    width = _WIDTH if elements % _WIDTH == 0 else 1
    launch.run(
        _ista_update_kernel,
        triton.cdiv(elements, _ELEMENTS),
        product_ptr=plain,
        out_ptr=out,
        groups=elements // width,
        WIDTH=width,
        BLOCK=_ELEMENTS,
        num_warps=4,
        **epilogue.arguments(),
    )
