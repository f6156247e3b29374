"""A training step on few and many threads: the situations, what is busy beside it, and the models of the providers."""

import contextlib
import functools
from subprocess import Popen

import pytest
import torch

from crate_kernels import models
from crate_kernels.bench import networks, threads


@pytest.mark.parametrize(
    ("cores", "wanted"),
    [
        (1, {"1 thread": (1, 0), "1 threads, 1 others": (1, 1)}),
        (2, {"1 thread": (1, 0), "2 threads": (2, 0), "2 threads, 2 others": (2, 2)}),
        (6, {"1 thread": (1, 0), "2 threads": (2, 0), "6 threads": (6, 0), "6 threads, 6 others": (6, 6)}),
    ],
)
def test_situations_of_a_machine(cores, wanted, monkeypatch):
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    assert threads.situations() == wanted
    monkeypatch.delattr(threads.os, "sched_getaffinity")
    monkeypatch.setattr(threads.os, "cpu_count", lambda: cores)
    assert threads.situations() == wanted
    monkeypatch.setattr(threads.os, "cpu_count", lambda: None)
    assert threads.situations() == {"1 thread": (1, 0), "1 threads, 1 others": (1, 1)}


@pytest.mark.parametrize("count", [0, 2])
def test_others_are_busy_within_and_gone_afterwards(count, monkeypatch):
    started = []
    monkeypatch.setattr(threads.subprocess, "Popen", lambda *args: started.append(Popen(*args)) or started[-1])
    with contextlib.suppress(ZeroDivisionError), threads.crowded(count):
        assert [process.poll() for process in started] == [None] * count
        raise ZeroDivisionError
    assert all(process.poll() is not None for process in started)


def test_a_step_is_timed_on_as_many_threads_beside_as_many_others(monkeypatch):
    seen, built, before = [], [], torch.get_num_threads()
    small = functools.partial(models.create, "crate_tiny", dim=16, depth=1, heads=1, dim_head=16)

    def create(name, backend):
        built.append(small(backend=backend))
        return built[-1]

    def measured(calls, seconds):
        for row, call in calls:
            seen.append((row.provider, torch.get_num_threads(), crowds[-1], seconds))
            call()

    monkeypatch.setattr(threads.models, "create", create)
    monkeypatch.setattr(threads.interleaved, "measure_calls", measured)
    crowds, crowded = [], threads.crowded
    monkeypatch.setattr(threads, "crowded", lambda count: crowds.append(count) or crowded(0))
    used = []
    for kind in (models.CRATE, networks._Plain):
        monkeypatch.setattr(kind, "forward", noted(kind.forward, used))
    rows = [threads.blank("3 threads, 2 others", provider) for provider in threads.PROVIDERS]
    threads.measure(rows, 3, 2, 0.25)
    assert seen == [("eager", 3, 2, 0.25), ("default", 3, 2, 0.25)]
    assert torch.get_num_threads() == before
    assert [model.config.backend for model in built] == ["composite", None]
    assert all(model.training for model in built)
    assert all(p.grad is None for model in built for p in model.parameters())  # else the next step would add to it
    plain = [kind for kind, *_ in used].count("_Plain")
    assert plain == 2  # attention and sparse coding of the one block, in the published form alone
    assert [(shape, grad) for kind, shape, grad in used if kind != "_Plain"] == [((4, 3, 224, 224), True)] * 2
    assert [(row.bench, row.case, row.dtype, row.direction) for row in rows] == [
        ("threads", "3 threads, 2 others", "fp32", "step")
    ] * 2
    assert {(row.unit, row.amount) for row in rows} == {("images", 4.0)}


def noted(forward, used):
    def run(self, x, *args, **options):
        used.append((type(self).__name__, tuple(x.shape), torch.is_grad_enabled()))
        return forward(self, x, *args, **options)

    return run
