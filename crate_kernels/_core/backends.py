"""Lists the backends, chooses one for ``backend=None``, and says why one is unavailable.

A backend is a name and a package with one kernel module per operator. A kernel module defines ``forward`` and
``backward``, and ``decode`` where the operator has a cache. Adding the file ``ops/<op>/<backend>.py`` offers one.
A part of an operator may have separate kernel modules: ``add_part``.
``cpp`` is C++ for CPU tensors and CUDA C++ for CUDA tensors, both in ``native.py``. The former needs the extension,
the latter NVRTC.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from crate_kernels._core import plan
from crate_kernels._native import extension, libraries, nvrtc

OPS = ("mssa", "tssa", "ista")
_CPU = torch.device("cpu")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# The interpreter runs Triton kernels on CPU tensors. The variable is read once, as Triton reads it.
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@dataclass(frozen=True)
class Backend:
    """One way to compute the operators.

    Attributes:
        name: the string users pass as ``backend=``.
        package: where the kernel modules are, with ``{op}`` standing for the operator.
        devices: supported device types; None means any.
        dtypes: supported dtypes; None means any floating dtype.
        missing: why the backend cannot run in this process; None if it can.
        remedy: advice to the user, for messages.
        on_cuda: another variant of the same name for CUDA tensors; None if this one serves them.
        unfit: says why a device of a supported type cannot run the backend, None if it can; None if all can.
        planned: whether what it does for a call may be repeated by a plan (``plan.py``).
    """

    name: str
    package: str
    devices: tuple[str, ...] | None = None
    dtypes: tuple[torch.dtype, ...] | None = None
    missing: str | None = None
    remedy: str = "use backend='composite'"
    on_cuda: Backend | None = None
    unfit: Callable[[torch.device], str | None] | None = None
    planned: bool = False

    def for_device(self, device_type: str) -> Backend:
        """Return the variant for tensors on this type of device."""
        return self.on_cuda if self.on_cuda is not None and device_type == "cuda" else self

    def variants(self) -> tuple[Backend, ...]:
        """List this backend and its variant for CUDA, if any."""
        return (self,) if self.on_cuda is None else (self, self.on_cuda)

    def unfit_reason(self, device: torch.device) -> str | None:
        """Say why this variant cannot run on a device; None if it can, or while a call is traced to run anywhere."""
        return None if self.unfit is None or torch.compiler.is_compiling() else self.unfit(device)


@functools.lru_cache(maxsize=64)
def _too_old_for_triton(device: torch.device) -> str | None:
    """Say why Triton cannot compile for an NVIDIA GPU; None if it can, or if there is none: tensors may be fake."""
    if device.type != "cuda" or torch.version.hip or (device.index or 0) >= torch.cuda.device_count():
        return None
    major, minor = torch.cuda.get_device_capability(device)
    if major >= 8:
        return None
    return f"Triton takes GPUs of compute capability 8.0 and later, this one has {major}.{minor}"


_BACKENDS = {
    b.name: b
    for b in (
        Backend(
            "triton",
            "crate_kernels.ops.{op}.triton",
            devices=("cuda", "cpu") if _INTERPRETED else ("cuda",),
            dtypes=_FLOATS,
            missing=None if find_spec("triton") else "Triton is not installed (pip install triton)",
            unfit=_too_old_for_triton,
            planned=True,
        ),
        Backend(
            "cpp",
            "crate_kernels.ops.{op}.native",
            devices=("cpu",),
            dtypes=_FLOATS,
            missing=None if extension.PATH else f"{extension.MISSING} (python -m crate_kernels build)",
            on_cuda=Backend(
                "cpp on cuda",
                "crate_kernels.ops.{op}.native",
                devices=("cuda",),
                dtypes=_FLOATS,
                missing=nvrtc.unavailable_reason(),
            ),
            planned=True,
        ),
        Backend("composite", "crate_kernels.ops.{op}.composite"),
        Backend("reference", "crate_kernels.ops.{op}.reference"),
    )
}
_PREFERENCE = {"cuda": ("triton", "cpp"), "cpu": ("cpp",)}
# The op's ``backend`` argument if the caller named none: the op's body chooses, and may fall back to composite. After a
# colon may follow what was measured to be the fastest (``measured.py``): it is tried first.
AUTO = "auto"
_kernels: dict[tuple[str, str], ModuleType] = {}
# (operator, function of a kernel module) -> the public function, for messages, where its name is not the operator's.
PUBLIC: dict[tuple[str, str], str] = {}


def _is_there(package: str) -> bool:
    """Return whether a kernel module exists. For ours, look for the file or folder: that imports nothing."""
    root, _, rest = package.partition(".")
    if root == "crate_kernels":
        place = Path(__file__).parents[1].joinpath(*rest.split("."))
        return place.is_dir() or place.with_suffix(".py").exists()
    return find_spec(package) is not None


# Looked up once: a call must not touch the disk, and torch.compile cannot trace disk access.
_has_kernel = {
    (op, v.name): _is_there(v.package.format(op=op)) for op in OPS for b in _BACKENDS.values() for v in b.variants()
}


def type_of(device: torch.device) -> str:
    """Return the type of a device. PyTorch writes the word anew each time, which takes longer than to compare."""
    return "cpu" if device == _CPU else device.type


def add_part(part: str) -> None:
    """Let a part of an operator, "<op>.<part>", have separate kernel modules: ops/<op>/<part>/<backend>.py."""
    for variant in (v for b in _BACKENDS.values() for v in b.variants()):
        package = variant.package.format(op=part)
        _has_kernel[part, variant.name] = package.startswith("crate_kernels.") and _is_there(package)


def names() -> tuple[str, ...]:
    """List the names that ``backend=`` accepts."""
    return tuple(_BACKENDS)


def for_device(name: str, device_type: str = "cpu") -> Backend:
    """Return the variant of a named backend for tensors on this type of device."""
    return _BACKENDS[name].for_device(device_type)


def register(backend: Backend) -> None:
    """Add a backend. Tests use this to put plain PyTorch behind the op boundary."""
    plan.forget()
    _BACKENDS[backend.name] = backend
    _has_kernel.update({(op, backend.name): _is_there(backend.package.format(op=op)) for op in OPS})


def unregister(name: str) -> None:
    """Remove a backend added with ``register``."""
    plan.forget()
    del _BACKENDS[name]
    for op in OPS:
        del _has_kernel[op, name]
        _kernels.pop((op, name), None)


def kernel(op: str, backend: str, device_type: str = "cpu") -> ModuleType:
    """Import, once, the module that computes ``op`` on ``backend`` for this type of device."""
    chosen = _BACKENDS[backend].for_device(device_type)
    module = _kernels.get((op, chosen.name))
    if module is None:
        module = importlib.import_module(chosen.package.format(op=op))
        _kernels[op, chosen.name] = module
    return module


class Refused(Exception):
    """A kernel does not support a shape. Raised before any write; the message says what is supported."""


def are_planned(name: str, first: Tensor) -> bool:
    """Return whether plans may serve calls of the op's ``backend`` argument ``name`` on a ``first`` tensor."""
    return _is_auto(name) or _BACKENDS[name].planned


