"""The CUDA driver, as much of it as loading and launching a kernel takes, by ctypes."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from functools import cache
from typing import Any, NamedTuple

# As cuda.h numbers them.
_MULTIPROCESSORS, _SHARED_LIMIT, _MAJOR, _MINOR = 16, 97, 75, 76  # of a device
_DYNAMIC_SHARED, _LARGE_CLUSTERS = 8, 14  # of a function, to be set
_COOPERATIVE, _CLUSTER_SIZE, _CLUSTER_SCHEDULE, _SPREAD = 2, 4, 5, 1  # attributes of a launch
# Of errors: an image or PTX that is not valid here, of another GPU, without a compiler for it, or too new.
_UNLOADABLE = (200, 209, 218, 220, 221, 222, 223)
_ALLOWED, _PORTABLE = 48 * 1024, 8  # bytes of shared memory and blocks of a cluster that need no asking


class _Attribute(ctypes.Structure):
    _fields_ = (("id", c_int), ("pad", c_int), ("value", c_uint * 16))


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("stream", c_void_p),
        ("attributes", POINTER(_Attribute)),
        ("count", c_uint),
    )


class Shape(NamedTuple):
    """How a kernel is launched: blocks, threads and dynamic shared memory of a block, blocks of a cluster.

    ``cooperative``: all blocks are on the GPU at once, or the launch is refused.
    """

    blocks: int
    threads: int
    shared_bytes: int = 0
    cluster: int = 1
    cooperative: bool = False


class CudaError(RuntimeError):
    """The driver returned an error."""


class Unloadable(CudaError):
    """The driver does not take a binary: it is for other GPUs, or for a newer driver."""


class Function:
    """A kernel that is loaded on a device.

    Attributes:
        handle: what the driver calls it.
        sizes: bytes of each parameter; None where the driver does not say.
        owner: keeps the handle's memory alive.
    """

    def __init__(self, handle: int, sizes: tuple[int, ...] | None, owner: Any = None) -> None:
        self.handle, self.sizes, self.owner = handle, sizes, owner
        # What the driver was asked to allow: shared memory of a block, and blocks of a cluster.
        self.allowed: tuple[int, int] = (_ALLOWED, _PORTABLE)


def config_of(shape: Shape, stream: int = 0) -> _Config:
    """Return a launch as the driver, and its stand-ins, take it."""
    config = _Config((shape.blocks, 1, 1), (shape.threads, 1, 1), shape.shared_bytes, stream or None, None, 0)
    chosen: list[tuple[int, tuple[int, ...]]] = []
    if shape.cooperative:
        chosen.append((_COOPERATIVE, (1,)))
    if shape.cluster > 1:
        chosen += [(_CLUSTER_SCHEDULE, (_SPREAD,)), (_CLUSTER_SIZE, (shape.cluster, 1, 1))]
    if chosen:
        attributes = (_Attribute * len(chosen))()
        for attribute, (number, value) in zip(attributes, chosen, strict=True):
            attribute.id, attribute.value[: len(value)] = number, value
        config.attributes, config.count = attributes, len(chosen)
    return config


def addresses_of(parameters: Sequence[bytes]) -> tuple[Any, Any]:
    """Return the addresses of copies of parameters, and what keeps the copies alive."""
    copies = [ctypes.create_string_buffer(each, max(len(each), 1)) for each in parameters]
    return (c_void_p * max(len(copies), 1))(*(ctypes.addressof(copy) for copy in copies)), copies


class Driver:
    """The driver's functions; each raises CudaError where the driver returns an error."""

    def __init__(self, library: Any) -> None:
        self.library = library

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver by its name."""
        status = getattr(self.library, name)(*arguments)
        if status:
            text = c_char_p()
            self.library.cuGetErrorString(status, byref(text))
            kind = Unloadable if status in _UNLOADABLE else CudaError
            raise kind(f"CUDA error {status} in {name}: {(text.value or b'unknown').decode()}")


@cache
def driver() -> Driver:
    """Return the driver of this machine, initialised.

    Raises:
        OSError: there is none.
        CudaError: it sees no GPU.
    """
    found = Driver(ctypes.CDLL("libcuda.so.1"))
    found.call("cuInit", 0)
    return found


class Gpu:
    """One GPU, by its number in this process. What it does runs in the GPU's primary context, which PyTorch uses."""

    def __init__(self, index: int, driver: Driver) -> None:
        self.index, self._driver = index, driver
        driver.call("cuDeviceGet", byref(device := c_int()), index)
        driver.call("cuDevicePrimaryCtxRetain", byref(context := c_void_p()), device)
        self._context = context
        self.multiprocessors = self._attribute(device, _MULTIPROCESSORS)
        self.shared_limit = self._attribute(device, _SHARED_LIMIT)
        self.capability = 10 * self._attribute(device, _MAJOR) + self._attribute(device, _MINOR)

    def _attribute(self, device: c_int, attribute: int) -> int:
        self._driver.call("cuDeviceGetAttribute", byref(value := c_int()), attribute, device)
        return value.value

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        """Make the context current: a thread of autograd may have none yet, or another GPU's."""
        self._driver.call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._driver.call("cuCtxPopCurrent_v2", byref(c_void_p()))

    def load(self, binary: bytes, name: str) -> Function:
        """Load a binary, and return the kernel in it that has a name."""
        with self._current():
            self._driver.call("cuModuleLoadData", byref(module := c_void_p()), c_char_p(binary))
            self._driver.call("cuModuleGetFunction", byref(handle := c_void_p()), module, name.encode())
            assert handle.value is not None
            return Function(handle.value, self._sizes(handle))

    def _sizes(self, handle: c_void_p) -> tuple[int, ...] | None:
        """Return the bytes of a kernel's parameters; None by a driver before 12.4."""
        try:
            ask = self._driver.library.cuFuncGetParamInfo
        except AttributeError:
            return None
        offset, size, sizes = c_size_t(), c_size_t(), []
        while ask(handle, c_size_t(len(sizes)), byref(offset), byref(size)) == 0:
            sizes.append(size.value)
        return tuple(sizes)

    def _allow(self, function: Function, shape: Shape) -> None:
        """Let launches of a function have this much shared memory, and clusters of this size."""
        bytes_, cluster = function.allowed
        handle = c_void_p(function.handle)
        if shape.shared_bytes > bytes_:
            self._driver.call("cuFuncSetAttribute", handle, _DYNAMIC_SHARED, shape.shared_bytes)
        if shape.cluster > cluster:
            self._driver.call("cuFuncSetAttribute", handle, _LARGE_CLUSTERS, 1)
        function.allowed = (max(bytes_, shape.shared_bytes), max(cluster, shape.cluster))

    def launch(self, function: Function, shape: Shape, parameters: Sequence[bytes], stream: int) -> None:
        """Launch a kernel; ``parameters`` are the bytes of each."""
        addresses, _copies = addresses_of(parameters)
        with self._current():
            self._allow(function, shape)
            config = config_of(shape, stream)
            self._driver.call("cuLaunchKernelEx", byref(config), c_void_p(function.handle), addresses, None)

    def active_clusters(self, function: Function, shape: Shape) -> int:
        """Return how many clusters of a launch the GPU holds at once; 0 if it holds none."""
        if shape.shared_bytes > self.shared_limit:
            return 0
        with self._current():
            try:
                self._allow(function, shape)
                config, count = config_of(shape), c_int()
                self._driver.call(
                    "cuOccupancyMaxActiveClusters", byref(count), c_void_p(function.handle), byref(config)
                )
            except CudaError:  # a cluster that is too large is an answer
                return 0
            return count.value
