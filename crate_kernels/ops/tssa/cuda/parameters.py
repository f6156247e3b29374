"""The parameters of the CUDA C++ kernels of token statistics, as csrc/tssa/cuda/call.cuh declares them."""

from __future__ import annotations

import math
from ctypes import c_float, c_int, c_int64, c_uint64

from torch import Tensor

from crate_kernels._core import operator
from crate_kernels._core.op_checks import contiguous
from crate_kernels._cuda.records import DTYPES, POINTER, Record
from crate_kernels.ops.tssa.call import TSSACall


class TssaTokens(Record):
    """A tensor of tokens, by its strides in elements."""

    cpp = "TssaTokens"
    _fields_ = (("data", POINTER), *((name, c_int64) for name in ("sequence", "head", "token", "channel")))


class TssaMask(TssaTokens):
    """A byte for each token; null: every token is kept."""

    cpp = "TssaMask"


class TssaProblem(Record):
    """The options and sizes of a call."""

    cpp = "TssaProblem"
    _fields_ = (
        ("dtype", c_int),
        ("nsequences", c_int),
        ("nheads", c_int),
        ("head_dim", c_int),
        ("width", c_int),
        ("seqlen", c_int),
        ("nchunks", c_int),
        ("chunk_size", c_int),
        ("lanes", c_int),
        ("sums_every", c_int),
        ("total", c_int64),
        ("cu_seqlens", POINTER),
        ("mask", TssaMask),
        ("seed", POINTER),
        ("keep_from", c_uint64),
        ("keep_factor", c_float),
        ("temp", POINTER),
        ("rows_sequence", c_int64),
        ("rows_head", c_int64),
    )


class _Pass(Record):
    _fields_ = (
        ("problem", TssaProblem),
        ("w", TssaTokens),
        ("membership", POINTER),
        ("energy", POINTER),
        ("moment", POINTER),
        ("bias", POINTER),
        ("bias_tokens", c_int64),
        ("sums_1", POINTER),
        ("sums_2", POINTER),
    )


class TssaForward(_Pass):
    """A forward; ``state_*`` and ``lengths`` are of a cache."""

    cpp = "TssaForward"
    _fields_ = (
        ("out", TssaTokens),
        ("state_energy", POINTER),
        ("state_moment", POINTER),
        ("state_mass", POINTER),
        ("lengths", POINTER),
    )


class TssaBackward(_Pass):
    """A backward."""

    cpp = "TssaBackward"
    _fields_ = (
        ("dout", TssaTokens),
        ("dw", TssaTokens),
        ("dmembership", POINTER),
        ("dtemp", POINTER),
        ("dlogit", POINTER),
        ("sums_3", POINTER),
    )


class TssaSums(Record):
    """A scan of the chunks' sums."""

    cpp = "TssaSums"
    _fields_ = (
        ("sums", POINTER),
        ("nchunks", c_int),
        ("size", c_int),
        ("scan", c_int),
        ("channels", POINTER),
        ("by_head", POINTER),
        ("heads", c_int),
    )


def problem(w: Tensor, call: TSSACall) -> TssaProblem:
    """Return the sizes and options of a call."""
    packed, nheads, head_dim = call.packed, w.shape[1], w.shape[-1]
    p = TssaProblem(
        dtype=DTYPES[w.dtype],
        nsequences=call.nsequences(w),
        nheads=nheads,
        head_dim=head_dim,
        width=nheads * head_dim,
        seqlen=call.max_seqlen if packed else w.shape[2],
        total=w.shape[0] if packed else 0,
        cu_seqlens=call.cu_seqlens,
        seed=call.seed,
    )
    p.rows_sequence, p.rows_head = (0, p.total) if packed else (nheads * p.seqlen, p.seqlen)
    if call.cu_seqlens is not None:
        contiguous("tssa", "cu_seqlens", call.cu_seqlens)
    if (mask := call.key_padding_mask) is not None:
        p.mask = TssaMask(data=mask, sequence=mask.stride(0), token=mask.stride(1))
    if call.seed is not None:
        p.keep_from = math.ceil(call.dropout_p * 2**32)
        p.keep_factor = 1.0 / (1.0 - call.dropout_p)
    return p


def tokens(t: Tensor, call: TSSACall) -> TssaTokens:
    """Return a tensor of tokens, packed or not."""
    strides = t.stride()
    if call.packed:
        token, head, channel = strides
        return TssaTokens(data=t, sequence=0, head=head, token=token, channel=channel)
    return TssaTokens(data=t, **dict(zip(("sequence", "head", "token", "channel"), strides, strict=True)))


def in_vectors(count: int, *tensors: Tensor | None) -> bool:
    """Return whether ``count`` neighbouring channels of every token can be read at once. Plans know 16 bytes alone.

    What torch.compile traces has no address, and is taken for aligned.
    """
    return all(
        t.stride(-1) == 1
        and t.shape[-1] % count == 0
        and (not operator.is_plain_tensor(t) or t.data_ptr() % 16 == 0)
        and all(size == 1 or stride % count == 0 for size, stride in zip(t.shape[:-1], t.stride()[:-1], strict=True))
        for t in tensors
        if t is not None
    )
