"""The clock of a GPU, with stand-ins for its streams, events and graphs: what is called, when, and after what."""

import sys
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from crate_kernels.bench import clock, decoding
from crate_kernels.testing import SPECS

GPU = SimpleNamespace(type="cuda")
CPU = torch.device("cpu")


class Recorder:
    """Stands for torch.cuda: writes down what is done. A graph captures calls and repeats nothing but its name."""

    def __init__(self, captures=True):
        self.log, self.captures = [], captures

    def Event(self, enable_timing):
        event = SimpleNamespace(elapsed_time=lambda stop: 2.0)
        event.record = lambda: self.log.append("event")
        return event

    def Stream(self, device):
        return SimpleNamespace(wait_stream=lambda other: None)

    current_stream = Stream

    def stream(self, stream):
        return nullcontext()

    def CUDAGraph(self):
        return SimpleNamespace(replay=lambda: self.log.append("replay"))

    @contextmanager
    def graph(self, graph):
        self.log.append("capture")
        if not self.captures:
            raise RuntimeError("operation not permitted when stream is capturing")
        yield
        self.log.append("captured")

    def synchronize(self, device=None):
        self.log.append("synchronize")

    def get_device_properties(self, device):
        return SimpleNamespace(L2_cache_size=8)


@pytest.fixture
def gpu(monkeypatch, request):
    """Pretend that there is a GPU whose memory is the CPU's, and return the record of what it was asked for."""
    recorder = Recorder(**getattr(request, "param", {}))
    monkeypatch.setattr(clock.torch, "cuda", recorder)
    empty = torch.empty
    monkeypatch.setattr(clock.torch, "empty", lambda *size, device=None, **options: empty(*size, **options))
    return recorder


def without_waits(gpu):
    return [done for done in gpu.log if done != "synchronize"]


def test_each_replay_is_prepared_before_its_events(gpu):
    times = clock.device_seconds(lambda: gpu.log.append("call"), lambda: gpu.log.append("rewind") or (), GPU, 2)
    assert times == [2e-3, 2e-3]
    calls = 2 * ["rewind", "call"] + ["rewind", "capture", "call", "captured"]
    assert without_waits(gpu) == ["rewind", *calls, *(2 * ["rewind", "event", "replay", "event"])]


@pytest.mark.parametrize("gpu", [{"captures": False}], indirect=True)
def test_what_no_graph_takes_is_called(gpu):
    clock.device_seconds(lambda: gpu.log.append("call"), lambda: gpu.log.append("rewind") or (), GPU, 2)
    assert without_waits(gpu)[-8:] == 2 * ["rewind", "event", "call", "event"]


def test_a_call_with_arguments_is_not_captured(gpu):
    clock.device_seconds(gpu.log.append, lambda: ("argument",), GPU, 2)
    assert without_waits(gpu) == 2 * ["event", "argument", "event"]


def test_there_is_no_device_time_on_a_cpu():
    assert clock.device_seconds(lambda: None, tuple, CPU, 2) is None


def test_a_loop_waits_for_the_device_at_its_end_only(gpu):
    times = clock.loop_seconds(lambda: gpu.log.append("call"), tuple, GPU, 7 * [1.0])
    assert gpu.log == 3 * ["synchronize", "call", "call", "synchronize"]
    assert len(times) == 3


def test_a_loop_gives_the_seconds_of_one_call(monkeypatch):
    monkeypatch.setattr(clock, "perf_counter", iter([10.0, 14.0, 20.0, 26.0, 30.0, 34.0]).__next__)
    assert clock.loop_seconds(lambda: None, tuple, CPU, 6 * [1.0]) == [2.0, 3.0, 2.0]


def test_what_is_prepared_has_no_loop(gpu):
    assert clock.loop_seconds(lambda: gpu.log.append("call"), lambda: (), GPU, 7 * [1.0]) == gpu.log == []


def test_a_loop_of_one_call_is_that_call(gpu):
    assert clock.loop_seconds(lambda: gpu.log.append("call"), tuple, GPU, [3.0, 1.0, 2.0]) == [3.0, 1.0, 2.0]
    assert gpu.log == []


@pytest.mark.parametrize(("copy", "addition"), [(2.0, 0.5), (0.5, 2.0)], ids=["addition", "copy"])
def test_the_stream_is_the_faster_of_copy_and_addition(copy, addition, monkeypatch):
    taken = iter([copy, addition])
    monkeypatch.setattr(clock, "_median_seconds", lambda call, device: (call(), next(taken))[1])
    assert clock.copy_bytes(CPU) == 2.0 * 2**28 / 0.5
    assert list(taken) == []


