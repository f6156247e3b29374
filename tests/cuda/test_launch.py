"""Launches by name: compiled and loaded once, checked against the kernel's parameters, repeated by plans."""

import contextlib
import ctypes
import threading
from types import SimpleNamespace

import pytest
import torch

from crate_kernels._core import backends, plan
from crate_kernels._cuda import cubins, launch, records
from crate_kernels._cuda.launch import Kernel, Shape
from crate_kernels._native import driver, extension, libraries, nvrtc

CPU = torch.device("cpu")
SYMMETRIZE = Kernel("ista/cuda/update.cuh", "ista_symmetrize_kernel<float>")
SHAPE = Shape(1, 256, 32 * 33 * 4)


class Gpu:
    """A GPU that notes what it compiles and launches."""

    capability, multiprocessors, shared_limit = 90, 4, 1 << 17

    def __init__(self, sizes=(8, 8, 8)):
        self.sizes, self.compiled, self.launched = sizes, [], []

    def function(self, kernel, types):
        self.compiled.append((kernel, types))
        return driver.Function(len(self.compiled), self.sizes)

    def launch(self, function, shape, parameters, stream):
        self.launched.append((function.handle, shape, [len(p) for p in parameters], stream))


@pytest.fixture
def gpu(monkeypatch):
    """Let CPU tensors be on a GPU that launches nothing."""
    found = Gpu()
    monkeypatch.setattr(launch, "OPENERS", {"cpu": lambda index: found})
    launch.forget()
    yield found
    monkeypatch.undo()
    launch.forget()


def symmetrize(a, both, dim=None):
    launch.run(SYMMETRIZE, SHAPE, [a, both, ctypes.c_int64(a.shape[0] if dim is None else dim)], a.device)


def test_a_kernel_is_compiled_once(gpu):
    a = torch.zeros(4, 4)
    for _ in range(3):
        symmetrize(a, a)
    assert gpu.compiled == [(SYMMETRIZE, ())]
    assert gpu.launched == [(1, SHAPE, [8, 8, 8], 0)] * 3


def test_of_several_threads_one_compiles(gpu):
    a, barrier = torch.zeros(4, 4), threading.Barrier(4)

    def call():
        barrier.wait()
        symmetrize(a, a)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(gpu.compiled) == 1
    assert len(gpu.launched) == 4


def test_no_blocks_are_no_launch(gpu):
    launch.run(SYMMETRIZE, Shape(0, 256), [], CPU)
    assert gpu.compiled == []


SHAPES = {"negative": Shape(-1, 32), "many": Shape(2**31, 32), "part-of-a-cluster": Shape(3, 32, 0, 2)}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_grid_that_is_none_is_refused(shape, gpu):
    with pytest.raises(ValueError, match=r"^ista_symmetrize_kernel<float>: a grid has at most 2147483647 blocks, in"):
        launch.run(SYMMETRIZE, shape, [], CPU)
    assert gpu.launched == []


WRONG = {"fewer": [None, None], "more": [None] * 4, "narrower": [None, None, ctypes.c_int(1)]}


@pytest.mark.parametrize("parameters", WRONG.values(), ids=WRONG)
def test_parameters_that_the_kernel_does_not_take_are_refused(parameters, gpu):
    with pytest.raises(ValueError, match=r"takes parameters of \(8, 8, 8\) bytes, its planner gives"):
        launch.run(SYMMETRIZE, SHAPE, parameters, CPU)
    assert gpu.launched == []


class Both(records.Record):
    _fields_ = (("a", records.POINTER), ("b", records.POINTER))


def test_records_agree_with_the_device_code(gpu):
    gpu.sizes = None  # as by a driver that does not say
    launch.run(SYMMETRIZE, SHAPE, [Both(), None], CPU)
    assert gpu.compiled == [(SYMMETRIZE, (Both,))]


CANNOT = {
    "no-sources": libraries.BuildError("the CUDA sources are not installed"),
    "no-nvrtc": nvrtc.Unavailable("NVRTC is not found"),
    "refused": nvrtc.NotCompiled("NVRTC 12.6 compiles from sm_75 on"),
}


