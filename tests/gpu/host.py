"""What small calls take the host on a GPU: ``python -m tests.gpu.host --out FOLDER --seconds S``.

Calls follow one another without waiting for the device, so that each line is what the host alone takes: of a call
without a gradient, with one and with its backward, on each backend, and what Python spends it on. PyTorch's attention
is beside them, and linear layers around it.
"""

import cProfile
import pstats
import statistics
import sys
import time
from pathlib import Path

import torch

from crate_kernels._core import backends
from crate_kernels.bench import clock
from tests.gpu import lines, processes
from tests.tools.plans import host

SHAPE = (2, 12, 197, 64)  # batch, nheads, seqlen, head_dim
CALLS, ROUNDS = 40, 15
DRY = ("sdpa", "ista")  # of a dry run
TOP = 12  # functions of the profile that are listed


def microseconds(call, device, count):
    """Return the median time of a call among ``count`` of its kind."""
    call()
    times = []
    for _ in range(ROUNDS if count > 1 else 1):
        clock.synchronize(device)
        times.append(host.seconds(call, count))
    clock.synchronize(device)
    return round(1e6 * statistics.median(times), 2)


def profile(call, count):
    """Return the functions in which Python spends most of its time, each with its microseconds a call."""
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(count):
        call()
    profiler.disable()
    rows = sorted(pstats.Stats(profiler).stats.items(), key=lambda row: -row[1][2])  # pyright: ignore
    return [[f"{Path(f).name}:{n} {name}", round(1e6 * row[2] / count, 2)] for (f, n, name), row in rows[:TOP]]


def run(path, deadline, dry_run):
    """Add a line for every call; return the exit status."""
    device = torch.device("cpu" if dry_run else "cuda")
    dtype, shape, count = (torch.float32, host.SHAPE, 1) if dry_run else (torch.bfloat16, SHAPE, CALLS)
    for backend in ("triton", "cpp"):
        if backends.unavailable_reason("mssa", backend, device) is not None:
            continue
        every = host.calls(dtype, shape, device, backend)
        for name in DRY if dry_run else every:
            if time.monotonic() > deadline:
                return processes.INCOMPLETE
            timed = host.forms(*every[name])
            times = {kind: microseconds(call, device, count) for kind, call in timed.items()}
            lines.append(
                path, item=f"{name}, {backend}", outcome="timed", **times, profile=profile(timed["both"], count)
            )
            print(f"{name}, {backend}", times, flush=True)
    return processes.DONE


def main(argv=None):
    args = processes.parser(__doc__).parse_args(argv)  # of the workers, none: the host is timed alone
    args.out.mkdir(parents=True, exist_ok=True)
    return run(args.out / "host.jsonl", time.monotonic() + args.seconds, args.dry_run)


if __name__ == "__main__":
    sys.exit(main())
