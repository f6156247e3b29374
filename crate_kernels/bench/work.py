"""The least that a call must do: products and bytes, whatever form computes it."""

from __future__ import annotations

import math

import torch

from crate_kernels.testing import Case

DIRECTIONS = ("forward", "backward", "both")


def flops(case: Case, direction: str) -> float | None:
    """Return the customary count of floating-point operations; None where memory is what counts.

    Attention counts 4 N^2 D a head forward and 2.5 times that backward, half of it when causal, as FlashAttention
    does: forms that need fewer products are faster at the same count. ISTA counts the products of its least form, one
    forward and two backward, so the published form's nine cannot look busy.
    """
    if case.op == "tssa":
        return None
    if case.op == "mssa":
        batch, nheads, seqlen, head_dim = case.shape
        forward = 4.0 * batch * nheads * seqlen**2 * head_dim * (0.5 if case.options.get("causal") else 1.0)
        return _of(direction, forward, 2.5 * forward)
    batch, seqlen, dim = case.shape[:3]
    if case.op == "ista":
        product = 2.0 * batch * seqlen * dim**2
        return _of(direction, product, 2 * product)
    product = 2.0 * batch * seqlen * dim * case.shape[3]
    return _of(direction, 4 * product, 8 * product)


def least_bytes(case: Case, direction: str, dtype: torch.dtype) -> float:
    """Return the bytes of inputs read once and outputs written once.

    Forward: tokens in, tokens out. Backward: tokens and their upstream gradient in, the gradient out; attention also
    reads its output. Weights once a direction, their gradients once.
    """
    shape = case.shape
    if case.op in ("mssa", "tssa"):
        tensor = math.prod(shape)
        return dtype.itemsize * _of(direction, 2.0 * tensor, (4.0 if case.op == "mssa" else 3.0) * tensor)
    tensor = math.prod(shape[:3])
    weights = shape[2] ** 2 if case.op == "ista" else 2 * shape[2] * shape[3]
    return dtype.itemsize * _of(direction, 2.0 * tensor + weights, 4.0 * tensor + 2 * weights)


def _of(direction: str, forward: float, backward: float) -> float:
    return {"forward": forward, "backward": backward, "both": forward + backward}[direction]