@pytest.mark.parametrize("error", CANNOT.values(), ids=CANNOT)
def test_what_cannot_be_compiled_is_refused_as_a_shape_is(error, monkeypatch):
    def refuse(*args):
        raise error

    monkeypatch.setattr(cubins, "compiled", refuse)
    one = object.__new__(launch._Nvidia)
    one.capability = 70
    with pytest.raises(backends.Refused, match=f"^cannot compile ista_symmetrize_kernel<float>: {error}"):
        one.function(SYMMETRIZE, ())


class Loading:
    """Stands in for the driver's library: loading a module ends with a status."""

    def __init__(self, status):
        self.status = status

    def cuModuleLoadData(self, module, binary):
        return self.status

    def cuGetErrorString(self, status, text):
        return 0


@pytest.mark.parametrize(
    ("status", "error"),
    [(222, backends.Refused), (209, backends.Refused), (2, driver.CudaError)],
    ids=["newer-than-the-driver", "of-another-gpu", "no-memory"],
)
def test_what_the_driver_does_not_take_is_refused_but_not_for_ever_without_memory(status, error, monkeypatch):
    monkeypatch.setattr(cubins, "compiled", lambda *args: (b"binary", "name"))
    one = object.__new__(launch._Nvidia)
    one._driver, one.capability = object.__new__(driver.Driver), 90
    one._driver.library = Loading(status)
    monkeypatch.setattr(launch._Nvidia, "_current", lambda self: contextlib.nullcontext())
    with pytest.raises(error, match=f"CUDA error {status} in cuModuleLoadData"):
        one.function(SYMMETRIZE, ())


def test_what_cannot_be_compiled_is_not_tried_again(gpu, monkeypatch):
    tried = []

    def refuse(kernel, types):
        tried.append(kernel)
        raise backends.Refused("cannot compile it")

    monkeypatch.setattr(gpu, "function", refuse)
    for _ in range(3):
        with pytest.raises(backends.Refused, match="cannot compile it"):
            launch.function(SYMMETRIZE, CPU)
    assert tried == [SYMMETRIZE]


def test_a_device_is_opened_once_and_by_its_number(monkeypatch):
    opened = []
    monkeypatch.setattr(launch, "_gpus", {})
    monkeypatch.setattr(launch, "OPENERS", {"cuda": lambda index: opened.append(index) or SimpleNamespace(index=index)})
    for index in (0, 1, 0, 1):
        assert launch.gpu(torch.device("cuda", index)).index == index
    assert opened == [0, 1]


def test_the_emulator_refuses_and_stops_what_a_gpu_would(library, device):
    a, both = torch.randn(40, 40), torch.empty(40, 40)
    with pytest.raises(driver.CudaError, match="CUDA error 9"):
        launch.run(SYMMETRIZE, Shape(4, 40, 32 * 33 * 4), [a, both, ctypes.c_int64(40)], CPU)
    with pytest.raises(driver.CudaError, match="CUDA error 1"):
        launch.run(SYMMETRIZE, Shape(4, 256, 200 * 1024), [a, both, ctypes.c_int64(40)], CPU)
    with pytest.raises(RuntimeError, match="left its shared memory"):
        launch.run(SYMMETRIZE, Shape(4, 256, 0), [a, both, ctypes.c_int64(40)], CPU)
    launch.run(SYMMETRIZE, Shape(4, 256, 100 * 1024), [a, both, ctypes.c_int64(40)], CPU)
    assert torch.equal(both, a + a.t())
    found = launch.function(SYMMETRIZE, CPU)
    assert found.sizes == (8, 8, 8)
    assert launch.gpu(CPU).active_clusters(found, Shape(4, 256, 1024, 2)) == 0
    device(capability=90, multiprocessors=12)
    assert launch.gpu(CPU).active_clusters(found, Shape(4, 256, 1024, 2)) == 6
    assert launch.gpu(CPU).capability == 90


@pytest.mark.skipif(extension.PATH is None, reason="needs python -m crate_kernels build")
def test_a_plan_gives_a_kernel_fresh_addresses(library):
    entry = plan.Entry(1, 1)

    def call(a):
        found = entry.run(a, entry.number)
        if found is not None:
            return found

        def body():
            both = torch.empty_like(a)
            symmetrize(a, both)
            return both

        return entry.record([a], body)

    for number in range(4):
        a = torch.randn(31, 31)
        before, _, _ = plan.counts()
        assert torch.equal(call(a), a + a.t())
        assert plan.counts()[0] - before == (number > 1)
