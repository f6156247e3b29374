"""Backends of kernels that the CUDA backend would choose for some GPUs and dtypes only."""

from contextlib import contextmanager

from crate_kernels import _backend


@contextmanager
def registered(name="emulated-plain"):
    """Put the plain kernels behind the op of mssa, for every dtype and head_dim."""
    _backend.register(_backend.Backend(name, "tests.cuda.plain.{op}", ("cpu",), _backend._BACKENDS["cpp"].dtypes))
    try:
        yield name
    finally:
        _backend.unregister(name)
