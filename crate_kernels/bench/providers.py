"""Who computes a case: the published form, PyTorch's own attention, other libraries, and our backends."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import crate_kernels
from crate_kernels._core import backends
from crate_kernels.bench import published
from crate_kernels.testing import Case

Function = Callable[..., Tensor]
OURS = ("composite", "cpp", "triton")
_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Provider:
    """One way to compute a case.

    Attributes:
        name: as it is printed.
        ops: the operators it has.
        make: returns the function of the differentiable arguments, in the public function's order.
        why_not: says why it cannot run a case; None if it can.
        inference_only: device types on which it has no backward pass.
    """

    name: str
    ops: tuple[str, ...]
    make: Callable[[Case], Function]
    why_not: Callable[[Case, torch.dtype, torch.device], str | None]
    inference_only: tuple[str, ...] = ()

    @property
    def ours(self) -> bool:
        """Whether it is one of this library's backends."""
        return self.name in OURS


def _always(*_: Any) -> None:
    return None


def eager(case: Case) -> Function:
    """Return the published form of a case."""
    causal = bool(case.options.get("causal"))
    if case.op == "mssa":
        return functools.partial(published.mssa, causal=causal)
    if case.op == "tssa":
        return published.tssa_causal if causal else published.tssa
    return getattr(published, case.op)


def _compiled(case: Case) -> Function:
    torch._dynamo.reset()  # or the fifth shape of one function would be compiled for any
    return torch.compile(eager(case), dynamic=False)


def _sdpa(case: Case, backend: SDPBackend | None = None) -> Function:
    causal = bool(case.options.get("causal"))

    def call(w: Tensor) -> Tensor:
        if backend is None:
            return F.scaled_dot_product_attention(w, w, w, is_causal=causal)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(w, w, w, is_causal=causal)

    return call


def _sdpa_why_not(case: Case, dtype: torch.dtype, device: torch.device, backend: SDPBackend) -> str | None:
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
        w = w if torch.is_grad_enabled() else w.detach()  # a leaf that wants a gradient is refused on a CPU even so
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


def _flash_attn_why_not(case: Case, dtype: torch.dtype, device: torch.device) -> str | None:
    if find_spec("flash_attn") is None:
        return "flash-attn is not installed"
    if device.type != "cuda" or dtype not in _HALF:
        return "flash-attn takes bf16 and fp16 tensors on GPUs"
    return None


def _own(case: Case, backend: str) -> Function:
    return functools.partial(_call, getattr(crate_kernels, case.op), dict(case.options), backend)


def _call(function: Any, options: dict[str, Any], backend: str, *args: Tensor) -> Tensor:
    if len(args) == 3 and options.get("causal"):  # tssa's third argument is named only
        return function(*args[:2], denom_bias=args[2], backend=backend, **options)
    return function(*args, backend=backend, **options)


def _own_why_not(case: Case, dtype: torch.dtype, device: torch.device, backend: str) -> str | None:
    op = "ista" if case.op.startswith("ista") else case.op
    if backend == "triton" and device.type == "cpu":
        return "Triton's kernels are for GPUs; its interpreter is not worth timing"
    try:
        backends.resolve(op, backend, device, dtype)
    except (RuntimeError, NotImplementedError) as error:
        return str(error)
    return None


_EVERY = ("mssa", "tssa", "ista", "ista_overcomplete")
PROVIDERS: tuple[Provider, ...] = (
    Provider("eager", _EVERY, eager, _always),
    Provider("compile", _EVERY, _compiled, _always),
    Provider("sdpa", ("mssa",), _sdpa, _always),
    *(
        Provider(
            name,
            ("mssa",),
            functools.partial(_sdpa, backend=backend),
            functools.partial(_sdpa_why_not, backend=backend),
        )
        for name, backend in (
            ("sdpa-math", SDPBackend.MATH),
            ("sdpa-flash", SDPBackend.FLASH_ATTENTION),
            ("sdpa-efficient", SDPBackend.EFFICIENT_ATTENTION),
            ("sdpa-cudnn", SDPBackend.CUDNN_ATTENTION),
        )
    ),
    Provider("flex", ("mssa",), _flex, _always, inference_only=("cpu",)),
    Provider("flash-attn", ("mssa",), _flash_attn, _flash_attn_why_not),
    *(
        Provider(name, _EVERY, functools.partial(_own, backend=name), functools.partial(_own_why_not, backend=name))
        for name in OURS
    ),
)


def of(op: str) -> list[Provider]:
    """List the providers of an operator."""
    return [p for p in PROVIDERS if op in p.ops]
