"""Chooses, without a GPU, which launch configurations ``tune`` should time on one.

``python -m tests.tools.aot.candidates --target sm_90 --most 4 --jobs 8 --out FILE`` compiles every candidate of every
workload in a pool of processes, ranks them by the bounds of their machine code, and writes the best, for
``python -m crate_kernels tune --candidates FILE``. A candidate that does not compile, spills, does not fit, or has its
products serialised is left out. Triton's cache then has what tuning compiles; it can be carried along.
"""

import argparse
import json
import multiprocessing
import sys
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode

from crate_kernels._core import backends
from crate_kernels._triton.table import forced
from crate_kernels.cli import tune
from tests.tools.aot import harness, report
from tests.tools.sass.rates import RATES


class OnMeta(TorchFunctionMode):
    """Draw nothing: what would be on a GPU is a meta tensor."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = {k: v for k, v in (kwargs or {}).items() if not (func is torch.randn and k == "generator")}
        if func is torch.randn:
            kwargs["device"] = "meta"
        args = ["meta" if isinstance(arg, str) and arg == "cuda" else arg for arg in args]
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def prepared(workload, target):
    """Return the timed call of a workload on meta tensors."""
    calls = []
    with OnMeta():
        harness.launches(lambda: calls.append(workload.make().timed), target)
    return calls[0]


def score(launches, target):
    """Return the bound of a call's launches, relative to the work, or None if they are not to be timed.

    For products: the largest pipe's clocks over the tensor cores', and a third of what would be left if nothing
    overlapped, of the launch with the most of them; the others go through the tokens once. Without products: the
    largest pipe's clocks over the memory's, or the share of the bytes that should be in flight; launches add up by
    their issue clocks.
    """
    scores, weights, products = [], [], []
    for one in launches:
        found, _, warnings = report.examine(one, target)
        main, clocks = found.main, found.main.costs.clocks
        too_large = found.build.shared > harness.SHARED_LIMIT[target] or found.blocks < 1
        if too_large or found.build.stack or warnings or main.costs.serialised:
            return None
        if clocks["tensor"]:
            rest = clocks["issue"] + clocks["tensor"] + clocks["mufu"] - main.costs.bound
            products.append((clocks["tensor"], (main.costs.bound + max(rest, 0) / 3) / clocks["tensor"]))
        elif main.memory and main.in_flight:
            scores.append(max(main.pressure, RATES[target].in_flight / main.in_flight, 1.0))
        else:
            scores.append(1.0)
        weights.append(clocks["issue"])
    if products:
        return max(products)[1]
    return sum(s * w for s, w in zip(scores, weights, strict=True)) / sum(weights) if weights else 1.0


def rank(task):
    """Return a workload's name, (score, configuration) from the best on, and how many there were.

    ``task`` is (operators, index of the workload, target). Of configurations that launch the same, the first is taken.
    """
    ops, index, target = task
    workload = tune.workloads(ops, packages=("triton",))[index]
    call, found, known = prepared(workload, target), [], set()
    for config in workload.table.candidates:
        with forced(workload.table, config), OnMeta():
            launches = harness.launches(call, target)
        same = str([(one.function.__name__, one.arguments, one.options) for one in launches])
        if same in known:
            continue
        known.add(same)
        try:
            value = score(launches, target)
        except Exception:  # the compiler refuses the configuration
            value = None
        if value is not None:
            found.append((value, dict(config)))
    return str(workload), sorted(found, key=lambda pair: pair[0]), len(workload.table.candidates)


def text(chosen):
    """Return the content of a file of candidates, a configuration per line."""
    lists = []
    for name, configs in chosen.items():
        lines = ",\n".join(f"  {json.dumps(config)}" for config in configs)
        lists.append(f" {json.dumps(name)}: [\n{lines}\n ]" if configs else f" {json.dumps(name)}: []")
    return "{\n" + ",\n".join(lists) + "\n}\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", choices=backends.OPS, action="append", help="only this operator; may be repeated")
    parser.add_argument("--part", default="", help="only workloads whose names have this part")
    parser.add_argument("--target", default="sm_90", choices=report.TARGETS)
    parser.add_argument("--most", type=int, default=4, help="configurations per workload")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile")
    parser.add_argument("--out", type=Path, required=True, help="the file to write; other workloads in it stay")
    args = parser.parse_args()
    ops = args.op or [*backends.OPS]
    every = tune.workloads(ops, packages=("triton",))
    tasks = [(ops, index, args.target) for index, workload in enumerate(every) if args.part in str(workload)]
    chosen = json.loads(args.out.read_text()) if args.out.exists() else {}
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        for name, found, count in pool.imap(rank, tasks):
            chosen[name] = [config for _, config in found[: args.most]]
            print(f"{name}: {len(chosen[name])} of {count}, " + ", ".join(f"{s:.2f}" for s, _ in found[: args.most]))
            args.out.write_text(text(chosen))
    return 0


if __name__ == "__main__":
    sys.exit(main())
