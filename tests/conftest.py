"""How hard the drawn tests try, on how many threads, and the fixtures of the C++ extension."""

import os
import signal

import pytest
import torch

from crate_kernels._core import backends
from crate_kernels._native import extension
from tests.ops.common import LEVELS

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # a GPU machine need not have it: drawn tests are skipped there
    settings = None

pytest_plugins = ["tests.tools.emulator.fixtures"]  # here, so that all tests share one library

# Tensors of tests are small. Threads that share them wait for each other, spinning, and where cores are busy the same
# tests take sixty times as long. What needs more threads asks for them by the fixture; the variable is for processes
# that tests start.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")

if settings is not None:
    # A test has no deadline: the first call of a kernel may compile it. The autouse fixtures patch allocators and
    # seed the generator, which one patch and one seed for all examples serve as well.
    _COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]}

    # A drawn call takes Triton's interpreter seconds, where a kernel takes microseconds.
    settings.register_profile("suite", max_examples=12 if backends._INTERPRETED else 40, derandomize=True, **_COMMON)
    settings.register_profile("fuzz", max_examples=600, print_blob=True, **_COMMON)
    settings.load_profile("suite")


@pytest.fixture(autouse=True, scope="session")
def interrupts():
    """Let Ctrl-C interrupt, as tests of interruption need: a shell starts its background jobs deaf to it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def level():
    """Return a function that forces an instruction-set level; the machine's own comes back afterwards."""
    best = extension.cpu_capability()

    def force(name):
        if LEVELS.index(name) > LEVELS.index(best):
            pytest.skip(f"needs a processor with {name}; this one has {best}")
        extension.set_cpu_capability(name)

    yield force
    extension.set_cpu_capability(best)


@pytest.fixture
def threads():
    """Return torch.set_num_threads; the number of threads comes back afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
