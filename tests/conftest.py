"""Profiles of the drawn tests, the number of threads, and the fixtures of the C++ extension."""

import gc
import os
import signal
import zlib

import pytest
import torch

from crate_kernels._core import backends
from crate_kernels._native import extension
from tests.ops.common import LEVELS

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # a GPU machine need not have it: drawn tests are skipped there
    settings = None

pytest_plugins = ["tests.tools.emulator.fixtures"]  # declared here: all tests share one library

# Tensors of tests are small. Several threads would spin while they wait for each other: on busy cores the same tests
# take sixty times as long. A test that needs more threads uses the fixture. The variable is for processes that tests
# start.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")

if settings is not None:
    # No deadline: the first call of a kernel may compile it. Function-scoped fixtures are allowed: the autouse ones
    # patch allocators and seed the generator, and once for all examples is enough.
    _COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]}

    # A drawn call takes seconds in Triton's interpreter, microseconds in a kernel.
    settings.register_profile("suite", max_examples=4 if backends._INTERPRETED else 40, derandomize=True, **_COMMON)
    settings.load_profile("suite")


def pytest_addoption(parser):
    parser.addoption("--portion", metavar="P/Q", help="the P-th of Q portions of the tests, from 0 on")


def pytest_collection_modifyitems(config, items):
    """Keep the tests of a portion, which is drawn by their names."""
    if config.getoption("--portion"):
        which, parts = map(int, config.getoption("--portion").split("/"))
        if not 0 <= which < parts:
            raise pytest.UsageError(f"--portion must be P/Q with P from 0 to Q - 1, got {which}/{parts}")
        kept = [item for item in items if zlib.crc32(item.nodeid.encode()) % parts == which]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
        items[:] = kept


def pytest_collection_finish():
    """Leave tests and modules, which stay to the end, out of every garbage collection: libraries ask for many."""
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def interrupts():
    """Enable Ctrl-C for tests of interruption: a shell's background jobs start with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def fixed_seed():
    """Draw the same numbers whichever tests ran before in this process."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def as_many_threads():
    """Fail a test that leaves other threads behind: those of later tests would wait for each other."""
    before = torch.get_num_threads()
    yield
    left = torch.get_num_threads()
    torch.set_num_threads(before)
    assert left == before


@pytest.fixture
def level():
    """Return a function that forces an instruction-set level; restore the machine's own afterwards."""
    best = extension.cpu_capability()

    def force(name):
        if LEVELS.index(name) > LEVELS.index(best):
            pytest.skip(f"needs a processor with {name}; this one has {best}")
        extension.set_cpu_capability(name)

    yield force
    extension.set_cpu_capability()


@pytest.fixture
def threads():
    """Return torch.set_num_threads; restore the number of threads afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
