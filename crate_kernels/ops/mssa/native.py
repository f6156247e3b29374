"""Subspace self-attention by csrc/mssa: C++ for tensors on the CPU, CUDA C++ for those on a GPU.

The kernels take tokens in any strides and write into what is allocated here. On GPUs, tensor cores take 16-bit tokens
from sm_80 on, and fp32 products the rest. Nothing here waits for a GPU; lengths of a cache are read there, so that a
captured graph stays right as they grow.
"""

from __future__ import annotations

import torch
from torch import Tensor

from crate_kernels._core import backends, operator
from crate_kernels._cuda import launch
from crate_kernels._cuda.launch import is_gpu
from crate_kernels._native.extension import library
from crate_kernels.ops.mssa import op_checks
from crate_kernels.ops.mssa.call import DecodeCall, MSSACall, empty_lse, no_lse
from crate_kernels.ops.mssa.cuda import heads, hopper, long_pairs, long_rows, plain, problem, steps, tensor_cores
from crate_kernels.ops.mssa.splits import cdiv, choose_splits

_MAX_HEAD_DIM = 256  # the kernels hold tiles of a head on chip
_MAX_STEP_TOKENS = 16  # new tokens per step whose cost is reading the cache; with more it is the products
_MIN_STRETCH = 64  # cached tokens that are worth a block
_BLOCKS_PER_PROCESSOR = 4  # blocks per multiprocessor that keep enough reads under way


def forward(w: Tensor, call: MSSACall) -> tuple[Tensor, Tensor]:
    """Return ``out`` and ``lse``; shapes as in the public function."""
    out, lse = operator.empty_out(w), empty_lse(w)
    if is_gpu(w.device):
        op_checks.forward(w, call)
        if out.numel():
            serving = (one for one in (heads, long_rows) if one.serves_forward(w, out, call))
            taking = next((one for one in serving if hopper.chosen(one.FORWARD, w, call)), None)
            left = None if taking is None else taking.forward(w, call, out, lse)
            _attend(problem.of_forward(w, call, out, lse), w, call, left)
        return out, lse
    library().mssa_fwd(w, *call, out, lse)
    return out, lse


def _attend(fields: dict, w: Tensor, call: MSSACall, left: Tensor | None = None) -> None:
    """Launch a forward over the tokens themselves, or over a cache.

    ``left``, (heads,) int32: how many of each head's last tokens the kernels of sm_90a left to this one; None: all.
    """
    check_head_dim(w)
    if tensor_cores.take(w):
        tensor_cores.forward(fields, w, call, left)
    else:
        plain.forward(fields, w)


def check_head_dim(w: Tensor) -> None:
    """Refuse heads that the kernels do not take."""
    if not 1 <= w.shape[-1] <= _MAX_HEAD_DIM:
        raise backends.Refused(f"takes head_dim from 1 to {_MAX_HEAD_DIM}, got {w.shape[-1]}")


def backward(dout: Tensor | None, dlse: Tensor | None, w: Tensor, out: Tensor, lse: Tensor, call: MSSACall) -> Tensor:
    """Return the gradient of ``w``; ``dout`` or ``dlse`` is None where that output got no gradient."""
    dw, lse = operator.empty_out(w), lse.contiguous()
    dlse = None if dlse is None else dlse.contiguous()
    if not is_gpu(w.device):
        library().mssa_bwd(dout, dlse, w, out, lse, *call, dw)
        return dw
    op_checks.backward(dout, dlse, w, out, lse, call)
    if dw.numel():
        check_head_dim(w)
        scratch = lse.new_empty((2 if call.threshold is None else 3, *lse.shape))
        fields = problem.of_backward(dout, dlse, w, out, lse, call, dw, scratch)
        if tensor_cores.take(w) and not tensor_cores.round_gradients(w, call, bool(fields["scores"])):
            left = None
            serving = (one for one in (heads, long_pairs, long_rows) if one.serves_backward(w, dout, out, call))
            taking = next((one for one in serving if hopper.chosen(one.BACKWARD, w, call)), None)
            if dout is not None and taking is not None:
                left = taking.backward(dout, dlse, w, out, lse, call, dw)
            tensor_cores.backward(fields, w, call, left)
        else:
            plain.backward(fields, w)
    return dw


def decode(w: Tensor, data: Tensor, lengths: Tensor, call: DecodeCall) -> tuple[Tensor, Tensor]:
    """Append ``w`` to the cache and attend over it; ``bound`` only says how long sequences can be, for splitting."""
    out, lse = operator.empty_out(w), empty_lse(w) if call.need_lse else no_lse(w.device, w.dtype)
    if not is_gpu(w.device):
        library().mssa_decode(w, data, lengths, *call, out, lse)
        return out, lse
    op_checks.decode(w, data, lengths, call)
    if not out.numel():
        return out, lse
    check_head_dim(w)
    stretches = _empty_stretches(w, data, call)
    if stretches is not None:
        w = w.contiguous()
        w = w if _is_aligned(w) else w.clone()
    attention = MSSACall(key_padding_mask=call.key_padding_mask, scale=call.scale, causal=True)
    cache = {"keys": problem.rows_of(data, False), "cache_lengths": lengths, "capacity": data.shape[2]}
    fields = problem.of_forward(w, attention, out, lse, **cache)
    if stretches is not None:
        steps.step(fields, w, *stretches)
        return out, lse
    steps.append(fields, w)
    _attend(fields, w, attention)
    steps.advance(fields, w)
    return out, lse


def _is_aligned(x: Tensor) -> bool:
    """Return whether packs of 16 bytes can be read from the first element on. A view may start anywhere."""
    return x.data_ptr() % 16 == 0


def _empty_stretches(w: Tensor, data: Tensor, call: DecodeCall) -> tuple[Tensor, Tensor] | None:
    """Allocate the results of a step per stretch of the cache: weighted rows, and (maximum, sum) of the weights.

    None for a long block of tokens, or for a cache that cannot be read in packs of 16 bytes: a forward serves those.
    """
    batch, nheads, new, head_dim = w.shape
    in_packs = head_dim * w.element_size() % 16 == 0 and data.is_contiguous() and _is_aligned(data)
    if new > _MAX_STEP_TOKENS or not in_packs:
        return None
    blocks = batch * nheads * (1 if new == 1 else cdiv(new, steps.GROUP))
    processors = _BLOCKS_PER_PROCESSOR * launch.gpu(w.device).multiprocessors
    splits = choose_splits(blocks, processors, cdiv(call.bound, _MIN_STRETCH))
    rows = (batch * nheads, splits, new)
    return w.new_empty(*rows, head_dim, dtype=torch.float32), w.new_empty(*rows, 2, dtype=torch.float32)
