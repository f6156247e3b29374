"""The kernel modules of backend "cpp" a second time: on another library for CPUs, or on a GPU that is emulated."""

from importlib.util import find_spec, module_from_spec

from crate_kernels._core import backends
from crate_kernels.ops.mssa import rectangular


def register(name, library=None):
    """Register a backend ``name`` for CPU tensors, whose modules take their ops from ``library``, or from a GPU."""
    floats = backends._BACKENDS["cpp"].dtypes
    backends.register(
        backends.Backend(name, "crate_kernels.ops.{op}.native", ("cpu",), floats, planned=library is None)
    )
    backends.add_part(rectangular.PART)
    backends._kernels |= {(op, name): native(op, library) for op in (*backends.OPS, rectangular.PART)}


def native(op, library=None):
    """Import the native module of an operator a second time, on another library; without one every device is a GPU."""
    spec = find_spec(f"crate_kernels.ops.{op}.native")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    module.library = lambda: library
    module.is_gpu = lambda device: library is None
    return module
