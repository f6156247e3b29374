"""The kernel modules of backend "cpp" a second time, on another library: one that is emulated."""

from importlib.util import find_spec, module_from_spec

from crate_kernels._core import backends
from crate_kernels.ops.mssa import rectangular


def register(name, library, gpu=False):
    """Register a backend ``name`` for CPU tensors. Its modules take their ops from ``library(device)``."""
    floats = backends._BACKENDS["cpp"].dtypes
    backends.register(backends.Backend(name, "crate_kernels.ops.{op}.native", ("cpu",), floats, planned=gpu))
    backends.add_part(rectangular.PART)
    backends._kernels |= {(op, name): native(op, library, gpu) for op in (*backends.OPS, rectangular.PART)}


def native(op, library, gpu=False):
    """Import the native module of an operator a second time, on another library; ``gpu``: every device is one."""
    spec = find_spec(f"crate_kernels.ops.{op}.native")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    module.library = library
    if gpu and hasattr(module, "is_gpu"):
        module.is_gpu = lambda device: True
    return module
