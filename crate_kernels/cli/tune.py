"""``tune``: time the launch configurations of the Triton kernels on this GPU and keep the fastest."""

from __future__ import annotations

import argparse
from importlib import import_module

import torch

from crate_kernels import _backend, _launch, _tune
from crate_kernels.cli import table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--op", choices=_backend.OPS, action="append", help="only this operator; may be repeated")
    parser.add_argument("--forget", action="store_true", help="remove what was found earlier, and time nothing")


def workloads(ops: list[str]) -> list[_tune.Workload]:
    """List the workloads of the operators that have any."""
    found = []
    for op in ops:
        if _backend._is_there(f"crate_kernels.ops.{op}.triton_tune"):
            found += import_module(f"crate_kernels.ops.{op}.triton_tune").workloads()
    return found


def run(args: argparse.Namespace) -> int:
    """Tune, print what was found and write it; return 1 where there is no GPU to tune for."""
    if not torch.cuda.is_available():
        print("tune: needs a CUDA or HIP GPU, and PyTorch sees none (python -m crate_kernels info)")
        return 1
    device = torch.device("cuda", torch.cuda.current_device())
    gpu = torch.cuda.get_device_name(device)
    if args.forget:
        _launch.user_table(gpu).unlink(missing_ok=True)
        print(f"tune: the shipped configurations serve {gpu} again")
        return 0
    reason = next((why for op in args.op or _backend.OPS if (why := _backend.why_not(op, "triton"))), None)
    if reason is not None and args.op:
        print(f"tune: {reason}")
        return 1
    results = []
    try:
        _launch.user_table(gpu).parent.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # better now than after minutes of timing
        print(f"tune: the user's cache cannot be written: {error}; set HOME to a folder that can")
        return 1
    for workload in workloads(args.op or list(_backend.OPS)):
        row = workload.row
        dtype = torch.float32 if row.half is False else torch.bfloat16
        seqlen = row.seqlen or _launch.LONGEST
        shipped = workload.table.config(device, row.head_dim or 64, seqlen, bool(row.causal), dtype)
        results.append(_tune.search(workload, shipped, _tune.device_seconds))
        print(
            f"{workload}: {results[-1].seconds * 1e6:.0f} us, as shipped {results[-1].shipped * 1e6:.0f} us", flush=True
        )
    path = _launch.write_user_rows(gpu, _tune.rows(results))
    lines = [[str(r.workload), f"{r.shipped / r.seconds:.2f}", str(dict(r.config))] for r in results]
    print("\n" + table.render(["workload", "times faster", "configuration"], lines))
    print(f"\ntune: written to {path}")
    return 0
