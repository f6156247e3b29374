"""Checks of the input: every public function validates here, once.

Messages read ``op: argument must be expectation, got value``. Values of a tensor are read only on the CPU and
outside ``torch.compile``, so no check ever synchronises.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import itertools
import math
import os
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch._C._functorch import get_interpreter_stack
from torch.autograd import forward_ad

from crate_kernels._core import op_checks
from crate_kernels._core.packing import unmapped

Function = TypeVar("Function", bound=Callable[..., Any])


_MAX_INT = 2**63 - 1  # of the integers that an op takes


def _type_name(value: object) -> str:
    if isinstance(value, Tensor):
        return "a Tensor"
    kind = type(value)
    if kind.__module__.startswith("torch.fx"):
        return "a symbol of torch.fx: make the module that calls this a leaf of the tracer, or use torch.export"
    return f"numpy.{kind.__name__}" if kind.__module__ == "numpy" else kind.__name__  # NumPy has a bool too


def _dense(op: str, name: str, value: Tensor) -> None:
    """Require a tensor whose numbers lie in memory by strides."""
    if value.is_nested:
        raise NotImplementedError(f"{op}: {name} must not be a nested tensor")
    if value.layout != torch.strided:
        raise ValueError(f"{op}: {name} must be a dense tensor, got one of layout {value.layout}")
    op_checks.in_memory(op, name, value)


# Names that other libraries have for an argument, where the letters do not tell.
_SYNONYMS = {
    "attention_mask": ("key_padding_mask",),
    "eta": ("step_size",),
    "head_dim": ("dim_head",),
    "mask": ("key_padding_mask",),
    "nheads": ("heads", "num_heads", "n_head"),
    "num_heads": ("heads", "n_head", "nheads"),
    "num_labels": ("num_classes",),
    "past_key_values": ("cache",),
    "sm_scale": ("scale",),
    "softmax_scale": ("scale",),
}


_NEAR = 0.65  # share of letters in common: "scale" and "cache" have 0.6


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean ...?" with the known name that is nearest, "" if none is near."""
    known = list(known)
    near = [each for each in _SYNONYMS.get(name, ()) if each in known]
    near = near or difflib.get_close_matches(name, known, 1, _NEAR)
    return f"; did you mean {near[0]}?" if near else ""


def closed(function: Function) -> Function:
    """Leave ``**unknown`` out of the signature of a function that refuses such keywords by ``no_keyword``."""
    signature = inspect.signature(function)
    named = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
    function.__signature__ = signature.replace(parameters=named)  # pyright: ignore[reportFunctionMemberAccess]
    return function


def suggesting(function: Function) -> Function:
    """Have a function, or the constructor of a class, name what was meant by a keyword that it does not have.

    A function that is called in the microseconds of a kernel is ``closed`` instead, which costs less.
    """
    if isinstance(function, type):
        function.__init__ = suggesting(function.__init__)  # pyright: ignore[reportAttributeAccessIssue]
        return function  # pyright: ignore[reportReturnType]
    known = frozenset(inspect.signature(function).parameters)

    @functools.wraps(function)
    def checked(*args: Any, **keywords: Any) -> Any:
        for name in keywords:
            if name not in known:
                no_keyword(function, {name: None})
        return function(*args, **keywords)

    return checked  # pyright: ignore[reportReturnType]


def no_keyword(function: Callable[..., Any], unknown: Mapping[str, object]) -> NoReturn:
    """Raise for a keyword that a function does not have, as Python does, and name the nearest that it has.

    A module's ``forward`` asks whether its keywords are a dict: ``torch.fx`` traces something else in their place.
    """
    name = next(iter(unknown))
    near = suggestion(name, inspect.signature(function).parameters)
    raise TypeError(f"{function.__qualname__}() got an unexpected keyword argument {name!r}{near}")


