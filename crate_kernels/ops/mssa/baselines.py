"""Other implementations of subspace self-attention: PyTorch's attention, FlashAttention, decoding on other caches."""

from __future__ import annotations

import functools
import math
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from crate_kernels._core.spec import Case, Decoding, Function, Provider, SampledCheck, Stepper, TimedStep
from crate_kernels.ops.mssa.api import mssa
from crate_kernels.ops.mssa.cache import SubspaceCache

_HALF = (torch.bfloat16, torch.float16)
_ROWS = 1024  # rows of scores at a time: float64 scores of 16384 tokens would not fit


def _sdpa(case: Case, backend: SDPBackend | None = None) -> Function:
    causal = bool(case.options.get("causal"))

    def call(w: Tensor) -> Tensor:
        if backend is None:
            return F.scaled_dot_product_attention(w, w, w, is_causal=causal)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(w, w, w, is_causal=causal)

    return call


def _sdpa_unavailable_reason(case: Case, dtype: torch.dtype, device: torch.device, backend: SDPBackend) -> str | None:
    if device.type == "cpu":
        if backend in (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            return "PyTorch has it for GPUs only"
        return "on a CPU sdpa is the flash kernel, and its math form is eager's"
    if device.type == "cuda" and backend != SDPBackend.MATH:
        batch, _, seqlen, head_dim = case.shape
        w = torch.empty(min(batch, 1), 1, min(seqlen, 128), head_dim, dtype=dtype, device=device)
        try:
            with sdpa_kernel(backend):
                F.scaled_dot_product_attention(w, w, w)
        except RuntimeError:
            return f"PyTorch refuses it for head_dim {head_dim} in {dtype} on this GPU"
    return None


def _flex(case: Case) -> Function:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, dynamic=False)
    seqlen = case.shape[2]
    mask = None

    def call(w: Tensor) -> Tensor:
        nonlocal mask
        if case.options.get("causal") and mask is None:  # made once, as its users do
            mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, seqlen, seqlen, device=w.device.type)
        w = w if torch.is_grad_enabled() else w.detach()  # a CPU refuses a leaf that requires a gradient even so
        out = compiled(w, w, w, block_mask=mask)
        assert isinstance(out, Tensor)
        return out

    return call


def _flash_attn(case: Case) -> Function:
    from flash_attn import flash_attn_func  # pyright: ignore[reportMissingImports]

    causal = bool(case.options.get("causal"))

    def call(w: Tensor) -> Tensor:
        tokens = w.transpose(1, 2)
        return flash_attn_func(tokens, tokens, tokens, causal=causal).transpose(1, 2)

    return call


def _flash_attn_unavailable_reason(case: Case, dtype: torch.dtype, device: torch.device) -> str | None:
    if find_spec("flash_attn") is None:
        return "flash-attn is not installed"
    if device.type != "cuda" or dtype not in _HALF:
        return "flash-attn takes bf16 and fp16 tensors on GPUs"
    return None


PROVIDERS = (
    Provider("sdpa", _sdpa),
    *(
        Provider(
            name,
            functools.partial(_sdpa, backend=backend),
            functools.partial(_sdpa_unavailable_reason, backend=backend),
        )
        for name, backend in (
            ("sdpa-math", SDPBackend.MATH),
            ("sdpa-flash", SDPBackend.FLASH_ATTENTION),
            ("sdpa-efficient", SDPBackend.EFFICIENT_ATTENTION),
            ("sdpa-cudnn", SDPBackend.CUDNN_ATTENTION),
        )
    ),
    Provider("flex", _flex, inference_only=("cpu",)),
    Provider("flash-attn", _flash_attn, _flash_attn_unavailable_reason),
)


def _subspace_step(step: TimedStep, provider: str, past: Tensor, new: Tensor) -> Stepper:
    batch, nheads, cached, head_dim = step.shape
    scale = head_dim**-0.5
    buffer = past.new_zeros(batch, nheads, cached + 1, head_dim)
    buffer[:, :, :cached] = past
    if provider == "eager":  # what a user without a cache of fixed size writes

        def grow() -> Tensor:
            every = torch.cat([past, new], 2)
            return (new @ every.transpose(-1, -2) * scale).softmax(-1) @ every

        return grow, tuple
    if provider == "sdpa":  # two caches, as everywhere where key and value differ
        keys, values = buffer, buffer.clone()

        def attend() -> Tensor:
            keys[:, :, cached:] = new
            values[:, :, cached:] = new
            return F.scaled_dot_product_attention(new, keys, values)

        return attend, tuple
    if provider == "flash-attn":
        from flash_attn import flash_attn_with_kvcache  # pyright: ignore[reportMissingImports]

        keys, values = (buffer.transpose(1, 2).contiguous() for _ in range(2))
        token = new.transpose(1, 2).contiguous()
        lengths = torch.full((batch,), cached, dtype=torch.int32, device=new.device)

        def flash() -> Tensor:
            return flash_attn_with_kvcache(token, keys, values, token, token, cache_seqlens=lengths).transpose(1, 2)

        return flash, tuple
    cache = SubspaceCache(batch, nheads, cached + 1, head_dim, past.dtype, past.device)
    mssa(past, causal=True, cache=cache, backend="composite")
    return lambda: mssa(new, causal=True, cache=cache, backend=provider), lambda: cache.truncate(cached) or ()


DECODING = Decoding(
    (
        TimedStep("mssa", (1, 12, 64, 64), ("cpu",)),
        TimedStep("mssa", (1, 12, 1024, 64), ("cpu", "cuda"), brief=True),
        TimedStep("mssa", (8, 12, 1024, 64), ("cpu",)),
        TimedStep("mssa", (1, 12, 8192, 64), ("cpu",)),
        TimedStep("mssa", (64, 12, 4096, 64), ("cuda",)),
        TimedStep("mssa", (16, 16, 16384, 128), ("cuda",)),
        TimedStep("mssa", (1, 16, 65536, 128), ("cuda",)),
    ),
    _subspace_step,
    ("eager", "sdpa", "flash-attn"),
    lambda step, dtype: float(math.prod(step.shape) * dtype.itemsize),
)


def _attention_by_rows(w: Tensor, g: Tensor, case: Case) -> list[Tensor]:
    """Return ``[out, dw]`` of (heads, seqlen, head_dim) tokens by autograd, some rows of scores at a time."""
    leaf, causal = w.requires_grad_(), bool(case.options.get("causal"))
    seqlen = w.shape[-2]
    outs, dw = [], torch.zeros_like(w)
    for start in range(0, seqlen, _ROWS):
        rows = leaf[:, start : start + _ROWS]
        scores = rows @ leaf.transpose(-1, -2) * w.shape[-1] ** -0.5
        if causal:
            place = torch.arange(seqlen, device=w.device)
            scores = scores.masked_fill(place[start : start + _ROWS, None] < place, float("-inf"))
        out = scores.softmax(-1) @ leaf
        (grad,) = torch.autograd.grad(out, leaf, g[:, start : start + _ROWS])
        outs.append(out.detach())
        dw += grad
    return [torch.cat(outs, 1), dw]


# Heads are independent of each other: the first and the last are compared.
SAMPLING = SampledCheck(lambda tensor: torch.stack([tensor[0, 0], tensor[-1, -1]]), _attention_by_rows)
