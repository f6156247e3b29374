"""A GPU for kernels that are launched by name, on CPU tensors: g++ compiles them, the emulator runs them.

It takes the place of CUDA's driver for plans too, so that what a plan repeats is a launch of the emulator.
"""

import ctypes
import hashlib
import os
import shlex
import tempfile
from pathlib import Path

import torch
from torch.utils.cpp_extension import get_cxx_compiler

from crate_kernels._core import plan
from crate_kernels._cuda import launch, sources
from crate_kernels._native import driver, libraries, ninja_build
from tests.tools import compiling
from tests.tools.plans import standin

DEFAULT = {
    "capability": 80,
    "multiprocessors": 4,
    "shared_limit": 163 * 1024,
    "descending": False,
    "early": False,
    "traced": False,
}
KERNEL_FAILED = 999
# Calls a function of the emulator before each access to memory; GCC's own library, which has the same, is not linked.
TRACED = "-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0", "-fno-threadsafe-statics"
traced = False  # whether kernels are compiled so


def use(path):
    """Let CPU tensors be those of a GPU that the library at ``path`` emulates."""
    emulated = Emulated(path)
    launch.OPENERS["cpu"] = lambda index: emulated
    launch.forget()
    standin.rest_on(emulated.library.emulated_launch, None, emulated.library.emulated_parameter)


def change_device(**properties):
    """Have another GPU emulated: ``DEFAULT`` but for the properties, which emulator.h describes."""
    global traced
    values = DEFAULT | properties
    torch.ops.crate_kernels_C.emulated_device(*values.values())
    if values["traced"] != traced:
        traced = values["traced"]
        launch._functions.clear()  # which were compiled otherwise
    plan.forget()  # what was chosen for another device


class Emulated:
    """What ``crate_kernels._cuda.launch.LaunchDevice`` says, by the emulator, for the device that a test sets."""

    def __init__(self, path):
        self.path, self.library = path, ctypes.CDLL(str(path))
        self.library.emulated_failure.restype = ctypes.c_char_p
        self.library.emulated_moved.restype = ctypes.c_int64

    capability, multiprocessors, shared_limit = (
        property(lambda self, which=which: self.library.emulated_fact(which)) for which in range(3)
    )

    def function(self, kernel, types):
        """Compile a kernel, once for all tests, and load it."""
        unit = ctypes.CDLL(str(build(kernel, types, self.path)))
        unit.emulated_entry.restype = ctypes.c_void_p
        handle, sizes = unit.emulated_entry(), []
        size = ctypes.c_size_t()
        while not self.library.emulated_parameter(
            ctypes.c_void_p(handle), ctypes.c_size_t(len(sizes)), ctypes.byref(ctypes.c_size_t()), ctypes.byref(size)
        ):
            sizes.append(size.value)
        return driver.Function(handle, tuple(sizes), unit)

    def _allow(self, function, shape):
        if shape.shared_bytes > driver._ALLOWED:
            return self.library.emulated_allow(ctypes.c_void_p(function.handle), shape.shared_bytes)
        return 0

    def launch(self, function, shape, parameters, stream):
        """Run a kernel, to its end."""
        addresses, _copies = driver.addresses_of(parameters)
        config, handle = driver.config_of(shape), ctypes.c_void_p(function.handle)
        status = self._allow(function, shape) or self.library.emulated_launch(
            ctypes.byref(config), handle, addresses, None
        )
        if status == KERNEL_FAILED:
            raise RuntimeError(self.library.emulated_failure().decode())
        if status:
            raise driver.CudaError(f"CUDA error {status}")

    def moved(self, tensor):
        """Return how often the last launch read and wrote a contiguous tensor, on average, where ``traced``."""
        place, size = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_int64(tensor.nbytes)
        return tuple(self.library.emulated_moved(place, size, written) / tensor.nbytes for written in (False, True))

    def active_clusters(self, function, shape):
        """Return how many clusters the device that a test set holds."""
        if self._allow(function, shape):
            return 0
        config = driver.config_of(shape)
        return self.library.emulated_clusters(ctypes.c_void_p(function.handle), ctypes.byref(config))


def build(kernel, types, emulator):
    """Return the library of a kernel, compiled if it is not there yet."""
    from tests.tools.emulator.emulated import KERNEL_FLAGS, searched

    unit = f"{sources.unit(kernel, types)}EMULATED_ENTRY({kernel.name})\n"
    flags = (*KERNEL_FLAGS, *(TRACED if traced else ()))
    known = (flags, unit, sorted(sources.headers(kernel.header).items()), str(emulator))
    target = emulator.parent / hashlib.sha256(repr(known).encode()).hexdigest()[:16] / "kernel.so"
    if target.exists():
        return target
    with ninja_build.locked(target.parent), tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        if not target.exists():
            source, compiled, linked = (Path(scratch) / f"unit.{name}" for name in ("cpp", "o", "so"))
            source.write_text(unit)
            # g++ takes entry.h.gch, which is beside it and was compiled without TRACED.
            entry = ["-include", str(emulator.parent / "entry.h"), *(() if traced else ("-Winvalid-pch",))]
            paths = [*searched(), "-I", str(libraries.source_folder()), "-Wno-invalid-offsetof"]
            compiler = shlex.split(get_cxx_compiler())
            compiling.run([*compiler, *flags, *entry, *paths, "-c", source, "-o", compiled])
            compiling.run([*compiler, "-shared", compiled, emulator, "-o", linked])
            os.replace(linked, target)
    return target
