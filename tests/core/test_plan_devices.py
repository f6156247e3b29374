"""Where a plan launches: on the device of its tensors, in its context, on its current stream.

Tensors without memory stand in for those of several GPUs, and a driver that notes what it is asked for CUDA's.
"""

import threading

import pytest
import torch

from crate_kernels._core import plan
from crate_kernels._native import extension
from tests.tools.plans import drivers

pytestmark = pytest.mark.skipif(extension.PATH is None, reason="needs python -m crate_kernels build")
NUMBER = 10**9  # of options that no operator has
# Of function 5 with one parameter: the address of the call's tensor.
LAUNCH = [1, 5, *[1] * 4, 0, 1, 0, 0, *(1, 0), *(1, 0), *(1, 8), *(1, 0, 0, 0)]
VIEW = [0, 8, 0, *(1, 4), *(1, 1), 0]


class Placed(torch.Tensor):
    """A tensor of a GPU that is not there."""

    @staticmethod
    def __new__(cls, device):
        return torch.Tensor._make_wrapper_subclass(cls, (4,), dtype=torch.float32, device=f"cuda:{device}")

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} of a tensor without memory")


@pytest.fixture
def machine():
    plan._load()
    with drivers.Machine().driving() as machine:
        yield machine


def store(device, launches=1):
    """Store a plan that launches, and returns a view of its tensor: it allocates nothing."""
    with torch._C._DisableTorchDispatch():
        words = [0, 0, launches + 1, *LAUNCH * launches, *VIEW, 1, 1]
        torch.ops.crate_kernels_C.plan_store([Placed(device)], NUMBER, words)


def run(device):
    """Return the device of a plan's result; None where no plan ran."""
    with torch._C._DisableTorchDispatch():
        result = torch.ops.crate_kernels_C.plan_1_1(Placed(device), NUMBER)
        return None if result is None else result.device.index


def test_a_plan_serves_the_device_that_it_was_recorded_on(machine):
    store(0)
    assert run(1) is None
    assert run(0) == 0


@pytest.mark.parametrize("device", [0, 1])
def test_a_fresh_thread_launches_in_the_context_of_the_device(device, machine):
    store(device)
    assert run(device) == device
    assert machine.asked == [
        ("enter", device),
        ("context", None),
        ("retain", device),
        ("set", 0x100 + device),
        ("stream", device),
        ("launch", machine.streams[device]),
        ("leave", device),
    ]


def test_a_context_that_is_current_stays(machine):
    machine.contexts = [0x100]
    store(0)
    run(0)
    assert [name for name, _ in machine.asked] == ["enter", "context", "stream", "launch", "leave"]


def test_every_run_asks_for_the_stream_that_is_current_then(machine):
    """As under a graph's capture, which makes another stream the current one: a plan holds none."""
    store(1)
    for stream in (0x21, 0x22, 0x21):
        machine.streams[1] = stream
        run(1)
    assert [stream for name, stream in machine.asked if name == "launch"] == [0x21, 0x22, 0x21]


def test_all_launches_of_a_run_go_to_one_stream(machine):
    store(0, launches=2)
    run(0)
    assert [name for name, _ in machine.asked][-4:] == ["stream", "launch", "launch", "leave"]


@pytest.mark.parametrize("failing", ["enter", "retain", "set", "stream", "launch"])
def test_what_fails_leaves_the_call_to_python_and_the_device_as_it_was(failing, machine):
    store(1)
    machine.failing = {failing}
    assert run(1) is None
    assert (machine.asked[-1] == ("leave", 1)) == (failing != "enter")
    machine.failing = set()
    assert run(1) == 1


def test_threads_on_two_devices_launch_each_on_its_own(machine):
    for device in (0, 1):
        store(device)
    wrong = []

    def work(device):
        for _ in range(200):
            if run(device) != device:
                wrong.append(device)

    threads = [threading.Thread(target=work, args=(n % 2,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    streams = [stream for name, stream in machine.asked if name == "launch"]
    assert wrong == []
    assert sorted(streams) == [0x10] * 400 + [0x11] * 400
