"""What every launch of a Triton kernel needs: the device, the compiled kernel, and constants of a call.

This module does not import Triton.
"""

from __future__ import annotations

import functools
import math
import struct
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from crate_kernels._core import launches, plan, recording

INTERPRETER = "interpreter"  # the architecture of CPU tensors
_MAX_COMPILED = 4096  # compiled kernels by key: sizes that a kernel specialises on are few
_compiled: dict[tuple, Any] = {}
_sizes: dict[Any, frozenset[str]] = {}  # the arguments whose values a kernel does not depend on


@functools.lru_cache(maxsize=64)
def arch(device: torch.device) -> str:
    """Return the key of a device's architecture, as "sm_90" or "gfx942"; CPU tensors have the interpreter's key."""
    if device.type != "cuda":
        return INTERPRETER
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    # Consumer Blackwell has Ada's shared memory and matrix instructions, not data-centre Blackwell's.
    return "sm_89" if major == 12 else f"sm_{major}{minor}"


@functools.lru_cache(maxsize=64)
def multiprocessors(device: torch.device) -> int:
    """Return the number of a device's multiprocessors, each of which runs a program or more at a time; 2 for a CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@functools.lru_cache(maxsize=64)
def gpu_name(device: torch.device) -> str:
    """Return the name of a device, empty for the CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def guard(device: torch.device) -> AbstractContextManager:
    """Make ``device`` current: Triton launches on the current device's current stream."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@contextmanager
def scratch(device: torch.device) -> Iterator[None]:
    """Give the launches in this context the memory that Triton asks for, such as that of tensor descriptors."""
    if device.type != "cuda":
        yield
        return
    from triton.runtime._allocation import _allocator  # Triton sets it, but does not put back what there was

    token = _allocator.set(lambda size, alignment, stream: torch.empty(size, dtype=torch.uint8, device=device))
    try:
        yield
    finally:
        _allocator.reset(token)


def run(kernel: Any, programs: int, /, **arguments: Any) -> None:
    """Launch a kernel over a number of programs, its multiplies and adds fused.

    To find what it compiled, Triton describes each argument, which takes the host longer than all the rest of a
    launch: it is asked once for each of our own keys, which are cheaper. Settings of Triton that change what it
    compiles, as for debugging, are those of that time.
    """
    # From Triton 3.10 on they are fused only where a launch asks for it, and 3.9 warns where one does not say.
    arguments["enable_fp_fusion"] = True
    recorder = recording.recorder()
    if recorder is None:
        _launch(kernel, programs, arguments)
        return
    with recording.unseen():
        compiled = _launch(kernel, programs, arguments)
    plan.watch(_hooks_are_set)
    recorder.launched(lambda: describe(kernel, programs, compiled, arguments))


def _launch(kernel: Any, programs: int, arguments: dict[str, Any]) -> Any:
    """Launch a kernel, and return what Triton compiled for it; None by the interpreter."""
    key = _key(kernel, arguments)
    compiled = _compiled.get(key)  # pyright: ignore[reportArgumentType]
    if compiled is not None:
        compiled[programs, 1, 1](*[arguments[name] for name in kernel.arg_names])
        return compiled
    compiled = kernel[(programs,)](**arguments)
    if compiled is not None and key is not None and arguments.keys() >= set(kernel.arg_names):
        if len(_compiled) >= _MAX_COMPILED:
            _compiled.clear()
        _compiled[key] = compiled
    return compiled


def describe(kernel: Any, programs: int, compiled: Any, arguments: dict[str, Any]) -> launches.Launch:
    """Return a launch of what Triton compiled as a driver takes it; raise launches.Unplannable where it needs more."""
    if compiled is None:
        raise launches.Unplannable("an interpreted kernel")
    meta = compiled.metadata
    if meta.target.backend != "cuda":
        raise launches.Unplannable(f"a kernel for {meta.target.backend}")
    if meta.profile_scratch_size:
        raise launches.Unplannable("a kernel with a profiler's memory")
    if not arguments.keys() >= set(kernel.arg_names):
        raise launches.Unplannable("an argument that is left to its default")
    compiled._init_handles()
    parameters: list[bytes | torch.Tensor | None] = []
    values = [arguments[name] for name in kernel.arg_names]
    for kind, value in zip(compiled.src.signature.values(), values, strict=True):
        _describe(kind, value, parameters)
    own = None
    if meta.global_scratch_size:  # an allocation that the recorder sees
        size = programs * meta.num_ctas * meta.global_scratch_size
        device = next(value.device for value in values if isinstance(value, torch.Tensor))
        own = torch.empty(size, dtype=torch.uint8, device=device)
    return launches.Launch(
        function=compiled.function,
        grid=(programs, 1, 1),
        threads=meta.target.warp_size * meta.num_warps,
        shared_bytes=meta.shared,
        ctas=meta.num_ctas,
        cooperative=bool(meta.launch_cooperative_grid),
        serialized=bool(meta.launch_pdl),
        parameters=[*parameters, own, None],  # scratch memory: the kernel's, and a profiler's
        owner=compiled,
    )


# How Triton's launcher packs a number of each type.
_PACKED = {
    "i1": "<?",
    "i8": "<b",
    "i16": "<h",
    "i32": "<i",
    "i64": "<q",
    "u1": "<?",
    "u8": "<B",
    "u16": "<H",
    "u32": "<I",
    "u64": "<Q",
    "fp32": "<f",
    "f32": "<f",
    "fp64": "<d",
}


def _describe(kind: Any, value: Any, parameters: list[bytes | torch.Tensor | None]) -> None:
    """Add a kernel's argument of a type of its signature: of a record, those of its fields; of a constant, nothing."""
    if isinstance(kind, (tuple, list)):
        for part, each in zip(kind, value, strict=True):
            _describe(part, each, parameters)
    elif kind == "constexpr":
        return
    elif kind.startswith("*"):
        parameters.append(value)
    elif kind in _PACKED:
        parameters.append(struct.pack(_PACKED[kind], value))
    else:
        raise launches.Unplannable(f"an argument of type {kind}")


