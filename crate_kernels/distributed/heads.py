"""Subspace attention in which every rank takes some heads of the whole sequence: one exchange there, one back.

Between the exchanges runs the operator of one process, so that every option and backend of it serves.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from crate_kernels._core import backends, operator
from crate_kernels.distributed import rows
from crate_kernels.distributed.collectives import Ranks
from crate_kernels.distributed.layout import SequenceLayout
from crate_kernels.ops.mssa import mssa, op, rectangular, reference
from crate_kernels.ops.mssa.call import MSSACall

_MAX_HEAD_DIM = 256  # of the kernels


class HeadsCall(NamedTuple):
    """Options of a call.

    Attributes:
        ranks: the processes.
        where: the tokens of each.
        key_padding_mask: (batch, seqlen) bool of the whole sequence, True = keep; None keeps all keys.
        attention: keyword arguments of ``crate_kernels.mssa``: causal, scale, phi, threshold, return_lse, backend.
        dropout_p: probability with which an attention weight is dropped.
        seed: int64 scalar that dropout draws from, the same in all ranks; None without dropout.
    """

    ranks: Ranks
    where: SequenceLayout
    key_padding_mask: Tensor | None
    attention: dict[str, Any]
    dropout_p: float
    seed: Tensor | None


class _ToHeads(torch.autograd.Function):
    """Tokens of this rank, all heads -> all tokens, heads of this rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, where: SequenceLayout) -> Tensor:
        ctx.rest = ranks, where
        batch, nheads, own, width = x.shape
        sent = x.unflatten(1, (ranks.size, -1)).permute(1, 3, 0, 2, 4)  # (ranks, own, batch, heads here, width)
        sent = sent.reshape(ranks.size * own, batch, nheads // ranks.size, width)
        got = ranks.exchange(sent, [own] * ranks.size, where.lengths)
        if where.balanced:
            got = where.join(got.split(list(where.lengths)), 0)
        return got.permute(1, 2, 0, 3)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _ToTokens.apply(dout, *ctx.rest), None, None


class _ToTokens(torch.autograd.Function):
    """All tokens, heads of this rank -> tokens of this rank, all heads."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, where: SequenceLayout) -> Tensor:
        ctx.rest = ranks, where
        sent = x.permute(2, 0, 1, 3)
        if where.balanced:
            sent = torch.cat([where.cut(sent, rank, 0) for rank in range(ranks.size)])
        own = where.lengths[ranks.rank]
        got = ranks.exchange(sent, where.lengths, [own] * ranks.size)
        heads = got.unflatten(0, (ranks.size, own)).permute(2, 0, 3, 1, 4)  # (batch, ranks, heads here, own, width)
        return operator.merged_layout(heads.flatten(1, 2))

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _ToHeads.apply(dout, *ctx.rest), None, None


def attend(w: Tensor, call: HeadsCall) -> tuple[Tensor, Tensor | None]:
    """Return out of this rank's tokens, and lse where ``return_lse`` asks for it."""
    whole: Any = _ToHeads.apply(w, call.ranks, call.where)
    if call.seed is not None:
        out, lse = _drop(whole, call)
    else:
        result = mssa(whole, key_padding_mask=call.key_padding_mask, **call.attention)
        out, lse = result if isinstance(result, tuple) else (result, None)
    own: Any = _ToTokens.apply(out, call.ranks, call.where)
    if not call.attention["return_lse"]:
        return own, None
    assert lse is not None
    own_lse: Any = _ToTokens.apply(lse.unsqueeze(-1), call.ranks, call.where)
    return own, own_lse.squeeze(-1)


def _drop(w: Tensor, call: HeadsCall) -> tuple[Tensor, Tensor | None]:
    """Attend with the dropout masks that one process would draw for these heads."""
    options = call.attention
    requested, phi = options["backend"], options["phi"]
    name = backends.resolve("mssa", requested, w.device, w.dtype)
    if requested is None and (call.key_padding_mask is not None or not 1 <= w.shape[-1] <= _MAX_HEAD_DIM):
        name = "composite"
    lacking = None
    if name == "composite" and phi != "softmax":
        lacking = f"phi must be 'softmax', got {phi!r}"
    elif name != "composite" and call.key_padding_mask is not None:
        lacking = "key_padding_mask must be None, or backend 'composite'"
    elif phi in ("relu", "identity") and name != "reference":
        lacking = f"phi must be 'softmax' or 'threshold', or backend 'reference', got {phi!r}"
    if lacking:
        raise NotImplementedError(f"mssa: {lacking} with dropout_p over several processes on backend={name!r}")
    return _drop_by_places(w, call) if name == "composite" else _drop_packed(w, call, name)


def _drop_by_places(w: Tensor, call: HeadsCall) -> tuple[Tensor, Tensor]:
    """Attend by the rectangular operator, which takes the number of the first head that is here."""
    alone = Ranks(call.ranks.group, 0, 1)
    here = w.shape[1]
    attention = rectangular.RectangularCall(
        scale=call.attention["scale"],
        causal=call.attention["causal"],
        dropout_p=call.dropout_p,
        seed=call.seed,
        first_head=call.ranks.rank * here,
        nheads=call.ranks.size * here,
    )
    masks = None if call.key_padding_mask is None else [call.key_padding_mask]
    whole = SequenceLayout((w.shape[2],), False)
    result: Any = rows.RowsFunction.apply(w, rows.RowsCall(alone, whole, True, masks, attention, "composite"))
    return result


def _drop_packed(w: Tensor, call: HeadsCall, name: str) -> tuple[Tensor, Tensor | None]:
    """Attend by a kernel, to packed sequences.

    Dropout counts heads as sequence * nheads + head. Where sequence b * ranks + rank is the b-th one and all others are
    empty, that is the count of one process.
    """
    batch, seqlen = w.shape[0], w.shape[2]
    rank, size = call.ranks.rank, call.ranks.size
    ended = (torch.arange(batch * size + 1, device=w.device) - rank + size - 1) // size  # sequences that have tokens
    options = MSSACall(
        cu_seqlens=(ended.clamp(0, batch) * seqlen).int(),
        max_seqlen=seqlen,
        seed=call.seed,
        causal=call.attention["causal"],
        scale=call.attention["scale"],
        dropout_p=call.dropout_p,
        threshold=call.attention["threshold"],
    )
    packed = w.transpose(1, 2).flatten(0, 1)
    if name == "reference":
        plain = call.attention["phi"] if call.attention["phi"] in ("relu", "identity") else None
        out, lse = reference.forward(packed, options, plain)
    else:
        out, lse = op.mssa(packed, options, backends.to_op_arg(name, call.attention["backend"]))
    out = out.unflatten(0, (batch, seqlen)).transpose(1, 2)
    return out, lse.unflatten(1, (batch, seqlen)).transpose(0, 1) if call.attention["return_lse"] else None
