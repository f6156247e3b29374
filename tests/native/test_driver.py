"""The CUDA driver by ctypes, with one that notes what it is asked: contexts, attributes, launches and errors."""

import ctypes

import pytest

from crate_kernels._native import driver
from crate_kernels._native.driver import CudaError, Shape

FACTS = {16: 132, 97: 227 * 1024, 75: 9, 76: 0}  # of the device: multiprocessors, shared memory, capability
SIZES = (8, 104)  # of the parameters of the kernel


class Cuda:
    """A driver of one GPU and one kernel; ``failing`` are the functions that return an error."""

    def __init__(self):
        self.calls, self.failing, self.config, self.parameters, self.context = [], set(), None, None, []

    def __getattr__(self, name):
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments):
            if name not in ("cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2", "cuDeviceGetAttribute"):
                self.calls.append((name, len(self.context)))
            if name in self.failing:
                return 700
            return getattr(self, f"_{name}", lambda *_: 0)(*arguments)

        return call

    def _cuGetErrorString(self, status, text):
        text._obj.value = b"an illegal address"
        return 0

    def _cuDeviceGetAttribute(self, value, attribute, device):
        value._obj.value = FACTS[attribute]
        return 0

    def _cuCtxPushCurrent_v2(self, context):
        self.context.append(context)
        return 0

    def _cuCtxPopCurrent_v2(self, context):
        self.context.pop()
        return 0

    def _cuModuleGetFunction(self, handle, module, name):
        handle._obj.value = 0x500
        self.name = name
        return 0

    def _cuFuncGetParamInfo(self, handle, index, offset, size):
        if index.value >= len(SIZES):
            return 1
        size._obj.value = SIZES[index.value]
        return 0

    def _cuLaunchKernelEx(self, config, function, parameters, extra):
        found = config._obj
        attributes = {found.attributes[n].id: list(found.attributes[n].value[:3]) for n in range(found.count)}
        self.config = (list(found.grid), list(found.block), found.shared_bytes, found.stream, attributes)
        self.parameters = [ctypes.string_at(parameters[n], size) for n, size in enumerate(SIZES)]
        self.function = function.value
        return 0

    def _cuOccupancyMaxActiveClusters(self, count, function, config):
        count._obj.value = 33
        return 0

    def names(self):
        return [name for name, _ in self.calls]


@pytest.fixture
def cuda():
    return Cuda()


@pytest.fixture
def gpu(cuda):
    found = driver.Gpu(0, driver.Driver(cuda))
    cuda.calls.clear()
    return found


def test_a_gpu_says_what_it_has(gpu):
    assert (gpu.capability, gpu.multiprocessors, gpu.shared_limit) == (90, 132, 227 * 1024)


def test_a_kernel_is_loaded_into_the_primary_context(gpu, cuda):
    function = gpu.load(b"\x7fELF\0", "_Z1f")
    assert (function.handle, function.sizes, cuda.name) == (0x500, SIZES, b"_Z1f")
    assert all(depth == 1 for _, depth in cuda.calls)
    assert cuda.context == []


def test_an_older_driver_does_not_say_what_a_kernel_takes(gpu, cuda, monkeypatch):
    class Older(Cuda):
        @property
        def cuFuncGetParamInfo(self):
            raise AttributeError("undefined symbol")

        def __getattr__(self, name):
            if name == "cuFuncGetParamInfo":
                raise AttributeError(name)
            return super().__getattr__(name)

    assert driver.Gpu(0, driver.Driver(Older())).load(b"", "_Z1f").sizes is None


LAUNCHES = {
    "plain": (Shape(7, 128), ([7, 1, 1], [128, 1, 1], 0, 0x77, {}), []),
    "little-shared": (Shape(7, 128, 48 * 1024), ([7, 1, 1], [128, 1, 1], 48 * 1024, 0x77, {}), []),
    "much-shared": (Shape(7, 128, 100_000), ([7, 1, 1], [128, 1, 1], 100_000, 0x77, {}), [(8, 100_000)]),
    "cluster": (Shape(8, 32, 0, 4), ([8, 1, 1], [32, 1, 1], 0, 0x77, {5: [1, 0, 0], 4: [4, 1, 1]}), []),
    "large-cluster": (
        Shape(16, 32, 0, 16),
        ([16, 1, 1], [32, 1, 1], 0, 0x77, {5: [1, 0, 0], 4: [16, 1, 1]}),
        [(14, 1)],
    ),
    "cooperative": (
        Shape(8, 32, 0, 4, cooperative=True),
        ([8, 1, 1], [32, 1, 1], 0, 0x77, {2: [1, 0, 0], 5: [1, 0, 0], 4: [4, 1, 1]}),
        [],
    ),
}


@pytest.mark.parametrize(("shape", "expected", "asked"), LAUNCHES.values(), ids=LAUNCHES)
def test_a_launch_is_what_the_driver_gets(shape, expected, asked, gpu, cuda):
    attributes = []
    cuda._cuFuncSetAttribute = lambda handle, attribute, value: attributes.append((attribute, value)) or 0
    function = gpu.load(b"", "_Z1f")
    parameters = [b"12345678", bytes(range(104))]
    gpu.launch(function, shape, parameters, 0x77)
    gpu.launch(function, shape, parameters, 0x77)
    assert (cuda.config, cuda.parameters, cuda.function) == (expected, parameters, 0x500)
    assert attributes == asked, "once"
    assert cuda.context == []


def test_an_error_of_the_driver_says_its_number_and_text(gpu, cuda):
    function = gpu.load(b"", "_Z1f")
    cuda.failing = {"cuLaunchKernelEx"}
    with pytest.raises(CudaError, match=r"^CUDA error 700 in cuLaunchKernelEx: an illegal address$"):
        gpu.launch(function, Shape(1, 32), [b"12345678", bytes(104)], 0)
    assert cuda.context == [], "the thread's context is again what it was"


def test_clusters_that_do_not_fit_are_none(gpu, cuda):
    function = gpu.load(b"", "_Z1f")
    asked = []
    cuda._cuFuncSetAttribute = lambda handle, attribute, value: asked.append((attribute, value)) or 0
    assert gpu.active_clusters(function, Shape(8, 128, 1024, 4)) == 33
    assert gpu.active_clusters(function, Shape(16, 128, 227 * 1024, 16)) == 33
    assert asked == [(8, 227 * 1024), (14, 1)], "as a launch"
    assert cuda.calls[-1] == ("cuOccupancyMaxActiveClusters", 1), "within the GPU's context"
    assert gpu.active_clusters(function, Shape(8, 128, 228 * 1024, 4)) == 0
    cuda.failing = {"cuOccupancyMaxActiveClusters"}
    assert gpu.active_clusters(function, Shape(8, 128, 1024, 4)) == 0


def test_the_driver_is_started_once(monkeypatch):
    cuda, opened = Cuda(), []
    cuda._cuInit = lambda flags: opened.append(flags) or 0
    monkeypatch.setattr(driver.ctypes, "CDLL", lambda name: opened.append(name) or cuda)
    assert driver.driver.__wrapped__().library is cuda
    assert opened == ["libcuda.so.1", 0]


def test_a_machine_without_a_driver_has_none(monkeypatch):
    def refuse(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(driver.ctypes, "CDLL", refuse)
    with pytest.raises(OSError, match=r"libcuda\.so\.1"):
        driver.driver.__wrapped__()
