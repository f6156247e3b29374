"""Checks the tensors of an op against each other, as csrc/common/op_checks.h does for kernels in C++.

Kernels trust sizes and devices, and PyTorch's operators broadcast. Autograd hands a backward what its forward saved,
which its owner, or a hook, may have changed since.
"""

from __future__ import annotations

from operator import mul
from typing import Any, NoReturn

import torch
from torch import Tensor

_PLAIN = (Tensor, torch.nn.Parameter)
# As csrc/common/dtype.h counts them.
KERNEL_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def _refuse(call: str, name: str, wanted: str, value: Any) -> NoReturn:
    found = isinstance(value, Tensor)
    got = f"{value.dtype} {tuple(value.shape)} on {value.device}" if found else type(value).__name__
    raise ValueError(f"{call}: {name} must be {wanted}, got {got}")


def in_memory(call: str, name: str, value: Tensor) -> None:
    """Require a plain tensor whose storage holds all that it reaches: who frees or cuts one leaves its sizes."""
    if type(value) not in _PLAIN or torch.compiler.is_compiling() or not torch._C._has_storage(value):
        return
    reach = value.numel()
    if reach and not value.is_contiguous():
        strides = value.stride()
        reach = sum(map(mul, value.shape, strides)) - sum(strides) + 1
    wanted = (value.storage_offset() + reach) * value.itemsize if reach else 0
    found = value.untyped_storage().nbytes()
    if found < wanted:
        raise ValueError(
            f"{call}: {name} must have a storage of at least {wanted} bytes, got one of {found}: it was freed or cut"
        )


def tensor(
    call: str, name: str, value: Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device
) -> None:
    """Require a tensor of this dtype, shape and device; messages begin with ``call``."""
    if value is None or value.dtype != dtype or value.shape != shape or value.device != device:
        _refuse(call, name, f"{dtype} {tuple(shape)} on {device}", value)


def elements(call: str, name: str, value: Tensor, numel: int, device: torch.device) -> None:
    """Require as many contiguous elements, of any dtype that kernels have, in any shape."""
    if value.numel() != numel or value.device != device or value.dtype not in KERNEL_DTYPES:
        _refuse(call, name, f"{numel} elements on {device}", value)
    contiguous(call, name, value)


def contiguous(call: str, name: str, value: Tensor) -> None:
    """Require contiguous elements: kernels take the address alone."""
    if not value.is_contiguous():
        raise ValueError(f"{call}: {name} must be contiguous")


def floating(call: str, name: str, value: Tensor, ndim: int) -> None:
    """Require a floating tensor of ``ndim`` dimensions."""
    if value.dim() != ndim or not value.is_floating_point():
        _refuse(call, name, f"floating, of {ndim} dimensions", value)


def options(
    call: str, w: Tensor, key_padding_mask: Tensor | None, cu_seqlens: Tensor | None, seed: Tensor | None
) -> None:
    """Require tokens in the layout that their options say, and the tensors among the options of a call on them."""
    floating(call, "w", w, 4 if cu_seqlens is None else 3)
    device = w.device
    if key_padding_mask is not None:
        tensor(call, "key_padding_mask", key_padding_mask, torch.bool, (w.shape[0], w.shape[2]), device)
    if cu_seqlens is not None:
        tensor(call, "cu_seqlens", cu_seqlens, torch.int32, (max(cu_seqlens.numel(), 1),), device)
    if seed is not None:
        tensor(call, "seed", seed, torch.int64, (), device)
