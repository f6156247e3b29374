"""Subspace self-attention from PyTorch's own attention: SDPA on (w, w, w), without a copy.

Differentiated by PyTorch, so it does not pass through the op. The logsumexp, which SDPA does not
return, is a separate function of w, computed only when it is asked for.
"""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from crate_kernels._core import autograd, imports, operator, packing
from crate_kernels.ops.mssa import op_checks
from crate_kernels.ops.mssa.call import DecodeCall, MSSACall
from crate_kernels.ops.mssa.logsumexp import logsumexp


def _count_on_cpus(counter: ModuleType) -> None:
    """Give PyTorch's flop counter what it lacks, a formula for its own attention on CPUs: that of its other kernels."""
    name = "_scaled_dot_product_flash_attention_for_cpu"
    for suffix, products, tensors in (("", 2, 0), ("_backward", 5, 1)):
        packet = getattr(torch.ops.aten, name + suffix, None)
        if packet is None or packet in counter.flop_registry:
            continue

        def count(*shapes: Any, products: int = products, query: int = tensors, **_: Any) -> int:
            batch, nheads, rows, head_dim = shapes[query]
            return products * 2 * batch * nheads * rows * shapes[query + 1][2] * head_dim

        counter.register_flop_formula(packet)(count)


imports.when_imported("torch.utils.flop_counter", _count_on_cpus)


class _FirstOrderOnly(torch.autograd.Function):
    """Identity whose gradient refuses to be differentiated again, and says what to do."""

    generate_vmap_rule = True

    @staticmethod
    def forward(w: Tensor) -> Tensor:
        return w.view_as(w)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, dw: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return autograd.once_differentiable("mssa", dw, dw, *ctx.saved_tensors)


def _attend(
    query: Tensor, keys: Tensor, mask: Tensor | None, causal: bool, scale: float | None, dropout_p: float
) -> Tensor:
    """Call PyTorch's attention with the keys as values.

    Some of its paths mask with -inf before they scale, others take row maxima of unscaled scores: only a positive scale
    is safe, so the query takes the sign.
    """
    if scale is not None and scale <= 0.0:
        query, scale = (-query, -scale) if scale else (torch.zeros_like(query), 1.0)
    with sdpa_kernel(SDPBackend.MATH) if operator.is_mapped() else nullcontext():  # the others have no rule for vmap
        return F.scaled_dot_product_attention(
            query, keys, keys, attn_mask=mask, dropout_p=dropout_p, is_causal=causal, scale=scale
        )


def _linear(w: Tensor, key_padding_mask: Tensor | None, scale: float) -> Tensor:
    """Return scale * (w w^T) w (w^T w), which is linear in seqlen."""
    # Sums over tokens overflow fp16 where neither scores nor outputs do.
    x = w.float() if w.dtype == torch.float16 else w
    keys = x if key_padding_mask is None else x * key_padding_mask[:, None, :, None]
    return (scale * (x @ (keys.transpose(-1, -2) @ x))).to(w.dtype)


def _dense(w: Tensor, call: MSSACall, plain: str | None) -> Tensor:
    """Attend within each batch element of (batch, nheads, seqlen, head_dim)."""
    dropout_p = call.dropout_p
    softmax = plain is None and call.threshold is None
    # PyTorch's attention has the causal mask itself.
    causal = softmax and call.causal and not call._replace(causal=False).masked
    allowed = None if causal else call.allowed(w.shape[2], w.device)
    has_key = None
    if allowed is not None and call.may_be_empty:
        # A row without a key attends to everything and its output is cleared afterwards: that keeps NaN out of both
        # directions on every path of PyTorch's attention.
        has_key = allowed.any(-1, keepdim=True)
        allowed = allowed | ~has_key
    if softmax:
        out = _attend(w, w, allowed, causal, call.scale, dropout_p)
    elif plain == "identity" and not call._replace(key_padding_mask=None).masked and not dropout_p:
        with operator.without_autocast(w):  # which would cast fp32 back to 16 bits
            return operator.merged_layout(_linear(w, call.key_padding_mask, call.filled(w).scale))
    else:
        scores = call.filled(w).scale * (w @ w.transpose(-1, -2))
        if call.threshold is not None:
            scores = scores if allowed is None else scores.masked_fill(~allowed, -torch.inf)
            weights = (scores.softmax(-1) > call.threshold).to(w.dtype) * call.threshold
        else:
            weights = scores.relu() if plain == "relu" else scores
            weights = weights if allowed is None else weights.masked_fill(~allowed, 0.0)
        out = F.dropout(weights, dropout_p) @ w
    out = out if has_key is None else torch.where(has_key, out, 0.0)
    return operator.merged_layout(out)


