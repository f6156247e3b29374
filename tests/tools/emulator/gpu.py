"""A GPU for kernels that are launched by name, on CPU tensors: g++ compiles them, the emulator runs them.

It takes the place of CUDA's driver for plans too, so that what a plan repeats is a launch of the emulator.
"""

import ctypes
import hashlib
import os
import shlex
import tempfile
from pathlib import Path

from torch.utils.cpp_extension import get_cxx_compiler

from crate_kernels._cuda import launch, sources
from crate_kernels._native import driver, libraries, ninja_build
from tests.tools import compiling
from tests.tools.plans import standin

KERNEL_FAILED = 999


def use(path):
    """Let CPU tensors be those of a GPU that the library at ``path`` emulates."""
    emulated = Emulated(path)
    launch.OPENERS["cpu"] = lambda index: emulated
    launch.forget()
    standin.rest_on(emulated.library.emulated_launch, None, emulated.library.emulated_parameter)


class Emulated:
    """What ``crate_kernels._cuda.launch.LaunchDevice`` says, by the emulator, for the device that a test sets."""

    def __init__(self, path):
        self.path, self.library = path, ctypes.CDLL(str(path))
        self.library.emulated_failure.restype = ctypes.c_char_p

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
    known = (KERNEL_FLAGS, unit, sorted(sources.headers(kernel.header).items()), str(emulator))
    target = emulator.parent / hashlib.sha256(repr(known).encode()).hexdigest()[:16] / "kernel.so"
    if target.exists():
        return target
    with ninja_build.locked(target.parent), tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        if not target.exists():
            source, linked = Path(scratch) / "unit.cpp", Path(scratch) / "unit.so"
            source.write_text(unit)
            precompiled = ["-include", str(emulator.parent / "entry.h")]  # g++ takes entry.h.gch, which is beside it
            paths = [*searched(), "-I", str(libraries.source_folder())]
            command = [*shlex.split(get_cxx_compiler()), *KERNEL_FLAGS, *precompiled, *paths, "-Wno-invalid-offsetof"]
            compiling.run([*command, "-Winvalid-pch", "-shared", source, emulator, "-o", linked])
            os.replace(linked, target)
    return target
