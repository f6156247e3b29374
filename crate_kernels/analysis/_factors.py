"""QR factors of tokens stacked on the identity, which no coding rate needs a Gram matrix beside."""

from __future__ import annotations

import torch
from torch import Tensor

from crate_kernels._core.packing import unmapped


def factors(op: str, name: str, w: Tensor, root: float | Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the first rows of Q, which belong to w (..., seqlen, dim) or its transpose, its last rows, and R.

    ``root`` is the square root of a, or one for each matrix, (..., 1, 1).
    """
    tall = w if w.shape[-2] >= w.shape[-1] else w.mT
    if not torch.compiler.is_compiling() and not bool(unmapped(tall).isfinite().all()):
        raise torch.linalg.LinAlgError(f"{op}: {name} must be finite")  # pyright: ignore[reportPrivateImportUsage]
    identity = torch.eye(tall.shape[-1], dtype=w.dtype, device=w.device).expand(*tall.shape[:-2], -1, -1)
    q, r = torch.linalg.qr(torch.cat([root * tall, identity], -2))
    return q[..., : tall.shape[-2], :], q[..., tall.shape[-2] :, :], r