def mssa(w: Tensor, call: MSSACall, plain: str | None, return_lse: bool) -> tuple[Tensor, Tensor | None]:
    """Return ``out`` and, if asked for, ``lse``; differentiable by PyTorch.

    ``plain`` is "relu" or "identity" where they take the place of the softmax.
    """
    if autograd.needs_grad(w) and not operator.is_recorded():
        w = _FirstOrderOnly.apply(w)  # pyright: ignore[reportAssignmentType]

    def dense(w: Tensor, call: MSSACall) -> tuple[Tensor, Tensor | None]:
        return _dense(w, call, plain), logsumexp(w, call) if return_lse else None

    if call.cu_seqlens is None:
        return dense(w, call)
    readable = call.cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling()
    bounds = packing.bounds(call.cu_seqlens) if readable else None
    if bounds is not None:
        # Offsets on the CPU are free to read: each sequence costs no more than its own length.
        one = call.batched(None)
        lengths = [stop - start for start, stop in itertools.pairwise(bounds)]
        covered = w[bounds[0] : bounds[-1]]
        parts = [dense(sequence.transpose(0, 1)[None], one) for sequence in covered.split(lengths)]
        out = packing.join([out[0].transpose(0, 1) for out, _ in parts], bounds, len(w), 0)
        lses = [lse[0] for _, lse in parts if lse is not None]
        return out, packing.join(lses, bounds, len(w), 1) if return_lse else None
    padded, layout = packing.pad(w, call.cu_seqlens, call.max_seqlen)
    out, lse = dense(padded, call.batched(layout.mask))
    return layout.pack(out), None if lse is None else layout.pack_rows(lse)


def decode(w: Tensor, data: Tensor, lengths: Tensor, call: DecodeCall) -> tuple[Tensor, Tensor]:
    """Append ``w`` to the cache and attend over it; ``uniform``: every length is ``bound``."""
    op_checks.decode(w, data, lengths, call)
    key_padding_mask, bound, uniform, scale, need_lse = call
    new = w.shape[2]
    end = min(bound + new, data.shape[2])
    keys = data[:, :, :end]
    allowed = safe = has_key = None
    if uniform and key_padding_mask is None:
        data[:, :, bound:end] = w
        lengths += new
        if new > 1:
            allowed = safe = torch.ones(new, end, dtype=torch.bool, device=w.device).tril(bound)[None, None]
    else:
        visible = _append_ragged(w, data, lengths, key_padding_mask)
        _clear_beyond(keys, lengths)
        allowed = (torch.arange(end, device=w.device) < visible[:, :, None])[:, None]
        has_key = allowed.any(-1, keepdim=True)
        safe = allowed | ~has_key
    if uniform and bound == 0 and key_padding_mask is None:
        out = _attend(w, w, None, True, scale, 0.0)
    else:
        out = _attend(w, keys, safe, False, scale, 0.0)
    # An op's output may not alias its input, and has the layout of the op's fake.
    out = operator.merged_layout(out if has_key is None else torch.where(has_key, out, 0.0))
    if not need_lse:
        return out, w.new_empty(0, dtype=operator.stat_dtype(w.dtype))
    scores = scale * (w.to(operator.stat_dtype(w.dtype)) @ keys.to(operator.stat_dtype(w.dtype)).mT)
    return out, (scores if allowed is None else scores.masked_fill(~allowed, -torch.inf)).logsumexp(-1)


def _clear_beyond(keys: Tensor, lengths: Tensor) -> None:
    """Zero the places after each sequence's last token: their weights are 0, but 0 times NaN is NaN.

    Dropped tokens stay in the cache until they are overwritten. Kernels stop at a sequence's length; only the products
    here read beyond it. Lengths on the CPU are free to read, so rows are cleared one by one: with 8 sequences of 512 to
    1024 tokens that adds 1.0 ms to a step of 3.2 ms, a masked fill 6.8 ms, a masked copy 22 ms.
    """
    if lengths.device.type != "cpu":
        return _clear_unread(keys, lengths)
    for row, length in zip(keys, lengths.tolist(), strict=True):
        row[:, length:].zero_()


def _clear_unread(keys: Tensor, lengths: Tensor) -> None:
    """Do the same without a read of the lengths."""
    beyond = torch.arange(keys.shape[2], device=keys.device) >= lengths[:, None]
    keys.masked_fill_(beyond[:, None, :, None], 0.0)


def _append_ragged(w: Tensor, data: Tensor, lengths: Tensor, key_padding_mask: Tensor | None) -> Tensor:
    """Write each sequence's kept tokens after its own length; return the number of keys that each token sees.

    Without lengths on the host a dropped write cannot be skipped. It repeats one that happens anyway: that of the
    first kept token, or of the slot's own content where no token is kept.
    """
    batch, _, new, _ = w.shape
    capacity = data.shape[2]
    keep = key_padding_mask
    if keep is None:
        keep = torch.ones(batch, new, dtype=torch.bool, device=w.device)
    visible = lengths[:, None] + keep.cumsum(1)  # (batch, seqlen)
    position = visible - 1
    written = keep & (position < capacity)
    rows = torch.arange(batch, device=w.device)
    slot = lengths.clamp(max=capacity - 1).long()
    first = written.int().argmax(1)
    anchor = torch.where(written.any(1)[:, None, None], w[rows, :, first], data[rows, :, slot])
    values = torch.where(written[:, :, None, None], w.transpose(1, 2), anchor[:, None])
    data[rows[:, None], :, torch.where(written, position, slot[:, None])] = values
    lengths.copy_(visible[:, -1].clamp(max=capacity))
    return visible
