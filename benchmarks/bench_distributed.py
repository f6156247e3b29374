"""Sequence-parallel mssa: two local processes on gloo against one, run by hand: python -m benchmarks.bench_distributed.

Goal: at 8192 tokens each of two ranks computes for at most 0.65 of the time of one process, transfers apart.

Each process has one thread. Times are its processor time, which excludes waiting: the minimum of several rounds.
A round runs one process and all forms one after the other. Transfers are timed separately, by the wall clock.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

import crate_kernels
from crate_kernels import distributed
from crate_kernels.distributed import collectives
from crate_kernels.distributed.api import FORMS

GOAL = 0.65
# |w|^2 scale is about 2: beyond 8, one process in fp32 sums delta anew, which several do not (docs/distributed.md).
MAGNITUDE = 0.5
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Clock:
    """Splits the time of a call into computing and transfers."""

    def __init__(self) -> None:
        self.sent = self.ran = 0.0  # in transfers: s by the wall clock, s on the processor

    def time(self, call: Any) -> tuple[float, float]:
        """Return the time that ``call`` computes, and the time of its transfers."""
        self.sent = self.ran = 0.0
        start = time.thread_time()
        call()
        return time.thread_time() - start - self.ran, self.sent

    def transfer(self, function: Any) -> Any:
        """Count the time of a function as a transfer's."""

        def run(*args: Any, **kwargs: Any) -> Any:
            wall, ran = time.perf_counter(), time.thread_time()
            result = function(*args, **kwargs)
            self.sent += time.perf_counter() - wall
            self.ran += time.thread_time() - ran
            return result

        return run

    def passes(self, start_pass: Any) -> Any:
        """Count the start of a pass to the next rank, and the wait for it."""

        def run(*args: Any) -> Any:
            return [Waiting(self.transfer(each.wait)) for each in self.transfer(start_pass)(*args)]

        return run

    def watch(self) -> None:
        """Time the transfers of every call from now on."""
        ranks: Any = collectives.Ranks
        ranks.gather, ranks.exchange = self.transfer(ranks.gather), self.transfer(ranks.exchange)
        ranks.start_pass = self.passes(ranks.start_pass)


class Waiting:
    """A transfer under way, whose wait is timed."""

    def __init__(self, wait: Any) -> None:
        self.wait = wait


def call(function: Any, w: torch.Tensor, dout: torch.Tensor, both: bool) -> Any:
    """Return a call of the forward, or of both passes."""

    def run() -> None:
        if both:
            leaf = w.detach().requires_grad_()
            function(leaf).backward(dout)
        else:
            with torch.no_grad():
                function(w)

    return run


def work(rank: int, folder: Path, options: argparse.Namespace) -> None:
    """Time every case in this process and write the times down."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    group: Any = dist.group.WORLD
    clock, rows = Clock(), {}
    clock.watch()
    for name, causal, both in ((n, c, b) for n in options.dtypes for b in (False, True) for c in (True, False)):
        shape, generator = (2, 1, options.seqlen, options.heads, 64), torch.Generator().manual_seed(0)
        w, dout = (MAGNITUDE * torch.randn(shape, generator=generator)).transpose(2, 3).to(DTYPES[name])
        calls = {"one": call(lambda w, causal=causal: crate_kernels.mssa(w, causal=causal), w, dout, both)}
        for form in FORMS:
            balanced = causal and form != "heads"
            own, own_dout = (distributed.shard(t, group, 2, balanced) for t in (w, dout))

            def several(w: torch.Tensor, form: str = form, causal: bool = causal, balanced: bool = balanced) -> Any:
                return distributed.mssa(w, group, form=form, causal=causal, balanced=balanced, seqlen=options.seqlen)

            calls[form] = call(several, own, own_dout, both)
        key = f"{name} {'causal' if causal else 'full'} {'both' if both else 'forward'}"
        rows[key] = {form: [] for form in calls}
        for _ in range(options.rounds):
            for form, run in calls.items():
                dist.barrier()
                if form != "one" or rank == 0:
                    rows[key][form].append(clock.time(run))
    dist.destroy_process_group()
    (folder / f"{rank}.json").write_text(json.dumps(rows))


def main() -> None:
    """Print a row per case and form: the minimum times of one process, of the slower rank, and of its transfers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqlen", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        spawn(work, (Path(folder), options), 2)
        ranks = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(2)]
    print(f"{options.seqlen} tokens, {options.heads} heads of 64, 2 ranks, {options.rounds} rounds")
    print("| case | form | one, ms | a rank, ms | share | transfers, ms |\n|---|---|---|---|---|---|")
    for key, forms in ranks[0].items():
        one = min(computed for computed, _ in forms["one"])
        for form in FORMS:
            minima = [min(computed for computed, _ in rank[key][form]) for rank in ranks]
            sent = max(min(sent for _, sent in rank[key][form]) for rank in ranks)
            mark = "" if max(minima) <= GOAL * one else f" over {GOAL}"
            share = f"{max(minima) / one:.3f}{mark}"
            print(f"| {key} | {form} | {one * 1e3:.0f} | {max(minima) * 1e3:.0f} | {share} | {sent * 1e3:.1f} |")


if __name__ == "__main__":
    main()
