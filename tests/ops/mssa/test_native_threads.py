"""The C++ extension on several threads: the same numbers, whoever calls, and no waiting for a core."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from crate_kernels import ista, ista_overcomplete, mssa, testing, tssa
from tests.ops.common import NEEDS_EXTENSION, failures, randn

pytestmark = NEEDS_EXTENSION


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"dropout_p": 0.3}], ids=["full", "causal", "dropout"])
@pytest.mark.parametrize("name", ["row", "scattered", ""])
def test_more_threads_than_heads(name, options, threads):
    case = testing.Case("mssa", "split", (1, 1, 300, 32), {"return_lse": True, **options}, padding=name)
    inputs = testing.make_inputs(case, torch.float32)
    for count in (1, 2, 5):
        threads(count)
        assert failures(case, torch.float32) == [], count
        torch.testing.assert_close(testing.run(case, inputs, "cpp"), testing.run(case, inputs, "cpp"), rtol=0, atol=0)


def test_heads_do_not_depend_on_the_number_of_threads(threads):
    """With a thread a head or less, each head is computed as by one thread."""
    case = testing.Case("mssa", "threads", (2, 4, 100, 32), {"return_lse": True})
    inputs, results = testing.make_inputs(case, torch.float32), []
    for count in (1, 3, 8):
        threads(count)
        results.append(testing.run(case, inputs, "cpp"))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
    torch.testing.assert_close(results[2], results[0], rtol=0, atol=0)


CALLS = {
    "mssa": lambda w: mssa(w, backend="cpp"),
    "tssa": lambda w: tssa(w, torch.ones(3), backend="cpp"),
    "tssa-causal": lambda w: tssa(w, torch.ones(3), causal=True, backend="cpp"),
    "ista": lambda w: ista(w, w[0, 0, :48], backend="cpp"),
    "ista-overcomplete": lambda w: ista_overcomplete(w, w[0, 0].mT, backend="cpp"),
}


@pytest.mark.parametrize("function", CALLS.values(), ids=CALLS)
def test_eight_threads_call_at_once(function, threads):
    threads(2)
    w = randn(2, 3, 130, 48, dtype=torch.float32)
    expected, wrong = function(w), []

    def call():
        for _ in range(20):
            if not torch.equal(function(w), expected):
                wrong.append(1)

    callers = [threading.Thread(target=call) for _ in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == []


@pytest.fixture
def one_core():
    """Let all threads of this process share one core, as on a machine whose other cores are taken."""
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("needs Linux, where a process can be bound to a core")
    before = os.sched_getaffinity(0)

    def bind(cores):
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                os.sched_setaffinity(int(thread), cores)

    bind({min(before)})
    yield
    bind(before)


def test_threads_without_a_core_do_not_spin_for_one(threads, one_core):
    """OpenMP's spin for milliseconds at the end of a region, on the very core that its last thread waits for."""
    w = randn(4, 4, 64, 32, dtype=torch.float32)
    spent = []
    for count in (1, 2):
        threads(count)
        for _ in range(2):  # the first time starts the thread and finds out
            start = time.process_time()
            for _ in range(50):
                mssa(w, backend="cpp")
            last = time.process_time() - start
        spent.append(last)
    assert spent[1] < 8 * spent[0], spent


# call() returns the CPU time of the other threads. It is long: the stop falls into a region, or else between two.
STOPPED = """
import time, torch
from crate_kernels import mssa
torch.set_num_threads(2)
w = torch.randn(8, 8, 512, 64)
def call():
    own, all = time.thread_time(), time.process_time()
    mssa(w, backend="cpp")
    return time.process_time() - all - (time.thread_time() - own)
call()
print("ready", flush=True)
before = now = time.monotonic()
while now - before < 1.0:
    call()
    before, now = now, time.monotonic()
end = time.monotonic() + 10.0
while time.monotonic() < end:
    if call() > 0.01:
        print("shared")
        break
"""


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs a signal that stops a process")
def test_threads_work_again_soon_after_the_process_was_stopped():
    """A region in which the process was stopped took longer than its threads ran, through no fault of theirs."""
    with subprocess.Popen([sys.executable, "-c", STOPPED], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            time.sleep(0.3)
            process.send_signal(signal.SIGSTOP)
            time.sleep(2.0)
            process.send_signal(signal.SIGCONT)
            found, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert found == "shared\n", "one thread worked alone for ten seconds"
