"""Fill uninitialised memory with NaN in every operator test, so that an unwritten output is seen."""

import os
from contextlib import nullcontext

import pytest
import torch

from crate_kernels._core import backends, plan
from tests.gpu import fixtures as gpu
from tests.tools import fresh


def pytest_ignore_collect(collection_path):
    """Collect no GPU test where neither a GPU nor the interpreter can run a kernel."""
    idle = not gpu.DRY and not torch.cuda.is_available()
    return True if idle and collection_path.name == "test_gpu.py" else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Leave every other combination of the parameters of a test with the mark ``turns`` to make test-all."""
    for item in items:
        sets = [mark.args for mark in item.iter_markers("parametrize")]
        if item.get_closest_marker("turns") and left_out(item.callspec.params, sets):
            item.add_marker("exhaustive")


def left_out(params, sets):
    """Return whether a combination is of those left out: of three sets, any two values meet in one that is not."""
    return sum(place(params, *each) for each in sets) % 2 == 1


def place(params, names, values):
    """Return which of the values of a parametrization a test has."""
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
    sets = [v.values if isinstance(v, pytest.ParameterSet) else v if len(names) > 1 else (v,) for v in values]
    return next(n for n, each in enumerate(sets) if all(params[k] is v for k, v in zip(names, each, strict=True)))


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """Fill the outputs and scratch space of composite and the kernels with NaN."""
    fresh.fill(monkeypatch)


@pytest.fixture(autouse=True)
def repeated_calls():
    """Compare every kind of call with its plan's repetition, with Triton's interpreter in the driver's place."""
    if not plan.available():
        yield None
        return
    from tests.tools.plans import drivers, replay

    with drivers.interpreted() if backends._INTERPRETED else nullcontext(), replay.checked() as seen:
        yield seen


@pytest.fixture
def unrepeated(repeated_calls):
    """Make no plan, for a test that counts what a call does."""
    with pytest.MonkeyPatch.context() as patch:  # undone before what it covers is, unlike one that others share
        patch.setattr(plan.Entry, "record", lambda self, tensors, body: body())
        yield


@pytest.fixture(scope="module")
def plain_backend():
    """Register plain PyTorch as a backend of mssa's op; mssa's composite does not go through the op."""
    backends.register(backends.Backend("plain", "tests.ops.{op}.plain"))
    yield
    backends.unregister("plain")


@pytest.fixture(autouse=os.environ.get("TRITON_INTERPRET") == "1", scope="session")
def arithmetic_of_gpus():
    """Let the interpreter compute what by itself it does wrong, or otherwise than a GPU."""
    from tests.tools import interpreter

    with interpreter.arithmetic_of_gpus():
        yield


@pytest.fixture(autouse=os.environ.get("TRITON_INTERPRET") == "1", scope="session")
def quick_interpreter():
    """Let the interpreter repeat no work: it takes a quarter of the time."""
    from tests.tools.interpreter import launches, repeats

    with launches.quick(), repeats.copied():
        yield
