"""Backends of kernels that the CUDA backend chooses only for some GPUs and dtypes."""

from contextlib import contextmanager

from crate_kernels._core import backends


@contextmanager
def registered(name="emulated-plain"):
    """Register the plain kernels as a backend of mssa's op, for every dtype and head_dim."""
    backends.register(
        backends.Backend(name, "tests.tools.emulator.plain.{op}", ("cpu",), backends._BACKENDS["cpp"].dtypes)
    )
    try:
        yield name
    finally:
        backends.unregister(name)