def tensor(op: str, name: str, value: object, ndim: int | None, layout: str) -> Tensor:
    """Require a floating tensor of ``ndim`` dimensions, described to the user as ``layout``."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}: {name} must be a Tensor {layout}, got {_type_name(value)}")
    if value.is_nested:
        raise NotImplementedError(f"{op}: {name} must not be a nested tensor; pack it with cu_seqlens")
    if ndim is not None and value.dim() != ndim:
        raise ValueError(f"{op}: {name} must be {layout}, got {tuple(value.shape)}")
    if not value.is_floating_point():
        raise ValueError(f"{op}: {name} must have a floating dtype, got {value.dtype}")
    if value.dtype.itemsize < 2:
        raise ValueError(f"{op}: {name} must have a floating dtype of 16 bits or more, got {value.dtype}")
    _dense(op, name, value)
    return value


def same_device(op: str, name: str, value: Tensor, other: Tensor, other_name: str = "w") -> None:
    """Require ``value`` to be on the device of ``other``."""
    if value.device != other.device:
        raise ValueError(f"{op}: {name} must be on {other_name}'s device {other.device}, got {value.device}")


def shape(op: str, name: str, value: Tensor, expected: tuple[int, ...], layout: str) -> None:
    """Require an exact shape, described to the user as ``layout``."""
    if tuple(value.shape) != expected:
        raise ValueError(f"{op}: {name} must be {layout} = {expected}, got {tuple(value.shape)}")


def module(op: str, name: str, value: object) -> nn.Module:
    """Require a module."""
    if not isinstance(value, nn.Module):
        raise TypeError(f"{op}: {name} must be a Module, got {_type_name(value)}")
    return value


def path(op: str, name: str, value: object) -> Path:
    """Require what names a file or a folder."""
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"{op}: {name} must be a path, got {_type_name(value)}")
    return Path(value)


def number(op: str, name: str, value: object, minimum: float | None = None, below: float | None = None) -> float:
    """Require a finite Python number, optionally ``>= minimum`` and ``< below``."""
    plain = type(value) is float  # isinstance of an abstract class takes half a microsecond
    if not plain and (isinstance(value, (bool, Tensor)) or not isinstance(value, (Real, torch.SymFloat, torch.SymInt))):
        raise TypeError(f"{op}: {name} must be a number, got {_type_name(value)}")
    try:
        result = float(value)
    except OverflowError:
        got = "an int" if isinstance(value, int) else f"a {_type_name(value)}"
        raise ValueError(f"{op}: {name} must be finite, got {got} beyond the largest float") from None
    if not abs(result) < math.inf:  # not isfinite: compile with dynamic=True gives a symbol here
        raise ValueError(f"{op}: {name} must be finite, got {result}")
    if minimum is not None and result < minimum:
        raise ValueError(f"{op}: {name} must be >= {minimum}, got {result}")
    if below is not None and result >= below:
        raise ValueError(f"{op}: {name} must be < {below}, got {result}")
    return result


def flag(op: str, name: str, value: object) -> bool:
    """Require a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{op}: {name} must be a bool, got {_type_name(value)}")
    return value


