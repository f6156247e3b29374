"""Drivers that stand in for CUDA's, so that plans of launches run without a GPU.

``interpreted`` runs each launch under Triton's interpreter, from the addresses and numbers that a plan passes: what a
plan computes is then compared with what Python computes, bit for bit. ``idle`` does nothing: what is left of a call is
the host's work.
"""

import ctypes
import dataclasses
import struct
import subprocess
import traceback
from contextlib import contextmanager

import pytest
import torch
import triton

from crate_kernels._core import backends, launches
from crate_kernels._native.compilers import find_cxx
from crate_kernels._triton import launch
from tests.tools.plans import capture, standin

LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p
)
PARAMETER = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t)
)
FAILED, NO_PARAMETER = 700, 1  # CUDA's errors: an illegal address, an invalid value


@contextmanager
def driving(run, sizes=None):
    """Launch by ``run(config, function, parameters, extra)``; ``sizes``: function -> bytes of each parameter."""

    @LAUNCH
    def launched(config, function, parameters, extra):
        try:
            return run(config, function, parameters) or 0
        except Exception:
            traceback.print_exc()
            return FAILED

    @PARAMETER
    def parameter(function, index, offset, size):
        if index >= len(sizes[function]):
            return NO_PARAMETER
        offset[0], size[0] = 0, sizes[function][index]
        return 0

    standin.drive(launched, None, None if sizes is None else parameter)
    try:
        yield
    finally:
        standin.rest()


class Machine:
    """A driver of several devices, which notes what it is asked.

    Attributes:
        asked: (name, argument) of every call; of a launch, the stream.
        streams: the current stream of each device.
        contexts: devices whose context is current, the last first; empty in a fresh thread.
        failing: names of calls that fail.
    """

    def __init__(self):
        self.asked, self.streams, self.contexts, self.failing = [], {0: 0x10, 1: 0x11}, [], set()

    @contextmanager
    def driving(self):
        """Let plans launch here."""
        integer, pointer = ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p)

        def c(*arguments):
            return ctypes.CFUNCTYPE(ctypes.c_int, *arguments)

        functions = (  # kept alive as long as they may be called
            LAUNCH(lambda config, *_: self._ask("launch", ctypes.c_void_p.from_address(config + 32).value)),
            c(integer, pointer)(lambda device, out: self._ask("stream", device, out, self.streams[device])),
            None,
            c(pointer)(lambda out: self._ask("context", None, out, self.contexts[-1] if self.contexts else None)),
            c(ctypes.c_void_p)(lambda context: self._ask("set", context) or self.contexts.append(context) or 0),
            c(pointer, ctypes.c_int)(lambda out, device: self._ask("retain", device, out, 0x100 + device)),
            c(integer, pointer)(lambda device, out: self._ask("enter", device, out, 0x200 + device)),
            c(ctypes.c_void_p)(lambda guard: self._ask("leave", guard - 0x200)),
        )
        standin.drive(*functions)
        try:
            yield self
        finally:
            standin.rest()

    def _ask(self, name, argument, out=None, value=None):
        self.asked.append((name, argument))
        if name in self.failing:
            return FAILED
        if out is not None:
            out[0] = value
        return 0


def _extent(t):
    """Return the bytes from a tensor's first element to its last."""
    if t.numel() == 0:
        return 0
    return (sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True)) + 1) * t.element_size()


