"""Time what a user calls beside the faster of SDPA and the reference implementation, cell by cell, and print the worst.

A cell is an operator, its sizes, a number of threads, a dtype and a direction. Calls of providers are interleaved, in
another order every round, and the minimum time of each counts: other work on the machine adds. A cell in which ours is
more than a tenth slower is timed again. Tokens lie as a projection leaves them. The same command resumes.
"""

import argparse
import itertools
import json
import random
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

import crate_kernels
from crate_kernels._core import files
from tests.fuzz import OUTPUT
from tests.tools.sources import digest

OPERATORS = ("mssa", "mssa causal", "tssa", "tssa causal", "ista")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
FORWARD, BOTH = "forward", "both"
SLOW = 1.1  # times as long as the faster rival: what a page of results has to say
AGAIN = 2  # how often such a cell is timed again
MIN_ROUNDS, MAX_ROUNDS = 7, 300  # rounds
APART = {"fp32": 1e-3, "bf16": 0.1}  # share of the norm by which a result may differ and still be timed


class Cell(NamedTuple):
    """Sizes of a call; ``head_dim`` is ista's dim, and its ``heads`` are 1."""

    op: str
    head_dim: int
    seqlen: int
    heads: int
    threads: int
    dtype: str
    direction: str


GRID = {
    "head_dim": (32, 48, 64, 80, 128),
    "dim": (64, 192, 384, 768),
    "seqlen": (4, 8, 17, 33, 65, 129, 197, 513, 1024),
    "heads": (1, 8, 96),
    "threads": (1, 2),
    "dtype": tuple(DTYPES),
    "direction": (FORWARD, BOTH),
}


def cells(grid, operators=OPERATORS):
    """List the cells of a grid in a drawn order: a part of them is spread over all."""
    found = []
    for op in operators:
        widths, heads = (grid["dim"], (1,)) if op == "ista" else (grid["head_dim"], grid["heads"])
        sizes = (widths, grid["seqlen"], heads, grid["threads"], grid["dtype"], grid["direction"])
        found += [Cell._make((op, *values)) for values in itertools.product(*sizes)]
    random.Random(0).shuffle(found)
    return found


def mssa(w, causal):
    """CRATE's attention, each step a tensor."""
    scores = w @ w.transpose(-1, -2) * w.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return scores.softmax(-1) @ w


def tssa(w, temp, causal):
    """ToST's attention, each step a tensor."""
    squares = w**2
    if causal:
        membership = ((squares / squares.cumsum(-2).clamp_min(1e-12)).sum(-1) * temp).softmax(1)
        moment = (squares * membership[..., None]).cumsum(-2) / (membership.cumsum(-1) + 1e-8)[..., None]
    else:
        membership = ((F.normalize(w, dim=-2) ** 2).sum(-1) * temp).softmax(1)
        moment = (membership / (membership.sum(-1, keepdim=True) + 1e-8))[:, :, None] @ squares
    return -(w * membership[..., None]) * (1 / (1 + moment))


def ista(x, weight):
    """CRATE's sparse coding block."""
    back = F.linear(F.linear(x, weight), weight.t())
    return F.relu(x + 0.1 * (F.linear(x, weight.t()) - back) - 0.1 * 0.1)


def providers(cell):
    """Return the tensors of a cell, and what computes it from them, by name: ours first."""
    g = torch.Generator().manual_seed(0)
    dtype, causal = DTYPES[cell.dtype], "causal" in cell.op
    if cell.op == "ista":
        x = torch.randn(1, cell.seqlen, cell.head_dim, generator=g)
        weight = torch.randn(cell.head_dim, cell.head_dim, generator=g) * cell.head_dim**-0.5
        return (x.to(dtype), weight.to(dtype)), {"ours": crate_kernels.ista, "eager": ista}
    w = torch.randn(1, cell.seqlen, cell.heads, cell.head_dim, generator=g).to(dtype).transpose(1, 2)
    if cell.op.startswith("tssa"):
        return (w, torch.ones(cell.heads, 1, dtype=dtype)), {
            "ours": lambda w, temp: crate_kernels.tssa(w, temp, causal=causal),
            "eager": lambda w, temp: tssa(w, temp, causal),
        }
    return (w,), {
        "ours": lambda w: crate_kernels.mssa(w, causal=causal),
        "sdpa": lambda w: F.scaled_dot_product_attention(w, w, w, is_causal=causal),
        "eager": lambda w: mssa(w, causal),
    }


def calls(cell):
    """Return a function without arguments per provider: a forward without gradient, or both passes.

    And what is right: the reference implementation of the same numbers in float32.
    """
    tensors, functions = providers(cell)
    if cell.direction == FORWARD:
        timed = {name: lambda f=function: (f(*tensors),) for name, function in functions.items()}
        return timed, (functions["eager"](*(t.float() for t in tensors)),)
    leaves = tuple(t.requires_grad_() for t in tensors)
    dout = torch.randn(tensors[0].shape, generator=torch.Generator().manual_seed(1)).to(tensors[0].dtype)
    right = torch.autograd.grad(functions["eager"](*(t.float() for t in leaves)), leaves, dout.float())
    return {
        name: lambda f=function: torch.autograd.grad(f(*leaves), leaves, dout) for name, function in functions.items()
    }, right