@pytest.mark.parametrize("op", ["mssa", "tssa"])
def test_a_decoding_step_fits_its_cache_however_often_it_is_called(op, gpu, monkeypatch):
    """There is one free place, and a graph keeps writing to the addresses that it was captured with."""
    module, caches = sys.modules[SPECS[op].decoding.make.__module__], []
    function = getattr(module, op)
    monkeypatch.setattr(
        module, op, lambda *args, cache, **options: caches.append(cache) or function(*args, cache=cache, **options)
    )
    step = decoding.TimedStep(op, (2, 3, 20, 16), ("cuda",))
    call, rewind = SPECS[op].decoding.make(step, "composite", *decoding._draw(step, torch.float32, CPU))
    outs = [call().clone()]
    caches.clear()
    clock.device_seconds(lambda: outs.append(call().clone()), lambda: rewind() or (), GPU, 3)
    rewind()
    outs.append(call().clone())
    assert len(outs) == 5  # first call, two before the capture, the capture, last call
    for out in outs:
        torch.testing.assert_close(out, outs[0], rtol=0, atol=0)
    assert len({(id(cache), cache.lengths.data_ptr()) for cache in caches}) == 1
    assert caches[0].lengths.tolist() == [21, 21]


@pytest.mark.parametrize(
    ("seconds", "budget", "rounds"),
    [(0.1, 1.0, 10), (0.3, 1.0, 3), (1.0, 1.0, 3), (1e-9, 1.0, 50), (0.0, 0.0, 3), (0.02, 1.0, 50)],
)
def test_as_many_calls_as_fit_into_a_budget(seconds, budget, rounds):
    assert clock.rounds_for(seconds, budget) == rounds
    assert clock.rounds_for(0.1, 1.0, minimum=12) == 12
    assert clock.rounds_for(0.1, 1.0, maximum=7) == 7


@pytest.mark.parametrize(("second", "timed"), [(0.1, 10), (clock.LONG, 3), (1.01 * clock.LONG, 1)])
def test_two_calls_warm_up_and_a_long_one_is_timed_once(second, timed, monkeypatch):
    taken = iter([99.0, second, *(float(number) for number in range(50))])
    monkeypatch.setattr(clock, "once", lambda *_: next(taken))
    assert clock.host_seconds(lambda: None, tuple, CPU, 1.0) == list(range(timed))


def test_one_call_is_prepared_and_waited_for_outside_of_its_time(gpu, monkeypatch):
    def looked():
        gpu.log.append("look")
        return {1: 5.0, 2: 7.5}[gpu.log.count("look")]

    monkeypatch.setattr(clock, "perf_counter", looked)
    assert clock.once(gpu.log.append, lambda: gpu.log.append("prepared") or ("call",), GPU) == 2.5
    assert gpu.log == ["prepared", "synchronize", "look", "call", "synchronize", "look"]


@pytest.mark.parametrize(
    ("device", "quick", "size"), [("cuda", 0, 8192), ("cpu", 0, 256), ("cpu", 2, 1024), ("cpu", 9, 2048)]
)
def test_a_product_grows_until_it_can_be_timed(device, quick, size, monkeypatch):
    made, calls = [], []
    monkeypatch.setattr(clock, "_product", lambda size, dtype, device: made.append((size, dtype)) or size)
    monkeypatch.setattr(
        clock, "once", lambda call, *_: calls.append(call) or 2 * clock._LONG_ENOUGH * (len(calls) > quick)
    )
    monkeypatch.setattr(clock, "_median_seconds", lambda call, device: call * 1e-3)
    found = clock.product_flops(torch.bfloat16, SimpleNamespace(type=device))
    assert found == pytest.approx(2 * size**3 / (size * 1e-3))
    assert made[-1] == (size, torch.bfloat16)


def test_a_product_is_of_two_squares():
    product = clock._product(5, torch.float64, CPU)
    left, right = product.args
    assert left.shape == right.shape == (5, 5)
    assert not torch.equal(left, right)
    assert product().dtype == torch.float64
    torch.testing.assert_close(product(), left @ right)


@pytest.mark.parametrize("there", [True, False])
def test_the_devices_time_counts_where_there_is_one(there, monkeypatch):
    monkeypatch.setattr(clock, "host_seconds", lambda *args: [args[-1], 3.0, 1.0])
    monkeypatch.setattr(clock, "device_seconds", lambda *args: [7.0, args[-1], 9.0] if there else None)
    assert clock._median_seconds(lambda: None, CPU) == (7.0 if there else 1.0)