def padding_mask(op: str, mask: object, w: Tensor) -> None:
    """Require a (batch, seqlen) bool mask, True = keep, on w's device."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"{op}: key_padding_mask must be a Tensor, got {_type_name(mask)}")
    if mask.dtype != torch.bool:
        raise ValueError(f"{op}: key_padding_mask must be bool (True = keep), got {mask.dtype}")
    _dense(op, "key_padding_mask", mask)
    shape(op, "key_padding_mask", mask, (w.shape[0], w.shape[2]), "(batch, seqlen)")
    same_device(op, "key_padding_mask", mask, w)


def _readable(t: Tensor) -> Tensor | None:
    """Return what holds the values, with mapped dimensions in front, if these are free to read and not traced."""
    if t.device.type != "cpu" or torch.compiler.is_compiling():
        return None
    if torch._C._are_functorch_transforms_active():
        t = unmapped(t)
    return t if type(t) is Tensor else None


def indices(op: str, name: str, value: Tensor, stop: int, start: int = 0) -> None:
    """Require integers in [start, stop), of a tensor whose values are free to read."""
    read = _readable(value)
    if read is not None and read.numel() > 0:
        low, high = (int(each) for each in read.aminmax())
        if low < start or high >= stop:
            got = low if low < start else high
            raise ValueError(f"{op}: {name} must be {start} to {stop - 1}, got {got}")


def right_padded(op: str, mask: Tensor) -> None:
    """Require every row of a CPU mask to be True up to its length and False after it."""
    read = _readable(mask)
    if read is not None and bool((read[..., 1:] & ~read[..., :-1]).any()):
        raise ValueError(f"{op}: key_padding_mask must be right-padded when a cache is given")


def cu_seqlens_values(op: str, cu_seqlens: Tensor, total: int, max_seqlen: int) -> None:
    """Require 0 <= cu_seqlens[0] <= ... <= cu_seqlens[-1] <= total, no sequence above max_seqlen."""
    for bounds in cu_seqlens.flatten(0, -2).tolist() if cu_seqlens.dim() > 1 else [cu_seqlens.tolist()]:
        lengths = [b - a for a, b in itertools.pairwise(bounds)]
        if bounds[0] < 0 or bounds[-1] > total or any(n < 0 for n in lengths):
            raise ValueError(f"{op}: cu_seqlens must rise within 0 to total = {total}, got {bounds}")
        if lengths and max(lengths) > max_seqlen:
            raise ValueError(f"{op}: max_seqlen must be >= the longest sequence = {max(lengths)}, got {max_seqlen}")


def packing(op: str, cu_seqlens: object, max_seqlen: object, w: Tensor) -> int:
    """Require int32 offsets on w's device and an int ``max_seqlen``; check values only where reading them is free."""
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"{op}: cu_seqlens must be a Tensor, got {_type_name(cu_seqlens)}")
    _dense(op, "cu_seqlens", cu_seqlens)
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        got = f"{cu_seqlens.dtype} {tuple(cu_seqlens.shape)}"
        raise ValueError(f"{op}: cu_seqlens must be int32 (sequences + 1,), of one sequence or more, got {got}")
    same_device(op, "cu_seqlens", cu_seqlens, w)
    if isinstance(max_seqlen, bool) or not isinstance(max_seqlen, (int, torch.SymInt)):
        raise TypeError(f"{op}: max_seqlen must be an int with cu_seqlens, got {_type_name(max_seqlen)}")
    if max_seqlen < 0:
        raise ValueError(f"{op}: max_seqlen must be >= 0, got {max_seqlen}")
    if type(max_seqlen) is int and max_seqlen > _MAX_INT:
        raise ValueError(f"{op}: max_seqlen must be below 2**63, got {max_seqlen}")
    read = _readable(cu_seqlens)
    if read is not None:
        cu_seqlens_values(op, read, w.shape[0], int(max_seqlen))
    return max_seqlen  # pyright: ignore[reportReturnType]  # a SymInt under compile


def transforms(op: str, backend: str, *tensors: Tensor | None) -> None:
    """Refuse the derivatives that only ``reference`` has; without this check they would silently be zero.

    Reverse mode once (``torch.func.grad``, ``vjp``, ``jacrev``) and ``vmap`` pass, also one of the other.
    """
    advice = f"; backend={backend!r} has no such derivative, use backend='reference'"
    if forward_ad._current_level >= 0 and any(
        t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors
    ):
        raise NotImplementedError(f"{op}: forward-mode AD is not supported{advice}")
    if not torch._C._are_functorch_transforms_active():
        return
    stack = get_interpreter_stack() or []
    kinds = [level.key().name for level in stack]
    if "Jvp" in kinds:
        raise NotImplementedError(f"{op}: forward-mode AD is not supported{advice}")
    if kinds.count("Grad") > 1:
        raise NotImplementedError(f"{op}: double backward is not supported{advice}")


def cache_sizes(op: str, sizes: dict[str, int], dtype: torch.dtype | None) -> None:
    """Require positive int sizes and a floating dtype of a new cache."""
    for name, size in sizes.items():
        integer(op, name, size, minimum=1)
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"{op}: dtype must be a torch.dtype, got {_type_name(dtype)}")
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"{op}: dtype must be floating, got {dtype}")
    if dtype is not None and dtype.itemsize < 2:
        raise ValueError(f"{op}: dtype must be of 16 bits or more, got {dtype}")


