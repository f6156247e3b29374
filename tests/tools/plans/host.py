"""What a call costs the host: ``make host OUT=file.json``, or ``python -m tests.tools.plans.host --out file.json``.

The kernels are those of an H100, compiled without one and launched by a driver that does nothing, so that what is left
is the host's work: Python, the dispatcher, allocation and the launch. Tensors are tiny, for the CPU computes what is
PyTorch's own: all of its attention, the products of ``ista``, and linear layers. One thread; microseconds; each figure
is the minimum over rounds that interleave all calls, each for a moment that others' work rarely interrupts.
"""

import argparse
import json
import math
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import crate_kernels as ck
from crate_kernels import nn
from crate_kernels._core import plan
from tests.tools.plans import drivers

SHAPE = (2, 4, 33, 16)  # batch, nheads, seqlen, head_dim
KINDS = ("no_grad", "grad", "both")
MOMENT = 0.3e-3  # seconds
SDPA, LAYERS = "sdpa", "linear, sdpa, linear"  # what others are compared with
CAST = " autocast"  # the end of the name of a call under autocast to bfloat16
OF = {"nn.MSSA": LAYERS, "nn.TSSA": LAYERS} | {f"{name}{CAST}": SDPA + CAST for name in ("mssa", "tssa", "ista")}


class Layers(torch.nn.Module):
    """The linear layers of ``nn.MSSA`` around PyTorch's attention, and nothing else."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = torch.nn.Linear(dim, dim, bias=False)
        self.to_out = torch.nn.Sequential(torch.nn.Linear(dim, dim), torch.nn.Dropout(0.0))

    def forward(self, x):
        w = self.qkv(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return self.to_out(F.scaled_dot_product_attention(w, w, w).transpose(1, 2).flatten(2))


def under_autocast(call, device):
    """Return a call under autocast, whose context, which takes as long as some calls, a training enters once."""

    def cast(tokens):
        torch.set_autocast_enabled(device, True)
        try:
            return call(tokens)
        finally:
            torch.set_autocast_enabled(device, False)

    return cast


def calls(dtype, shape=SHAPE, device="cpu", backend=None):
    """Return, by name, a function, its input, and a gradient of its output."""
    batch, nheads, seqlen, head_dim = shape
    dim = nheads * head_dim
    made, named = {"dtype": dtype, "device": device}, {"backend": backend}
    w, temp = torch.randn(shape, **made), torch.ones(nheads, 1, **made)
    dout = torch.randn(batch, seqlen, nheads, head_dim, **made).transpose(1, 2)
    x, weight = torch.randn(1, 16, head_dim, **made), torch.randn(head_dim, head_dim, **made) / 4
    rows = torch.randn(batch, seqlen, dim, **made)
    modules = {
        LAYERS: Layers(dim, nheads),
        "nn.MSSA": nn.MSSA(dim, nheads, head_dim, **named),
        "nn.TSSA": nn.TSSA(dim, nheads, **named),
        "nn.ISTA": nn.ISTA(dim, **named),
    }
    found = {
        SDPA: (lambda t: F.scaled_dot_product_attention(t, t, t), w, dout),
        "mssa": (lambda t: ck.mssa(t, **named), w, dout),
        "mssa causal": (lambda t: ck.mssa(t, causal=True, **named), w, dout),
        "tssa": (lambda t: ck.tssa(t, temp, **named), w, dout),
        "tssa causal": (lambda t: ck.tssa(t, temp, causal=True, **named), w, dout),
        "ista": (lambda t: ck.ista(t, weight, **named), x, torch.randn_like(x)),
        "ista_overcomplete": (lambda t: ck.ista_overcomplete(t, weight, **named), x, torch.randn_like(x)),
    }
    for name in (SDPA, "mssa", "tssa", "ista"):
        call, tokens, gradient = found[name]
        found[name + CAST] = under_autocast(call, torch.device(device).type), tokens, gradient
    return found | {name: (module.to(**made), rows, torch.randn_like(rows)) for name, module in modules.items()}


def forms(call, leaf, dout):
    """Return the call without a gradient, with one, and with its backward."""
    grown = leaf.clone().requires_grad_()

    def no_grad():
        with torch.no_grad():
            call(leaf)

    return dict(
        zip(KINDS, (no_grad, lambda: call(grown), lambda: torch.autograd.grad(call(grown), grown, dout)), strict=True)
    )


def measure(folder, rounds, dtype=torch.bfloat16):
    """Return the minimum microseconds of every call, by name and kind."""
    fastest, counts = {}, {}
    with drivers.idle(folder):
        timed = {(name, kind): run for name, inputs in calls(dtype).items() for kind, run in forms(*inputs).items()}
        for key, run in timed.items():
            for _ in range(4):
                run()
            counts[key] = max(1, int(MOMENT / min(seconds(run, 1) for _ in range(3))))
        for _ in range(rounds):
            for key, run in timed.items():
                run()
                fastest[key] = min(fastest.get(key, math.inf), seconds(run, counts[key]))
        hits, misses, plans = plan.counts()
    found: dict[str, dict] = {name: {"of": OF.get(name, SDPA)} for name, _ in timed}
    for (name, kind), spent in fastest.items():
        found[name][kind] = round(1e6 * spent, 2)
    return found, {"hits": hits, "misses": misses, "plans": plans}


def seconds(run, count):
    """Return the time of a call, of so many one after another."""
    start = time.perf_counter()
    for _ in range(count):
        run()
    return (time.perf_counter() - start) / count


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=300)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found, counts = measure(Path(folder), args.rounds)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{'us':22}" + "".join(f"{kind:>18}" for kind in KINDS) + "   (of PyTorch's attention)")
    for name, row in found.items():
        base = found[row["of"]]
        print(f"{name:22}" + "".join(f"{row[kind]:10.2f} ({row[kind] / base[kind]:5.2f})" for kind in KINDS))
    print(counts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
