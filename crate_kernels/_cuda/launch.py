"""Launches kernels of the device code: on the tensors' GPU and PyTorch's stream, and into the plan that is recorded.

A planner calls ``run`` with a ``Kernel`` and its parameters. The kernel is compiled and loaded the first time that a
process needs it on a GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from crate_kernels._core import backends, launches, recording
from crate_kernels._cuda import cubins, records
from crate_kernels._cuda.records import Parameter, Record
from crate_kernels._cuda.sources import Kernel
from crate_kernels._native import driver, nvrtc
from crate_kernels._native.driver import Function, Shape
from crate_kernels._native.libraries import BuildError

_MAX_BLOCKS = 2**31 - 1


class LaunchDevice(Protocol):
    """What kernels are launched on.

    Attributes:
        capability: compute capability, 90 for 9.0: what __CUDA_ARCH__ / 10 is in kernels.
        multiprocessors: how many it has.
        shared_limit: bytes of shared memory that a block can have at most.
    """

    capability: int
    multiprocessors: int
    shared_limit: int

    def function(self, kernel: Kernel, types: tuple[type[Record], ...]) -> Function:
        """Return a kernel, compiled and loaded; ``types`` are records, checked against the device code."""
        ...

    def launch(self, function: Function, shape: Shape, parameters: Sequence[bytes], stream: int) -> None:
        """Launch a kernel; ``parameters`` are the bytes of each."""
        ...

    def active_clusters(self, function: Function, shape: Shape) -> int:
        """Return how many clusters of a launch it holds at once; 0 if it holds none."""
        ...


class _Nvidia(driver.Gpu):
    """A GPU whose kernels NVRTC compiles."""

    def function(self, kernel: Kernel, types: tuple[type[Record], ...]) -> Function:
        try:
            return self.load(*cubins.compiled(kernel, self.capability, types))
        except (BuildError, nvrtc.Unavailable, nvrtc.NotCompiled) as reason:
            raise backends.Refused(f"cannot compile {kernel.name}: {reason}") from reason
        except driver.Unloadable as reason:
            raise backends.Refused(f"cannot load {kernel.name}: {reason}") from reason


# By type of device, how to open the GPU of a number. Tests add the CPU, which emulates one.
OPENERS: dict[str, Callable[[int], LaunchDevice]] = {"cuda": lambda index: _Nvidia(index, driver.driver())}
_gpus: dict[tuple[str, int], LaunchDevice] = {}
_functions: dict[tuple[str, int, Kernel], Function | backends.Refused] = {}
_lock = threading.RLock()


def gpu(device: torch.device) -> LaunchDevice:
    """Return the GPU of a device."""
    key = (device.type, device.index or 0)
    found = _gpus.get(key)
    if found is None:
        with _lock:
            found = _gpus.get(key) or OPENERS[device.type](key[1])
            _gpus[key] = found
    return found


def serves(op: str, capability: int) -> bool:
    """Say whether this machine's first GPU has one compute capability and runs an operator's CUDA C++ kernels."""
    device = torch.device("cuda")
    if backends.unavailable_reason(op, "cpp", device) is not None or not torch.cuda.is_available():
        return False
    return gpu(device).capability == capability


def function(kernel: Kernel, device: torch.device, types: tuple[type[Record], ...] = ()) -> Function:
    """Return a kernel on a device, compiled and loaded once.

    Raises:
        backends.Refused: it cannot be compiled or loaded here.
    """
    key = (device.type, device.index or 0, kernel)
    found = _functions.get(key)
    if found is None:
        with _lock:  # one thread compiles, the others wait for it
            found = _functions.get(key) or _loaded(kernel, device, types)
            _functions[key] = found
    if isinstance(found, backends.Refused):
        raise backends.Refused(*found.args)
    return found


def _loaded(kernel: Kernel, device: torch.device, types: tuple[type[Record], ...]) -> Function | backends.Refused:
    """Return a kernel, or why it cannot be had: a later call does not try again."""
    try:
        return gpu(device).function(kernel, types)
    except backends.Refused as reason:
        return reason


def forget() -> None:
    """Drop what is loaded, and the devices. For tests."""
    with _lock:
        _functions.clear()
        _gpus.clear()


def run(kernel: Kernel, shape: Shape, parameters: Sequence[Parameter], device: torch.device) -> None:
    """Launch a kernel on a device's current stream; with no blocks, do nothing.

    Raises:
        ValueError: the parameters are not those of the kernel, or there are more blocks than a grid can have.
        TypeError: a parameter has no type of the device code.
        backends.Refused: the kernel cannot be compiled or loaded here. A planner whose kernels write a caller's
            tensors calls ``function`` for all of them first.
        driver.CudaError: the driver refuses the launch.
    """
    if not 0 <= shape.blocks <= _MAX_BLOCKS or shape.blocks % shape.cluster:
        raise ValueError(f"{kernel.name}: a grid has at most {_MAX_BLOCKS} blocks, in whole clusters, not {shape}")
    if shape.blocks == 0:
        return
    structs = records.packed(parameters)
    found = function(kernel, device, records.records(parameters))
    sizes = tuple(len(each.content) for each in structs)
    if found.sizes is not None and sizes != found.sizes:
        raise ValueError(f"{kernel.name} takes parameters of {found.sizes} bytes, its planner gives {sizes}")
    recorder = recording.recorder()
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    gpu(device).launch(found, shape, [each.content for each in structs], stream)
    if recorder is not None:
        recorder.launched(lambda: _describe(found, shape, structs))


def _describe(function: Function, shape: Shape, structs: Sequence[launches.Struct]) -> launches.Launch:
    """Return a launch as plans repeat it."""
    return launches.Launch(
        function=function.handle,
        grid=(shape.blocks // shape.cluster, 1, 1),
        threads=shape.threads,
        shared_bytes=shape.shared_bytes,
        ctas=shape.cluster,
        cooperative=shape.cooperative,
        serialized=False,
        parameters=structs,
        owner=function,
    )


def is_gpu(device: torch.device) -> bool:
    """Return whether kernels of the device code take tensors on a device."""
    return device.type == "cuda"