def measure(cell, seconds):
    """Return the minimum seconds of a call by provider."""
    torch.set_num_threads(cell.threads)
    with torch.set_grad_enabled(cell.direction == BOTH):
        timed, right = calls(cell)
        ours, exact = (torch.cat([t.float().flatten() for t in results]) for results in (timed["ours"](), right))
        apart = float((ours - exact).norm() / exact.norm())
        if not apart <= APART[cell.dtype]:
            raise ArithmeticError(f"{cell}: ours is off by {apart:.2g} of the norm")
        fastest = dict.fromkeys(timed, float("inf"))
        draw, stop = random.Random(0), time.perf_counter() + seconds
        for number in range(MAX_ROUNDS):
            for name in draw.sample(list(timed), len(timed)):
                start = time.perf_counter()
                timed[name]()
                fastest[name] = min(fastest[name], time.perf_counter() - start)
            if number + 1 >= MIN_ROUNDS and time.perf_counter() > stop:
                break
    return fastest


def ratio(fastest):
    """Return the time of ours in times of the faster rival."""
    return fastest["ours"] / min(value for name, value in fastest.items() if name != "ours")


def run(wanted, log, seconds, minutes=None):
    """Time the cells that the log does not have yet; return the minimum times of all, by cell."""
    found, threads = {}, torch.get_num_threads()
    if log.exists():
        found = {Cell(*record["cell"]): record["seconds"] for record in map(json.loads, log.read_text().splitlines())}
    stop = time.monotonic() + 60 * minutes if minutes else float("inf")
    with log.open("a") as file:
        for number, cell in enumerate(wanted):
            if time.monotonic() > stop:
                print(f"Time is up after {number} of {len(wanted)} cells; the same command resumes.")
                break
            if cell in found:
                continue
            fastest = measure(cell, seconds)
            for _ in range(AGAIN):
                if ratio(fastest) > SLOW:
                    fastest = {name: min(value, fastest[name]) for name, value in measure(cell, seconds).items()}
            found[cell] = fastest
            file.write(json.dumps({"cell": cell, "seconds": fastest}) + "\n")
            file.flush()
    torch.set_num_threads(threads)
    return {cell: found[cell] for cell in wanted if cell in found}


def table(found, count):
    """Return the lines that show the worst cells, and how many of each operator are slow."""
    lines = [f"{'cell':<54}{'ours, us':>10}{'sdpa':>10}{'eager':>10}{'ratio':>8}"]
    for cell, fastest in sorted(found.items(), key=lambda item: -ratio(item[1]))[:count]:
        name = (
            f"{cell.op} {cell.heads}x{cell.seqlen}x{cell.head_dim} {cell.dtype} {cell.direction}, {cell.threads} thread"
        )
        columns = (f"{1e6 * fastest[p]:.1f}" if p in fastest else "-" for p in ("ours", "sdpa", "eager"))
        times = "".join(f"{column:>10}" for column in columns)
        lines.append(f"{name:<54}{times}{ratio(fastest):>8.2f}")
    for op in dict.fromkeys(cell.op for cell in found):
        ratios = [ratio(fastest) for cell, fastest in found.items() if cell.op == op]
        lines.append(f"{op}: {sum(r > SLOW for r in ratios)} of {len(ratios)} cells are slower by more than a tenth")
    return lines


def main():
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.apart.cells", description=__doc__)
    for name, values in GRID.items():
        kind = type(values[0])
        parser.add_argument(f"--{name}", type=kind, nargs="+", default=values, help="(default %(default)s)")
    parser.add_argument("--op", choices=OPERATORS, nargs="+", default=OPERATORS, help="only these (default all)")
    parser.add_argument(
        "--seconds", type=float, default=0.1, help="for each cell, times of which are two (%(default)s)"
    )
    parser.add_argument("--minutes", type=float, help="stop after so long; the same command resumes")
    parser.add_argument("--worst", type=int, default=40, help="cells to print (default %(default)s)")
    parser.add_argument(
        "--log", type=Path, help=f"log of the cells (default {OUTPUT}/cells-<hash of the sources>.jsonl)"
    )
    arguments = parser.parse_args()
    log = arguments.log or OUTPUT / f"cells-{digest('crate_kernels', 'csrc')}.jsonl"
    wanted = cells({name: getattr(arguments, name) for name in GRID}, arguments.op)
    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        with files.owned(log):
            found = run(wanted, log, arguments.seconds, arguments.minutes)
    except files.InUse as error:
        print(error)
        return 1
    print("\n".join(table(found, arguments.worst)))
    print(f"{len(found)} of {len(wanted)} cells; log: {log}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