class _Packed:
    """The arguments of one interpreted launch: parameters of a driver, and how to get them back."""

    def __init__(self, arguments):
        self.parameters, self.extents = [], {}
        self.arguments = {
            name: ("constant", value) if name.isupper() else self._pack(value) for name, value in arguments.items()
        }

    def _pack(self, value):
        if isinstance(value, torch.Tensor):
            place, extent = len(self.parameters), _extent(value)
            self.parameters.append(value)
            self.extents[place] = extent
            return "tensor", (place, value.dtype, extent)
        if isinstance(value, tuple):
            return "record", (type(value), [self._pack(each) for each in value])
        if type(value) in (int, float):
            self.parameters.append(struct.pack("<q" if type(value) is int else "<d", value))
            return type(value).__name__, len(self.parameters) - 1
        return "constant", value

    def unpack(self, content, pointers):
        """Return an argument as it was packed, from what a plan passes."""
        kind, detail = content
        if kind == "constant":
            return detail
        if kind == "record":
            return detail[0](*(self.unpack(each, pointers) for each in detail[1]))
        if kind == "tensor":
            place, dtype, count = detail
            (address,) = struct.unpack("<Q", ctypes.string_at(pointers[place], 8))
            if count == 0:
                return torch.empty(0, dtype=dtype)
            memory = (ctypes.c_byte * count).from_address(address)
            return torch.frombuffer(memory, dtype=torch.uint8).view(dtype)
        (number,) = struct.unpack("<q" if kind == "int" else "<d", ctypes.string_at(pointers[detail], 8))
        return number


@contextmanager
def interpreted():
    """Let Triton's interpreter run what plans launch; for a process in which Triton interprets."""
    launched = [None]  # a function is its place here

    def describe(kernel, programs, compiled, arguments):
        packed = _Packed(arguments)
        launched.append((kernel, programs, packed))
        return launches.Launch(len(launched) - 1, (programs, 1, 1), 1, 0, 1, False, False, packed.parameters, None)

    def run(config, function, pointers):
        kernel, programs, packed = launched[function]

        def make(pointers):
            kernel[(programs,)](**{name: packed.unpack(each, pointers) for name, each in packed.arguments.items()})

        if (graph := capture.current()) is None:
            make(pointers)
        else:
            graph.note(make, len(packed.parameters), pointers, packed.extents)

    with pytest.MonkeyPatch.context() as patch, driving(run):
        patch.setattr(launch, "describe", describe)
        yield


_IDLE = 'extern "C" int idle(const void*, void*, void**, void**) { return 0; }\n'


class _Unloaded:
    """A compiled kernel that no driver has loaded: its function is a number."""

    def __init__(self, compiled, number):
        self.src, self.metadata, self.function = compiled.src, compiled.metadata, number

    def _init_handles(self):
        pass


@contextmanager
def idle(folder, target="sm_90"):
    """Compile launches of CPU tensors for a GPU that is not there, and make none of them.

    ``folder`` is for a driver that does nothing. ``None`` picks Triton's kernels meanwhile.
    """
    from tests.tools.aot import harness  # compiles: not for a process in which Triton interprets

    source, path = folder / "idle.cpp", folder / "idle.so"
    source.write_text(_IDLE)
    compiler, options, _ = find_cxx()
    subprocess.run([*compiler, "-shared", "-fPIC", "-O2", *options, str(source), "-o", str(path)], check=True)
    compiled = {}

    def make(kernel, programs, arguments):
        key = launch._key(kernel, arguments)
        if key not in compiled:
            names = {name: value for name, value in arguments.items() if name in kernel.arg_names}
            options = {name: value for name, value in arguments.items() if name not in kernel.arg_names}
            one = harness.Launch(kernel, names, options)
            gpu = harness.TARGETS[target]
            built = triton.compile(harness.source_of(one, gpu), target=gpu, options=options)
            compiled[key] = _Unloaded(built, len(compiled) + 1)
        return compiled[key]

    library = ctypes.CDLL(str(path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "_launch", make)
        patch.setattr(launch, "arch", lambda device: target)
        patch.setattr(launch, "multiprocessors", lambda device: 132)
        patch.setattr(launch, "gpu_name", lambda device: "")
        both = dataclasses.replace(backends.for_device("triton"), devices=("cuda", "cpu"), missing=None)
        patch.setitem(backends._BACKENDS, "triton", both)
        patch.setitem(backends._PREFERENCE, "cpu", ("triton",))
        standin.drive(library.idle)
        try:
            yield
        finally:
            standin.rest()