def cache_rows(op: str, name: str, value: Tensor, lengths: Tensor) -> None:
    """Require an integer (batch,) tensor on the cache's device."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}: {name} must be a Tensor, got {_type_name(value)}")
    _dense(op, name, value)
    if value.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{op}: {name} must be int32 or int64, got {value.dtype}")
    shape(op, name, value, tuple(lengths.shape), "(batch,)")
    same_device(op, name, value, lengths, "the cache")


def cache_index(op: str, index: Tensor, lengths: Tensor) -> None:
    """Require an integer (batch,) tensor of the cache's sequence indices; check values only where reading is free."""
    cache_rows(op, "index", index, lengths)
    read = _readable(index)
    if read is not None and bool(((read < 0) | (read >= len(index))).any()):
        raise ValueError(f"{op}: index must be of sequences 0 to {len(index) - 1}, got {read.tolist()}")


def cache_matches(op: str, w: Tensor, sizes: tuple[int, ...], device: torch.device, dtype: torch.dtype | None) -> None:
    """Require new tokens of the cache's batch, nheads and head_dim, of its device and, unless None, of its dtype."""
    batch, nheads, _, head_dim = w.shape
    if len(sizes) != 3:
        raise ValueError(f"{op}: cache must hold tensors of (batch, nheads, ..., head_dim), got {tuple(sizes)}")
    if (batch, nheads, head_dim) != sizes:
        wanted = "{}, {}, seqlen, {}".format(*sizes)
        raise ValueError(f"{op}: w must match the cache, ({wanted}), got {tuple(w.shape)}")
    if w.device != device:
        raise ValueError(f"{op}: w must be on the cache's device {device}, got {w.device}")
    if dtype is not None and w.dtype != dtype:
        raise ValueError(f"{op}: w must have the cache's dtype {dtype}, got {w.dtype}")


def writable(op: str, stored: Tensor) -> None:
    """Refuse to write a cache that was made under inference_mode outside of it, as PyTorch does."""
    if not torch.compiler.is_compiling() and stored.is_inference() and not torch.is_inference_mode_enabled():
        raise RuntimeError(
            f"{op}: cache must not have been made under torch.inference_mode() to be written outside of it; "
            "make it outside, or under torch.no_grad()"
        )


def inference_only(op: str, **tensors: Tensor | None) -> None:
    """Refuse tensors that require a gradient, in a call with a cache."""
    if not torch.is_grad_enabled():
        return
    for name, tensor in tensors.items():
        if tensor is not None and tensor.requires_grad:
            raise ValueError(f"{op}: {name} must not require a gradient with a cache: wrap the call in torch.no_grad()")


def text(op: str, name: str, value: object) -> str:
    """Require a string."""
    if not isinstance(value, str):
        raise TypeError(f"{op}: {name} must be a string, got {_type_name(value)}")
    return value


def backend(op: str, value: object) -> str | None:
    """Require None or a string; every call checks that a backend has that name."""
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{op}: backend must be None or a string, got {_type_name(value)}")
    return value


def integer(op: str, name: str, value: object, minimum: int | None = None) -> int:
    """Require an int, optionally ``>= minimum``."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{op}: {name} must be an int, got {_type_name(value)}")
    if minimum is not None and value < minimum:
        raise ValueError(f"{op}: {name} must be >= {minimum}, got {value}")
    if type(value) is int and value > _MAX_INT:
        raise ValueError(f"{op}: {name} must be below 2**63, got {value}")
    return value  # pyright: ignore[reportReturnType]  # a SymInt under compile


def multiple(op: str, name: str, value: int, of_name: str, of: int) -> None:
    """Require a positive int that is a multiple of another one."""
    integer(op, name, value, minimum=1)
    if value % integer(op, of_name, of, minimum=1):
        raise ValueError(f"{op}: {name} must be a multiple of {of_name} = {of}, got {value}")
