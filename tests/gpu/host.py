"""Where the host's time goes in small calls: ``python -m tests.gpu.host --out FOLDER --seconds S``.

Calls follow one another without waiting for the device, so that each line is what the host alone takes: of an operator
without a gradient, with one and with its backward, and of each launch in it, by us and by Triton, beside PyTorch's
attention and addition. An operator's line has what Python spends it on.
"""

import argparse
import cProfile
import pstats
import statistics
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import crate_kernels as ck
from crate_kernels._core import backends, plan, shortcuts
from crate_kernels._triton import launch
from crate_kernels.bench import clock
from crate_kernels.ops.mssa import op as mssa_op
from tests.gpu import lines, processes

MOST = 12  # functions of the profile that are told


@dataclass(frozen=True)
class Size:
    """Where and how much is timed: 2 sequences of so many heads of 64 channels, in rounds of calls."""

    device: torch.device
    dtype: torch.dtype = torch.bfloat16
    seqlen: int = 197
    nheads: int = 12
    calls: int = 40
    rounds: int = 15


DRY = Size(torch.device("cpu"), torch.float32, seqlen=5, nheads=1, calls=1, rounds=1)


def microseconds(call, size):
    """Return the median time of a call among others of its kind."""
    call()
    times = []
    for _ in range(size.rounds):
        clock.synchronize(size.device)
        start = time.perf_counter()
        for _ in range(size.calls):
            call()
        times.append((time.perf_counter() - start) / size.calls)
    clock.synchronize(size.device)
    return round(1e6 * statistics.median(times), 2)


def operators(size):
    """Return the calls that are timed, by name, and the tensor whose gradient they have."""
    device, width = size.device, 64 * size.nheads
    x = torch.randn(2, size.seqlen, width, device=device, dtype=size.dtype, requires_grad=True)
    w = x.detach().unflatten(-1, (-1, 64)).transpose(1, 2).requires_grad_()
    weight, temp = torch.randn(width, width, device=device, dtype=size.dtype), torch.ones(size.nheads, 1, device=device)
    found = {"scaled_dot_product_attention": (lambda: F.scaled_dot_product_attention(w, w, w), w)}
    for backend in ("triton", "cpp"):
        if backends.unavailable_reason("mssa", backend, device) is not None:
            continue
        found |= {
            f"mssa, {backend}": (lambda b=backend: ck.mssa(w, backend=b), w),
            f"mssa causal, {backend}": (lambda b=backend: ck.mssa(w, causal=True, backend=b), w),
            f"tssa, {backend}": (lambda b=backend: ck.tssa(w, temp, backend=b), w),
            f"tssa causal, {backend}": (lambda b=backend: ck.tssa(w, temp, causal=True, backend=b), w),
            f"ista, {backend}": (lambda b=backend: ck.ista(x, weight, step_size=0.1, lambd=0.1, backend=b), x),
        }
    return found


def without_gradient(call):
    def run():
        with torch.no_grad():
            call()

    return run


def with_backward(call, leaf):
    dout = torch.ones_like(call())
    return lambda: torch.autograd.grad(call(), leaf, dout)


def launches(call):
    """Return the arguments of every launch in a call, as Python makes it."""
    plan.forget()
    found, run = [], launch.run

    def noted(kernel, programs, /, **arguments):
        found.append((kernel, programs, arguments))
        run(kernel, programs, **arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "run", noted)
        call()
    return found


def profile(call, size):
    """Return the functions in which Python spends most of its time, each with its microseconds a call."""
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(size.calls):
        call()
    profiler.disable()
    rows = sorted(pstats.Stats(profiler).stats.items(), key=lambda row: -row[1][2])  # pyright: ignore
    return [[f"{Path(f).name}:{n} {name}", round(1e6 * row[2] / size.calls, 2)] for (f, n, name), row in rows[:MOST]]


def in_the_backward(call, leaf, size):
    """Return the medians from autograd's start to mssa's backward, in it, and from its end to autograd's."""
    inside, outside, dout = [], [], torch.ones_like(call())

    def timed(backward):
        def run(*args):
            start = time.perf_counter()
            dw = backward(*args)
            if dw is not None:  # a call without a plan comes to the op after the plan
                inside.append((start, time.perf_counter()))
            return dw

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mssa_op, "mssa_bwd", timed(mssa_op.mssa_bwd))
        patch.setattr(shortcuts._Shortcut, "differentiate", timed(shortcuts._Shortcut.differentiate))
        for _ in range(size.calls):
            out = call()
            start = time.perf_counter()
            torch.autograd.grad(out, leaf, dout)
            outside.append((start, time.perf_counter()))
            clock.synchronize(size.device)
    parts = [(a - s, b - a, e - b) for (a, b), (s, e) in zip(inside, outside, strict=True)]
    return [round(1e6 * statistics.median(part), 2) for part in zip(*parts, strict=True)]


def measure(add, size):
    """Add the lines one by one."""

    def guarded():
        with launch.guard(size.device):
            pass

    small = torch.ones(2, size.seqlen, 64 * size.nheads, device=size.device)
    add("addition", call=microseconds(lambda: small + small, size))
    add("guard", call=microseconds(guarded, size))
    for name, (call, leaf) in operators(size).items():
        both = with_backward(call, leaf)
        times = {
            "no_gradient": microseconds(without_gradient(call), size),
            "forward": microseconds(call, size),
            "both": microseconds(both, size),
        }
        if name.startswith("mssa,"):
            times["backward_parts"] = in_the_backward(call, leaf, size)
        add(name, **times, profile=profile(both, size))
        for number, (kernel, programs, given) in enumerate(launches(both)):
            add(
                f"{name}, launch {number}: {kernel.fn.__name__}",
                ours=microseconds(partial(launch.run, kernel, programs, **given), size),
                triton=microseconds(partial(kernel[(programs,)], **given, enable_fp_fusion=True), size),
            )


class TimeIsUp(Exception):
    """The seconds of the run are over."""


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="of the whole run: beyond them, nothing is begun")
    parser.add_argument("--workers", type=int, default=1, help="not used: the host is timed alone")
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    path, deadline = args.out / "host.jsonl", time.monotonic() + args.seconds

    def add(item, **times):
        lines.append(path, item=item, outcome="timed", **times)
        print(item, {key: value for key, value in times.items() if key != "profile"}, flush=True)
        if time.monotonic() > deadline:
            raise TimeIsUp

    try:
        measure(add, DRY if args.dry_run else Size(torch.device("cuda")))
    except TimeIsUp:
        return processes.INCOMPLETE
    return processes.DONE


if __name__ == "__main__":
    sys.exit(main())