def are_planned_on_gpus(name: str, first: Tensor) -> bool:
    """Return the same for an op whose options change from call to call on a CPU."""
    return are_planned(name, first) and (first.is_cuda or name == "triton")


def _is_auto(name: str) -> bool:
    return name.partition(":")[0] == AUTO


def to_op_arg(name: str, requested: str | None, fastest: str | None = None) -> str:
    """Return the op's ``backend`` argument for a request that was resolved to ``name``.

    ``fastest`` is the backend that was measured to be the fastest for such calls, None where none was.
    """
    if fastest is not None:
        return f"{AUTO}:{fastest}"
    return AUTO if requested is None and name != "composite" else name


# Takes the backends that serve a call for which none was named, the best in general first, and the arguments of the
# kernel module's function; returns those to try, in order. A package states what it knows of its kernels by one.
BackendOrder = Callable[..., tuple[str, ...]]


def prefer(name: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return ``names`` with ``name`` before the others, or as they are without it."""
    return (name, *(other for other in names if other != name)) if name in names else names


def _usable_backends(op: str, device: torch.device, dtype: torch.dtype) -> list[str]:
    """List the backends that None may take for such tensors, the best in general first, and composite in the end."""
    found, device_type = [], type_of(device)
    for name in _PREFERENCE.get(device_type, ()):
        backend = _BACKENDS[name].for_device(device_type)
        takes = device_type in (backend.devices or ()) and dtype in (backend.dtypes or ())
        if takes and variant_reason(op, backend) is None and backend.unfit_reason(device) is None:
            found.append(name)
    found.append("composite")
    if len(found) == 1 and device_type == "cpu" and not torch.compiler.is_compiling():
        cpp = _BACKENDS["cpp"]
        if cpp.missing is not None and dtype in (cpp.dtypes or ()):
            _hint(cpp.missing)
    return found


@functools.cache
def _hint(missing: str) -> None:
    """Log, once in a process, that a CPU could run the C++ kernels: a compiler and the sources are here."""
    if shutil.which("c++") is not None and libraries.source_folder() is not None:
        chosen = "on this CPU, backend=None takes 'composite', PyTorch's own operators"
        logging.getLogger("crate_kernels").warning("crate_kernels: %s: %s", chosen, missing)


def _public(op: str, function: str) -> str:
    return PUBLIC.get((op, function), op)


def eligible_backends(
    op: str, function: str, backend: str, dispatch_tensor: Tensor, *args: Any, order: BackendOrder | None = None
) -> Iterator[tuple[str, Callable]]:
    """Go through the backends that ``run`` tries, one after another: name, and function of the kernel module."""
    kind, names = type_of(dispatch_tensor.device), (backend,)
    if _is_auto(backend):
        names = tuple(_usable_backends(op, dispatch_tensor.device, dispatch_tensor.dtype))
        if order is not None:
            names = order(names, *args)
        names = prefer(backend.partition(":")[2], names)
    for name in names:
        body = getattr(kernel(op, name, kind), function, None)
        if body is not None:
            yield name, body


def attempt(op: str, function: str, name: str, body: Callable, *args: Any) -> Any:
    """Call a function of a kernel module of the backend ``name``; Refused passes.

    Raises:
        MemoryError: not enough memory for the kernel's workspace.
    """
    try:
        return body(*args)
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "bad_alloc" not in str(error):  # its type from PyTorch 2.15 on
            raise
        short = f"backend={name!r} ran out of memory for its workspace in {function}"
        raise MemoryError(f"{_public(op, function)}: {short}") from error


def run(
    op: str, function: str, backend: str, dispatch_tensor: Tensor, *args: Any, order: BackendOrder | None = None
) -> Any:
    """Call a function of the kernel module of ``backend``; without a named one, of the first that takes the case.

    ``order`` is asked only if none was named. What is tried last then is composite.

    Raises:
        NotImplementedError: the backend was named, and its kernel refuses the shape.
        MemoryError: not enough memory for a kernel's workspace.
        RuntimeError: the call was traced without a named backend, and this device has no kernel.
    """
    for name, body in eligible_backends(op, function, backend, dispatch_tensor, *args, order=order):
        try:
            return attempt(op, function, name, body, *args)
        except Refused as reason:
            if not _is_auto(backend):
                raise NotImplementedError(
                    f"{_public(op, function)}: backend={name!r} {reason}; {_BACKENDS[name].remedy}"
                ) from None
    here = f"{type_of(dispatch_tensor.device)} tensors of {dispatch_tensor.dtype} here"
    raise RuntimeError(
        f"{_public(op, function)}: no kernel takes {here}; what is to run anywhere must name backend='composite'"
    )


def unavailable_reason(op: str, name: str, device: str | torch.device = "cpu") -> str | None:
    """Say why ``op`` cannot run on backend ``name`` in this process, on this device or type of device; None if it can.

    ``resolve`` checks whether the backend supports the device at all.
    """
    if isinstance(device, str):
        return variant_reason(op, for_device(name, device))
    backend = for_device(name, device.type)
    return variant_reason(op, backend) or backend.unfit_reason(device)


def variant_reason(op: str, backend: Backend) -> str | None:
    """Say why one variant of a backend cannot compute ``op`` in this process; None if it can."""
    if not _has_kernel.get((op, backend.name), False):
        return f"{backend.name} has no {op} kernel yet"
    return backend.missing


def resolve(op: str, requested: str | None, device: torch.device, dtype: torch.dtype, function: str = "") -> str:
    """Choose the backend of one call on tensors of ``device`` and ``dtype``: the one requested, or the best for None.

    For None this is the best in general: the op's body may try another first (``run``). Messages name the public
    ``function``, by default ``op``.

    Raises:
        TypeError: ``requested`` is neither None nor a string.
        ValueError: no backend has that name.
        RuntimeError: the backend is unavailable in this process or on that device.
        NotImplementedError: the backend does not support that dtype.
    """
    if requested is None:
        return _usable_backends(op, device, dtype)[0]
    function = function or op
    if not isinstance(requested, str):
        raise TypeError(f"{function}: backend must be None or a string, got {type(requested).__name__}")
    if requested not in _BACKENDS:
        raise ValueError(f"{function}: backend must be None or one of {', '.join(_BACKENDS)}, got {requested!r}")
    backend = _BACKENDS[requested].for_device(device.type)
    reason = unavailable_reason(op, requested, device)
    if reason is not None:
        raise RuntimeError(f"{function}: backend={requested!r} is unavailable: {reason}; {backend.remedy}")
    if backend.devices is not None and device.type not in backend.devices:
        wanted = " or ".join(d for v in _BACKENDS[requested].variants() for d in v.devices or ())
        raise RuntimeError(
            f"{function}: backend={requested!r} takes {wanted} tensors, got {device.type}; {backend.remedy}"
        )
    if backend.dtypes is not None and dtype not in backend.dtypes:
        wanted = ", ".join(str(d) for d in backend.dtypes)
        raise NotImplementedError(f"{function}: backend={requested!r} takes {wanted}, got {dtype}; {backend.remedy}")
    return requested