def _hooks_are_set() -> bool:
    """Return whether a hook follows Triton's launches, as its profiler does."""
    runtime = sys.modules["triton"].knobs.runtime
    return any(getattr(hook, "calls", hook) for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook))


def _key(kernel: Any, arguments: dict[str, Any]) -> tuple | None:
    """Return a key that launches have in common only if they take the same compiled kernel; None if there is none.

    Kernels depend on the type of every argument, on the dtype of a tensor and whether its address is a multiple of 16,
    and on what numbers may be: 1, a multiple of 16, wide. AMD's depend on the sizes of tensors too.
    """
    function = kernel.fn  # hashed at once, where a kernel is hashed by its source
    sizes = _sizes.get(function)
    if sizes is None:
        found = getattr(kernel, "do_not_specialize", None)
        if found is None or torch.version.hip:  # an interpreted kernel, or one for AMD
            return None
        sizes = _sizes[function] = frozenset(found)
    flat: list[Any] = []
    for name, value in arguments.items():
        if name in sizes:
            flat.append(value >> 31)  # 32 bits or 64
        elif isinstance(value, tuple) and not name.isupper():  # a record of tensors and numbers, not of constants
            flat += value
        else:
            flat.append(value)
    types = tuple(map(type, flat))
    device, address = -1, 0
    for place in _tensors(types):
        tensor = flat[place]
        address |= tensor.data_ptr()
        device, flat[place] = tensor.get_device(), tensor.dtype
    return None if address % 16 else (function, device, *arguments, types, *flat)


@functools.lru_cache(maxsize=1024)
def _tensors(types: tuple[type, ...]) -> tuple[int, ...]:
    """Return the places of the tensors among values of these types."""
    return tuple(place for place, kind in enumerate(types) if issubclass(kind, torch.Tensor))


def dot_precision(dtype: torch.dtype) -> str:
    """Return ``input_precision`` for ``tl.dot``, whose default is TF32, from torch's setting for fp32 products.

    No setting (or "highest") means exact products, "ieee". ``torch.set_float32_matmul_precision("high")`` means
    "tf32x3", three TF32 products. "medium", or ``torch.backends.cuda.matmul.fp32_precision = "tf32"``, means "tf32".
    """
    if dtype != torch.float32 or torch.backends.cuda.matmul.fp32_precision != "tf32" or torch.version.hip:
        return "ieee"
    try:
        setting = torch.get_float32_matmul_precision()
    except RuntimeError:  # set through the newer interface; the older one cannot express it
        return "tf32"
    return "tf32x3" if setting == "high" else "tf32"


def drop_last(dropout_p: float) -> int:
    """Return the largest Philox word that dropout drops, less 2^31: an int32 for every p in (0, 1)."""
    return math.ceil(dropout_p * 2**32) - 1 - 2**31
