"""Backends of kernels that the CUDA backend would choose for some GPUs and dtypes only."""

from contextlib import contextmanager

from crate_kernels._core import backends


@contextmanager
def registered(name="emulated-plain"):
    """Put the plain kernels behind the op of mssa, for every dtype and head_dim."""
    backends.register(
        backends.Backend(name, "tests.tools.emulator.plain.{op}", ("cpu",), backends._BACKENDS["cpp"].dtypes)
    )
    try:
        yield name
    finally:
        backends.unregister(name)
