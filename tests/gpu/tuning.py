"""Tuning as a part of a run: ``python -m tests.gpu.tuning --out FOLDER --seconds S --workers N``.

The log of all timings is ``tuning-log.jsonl``, the tuned table ``tuned.json``. Without a file of candidates, those
of the shipped ranking are timed, and a few of each workload that it does not have.
"""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from crate_kernels import cli
from crate_kernels._triton import tune
from crate_kernels._triton.table import LaunchRow
from crate_kernels.bench import clock
from crate_kernels.cli.tune import Log, judge
from tests.gpu import processes

MAX_CONFIGS = 4  # per workload
# Workloads by a part of their names: first those of kernels that no GPU has timed, in the sizes of the benchmarks.
ORDER = (
    "mssa_heads",
    "tssa_persistent_forward head_dim 384 seqlen 256",
    "tssa_persistent_backward head_dim 384 seqlen 256",
    "tssa_walking_forward head_dim 768",
    "tssa_walking_backward head_dim 768",
    "ista_product head_dim 768 seqlen longer",
    "ista_linear head_dim 3072 seqlen longer",
    "ista_gated head_dim 768 seqlen longer",
    "mssa_long",
    "tssa_persistent",
    "",  # all others
)


def dry_run(folder):
    """Search one small workload in the interpreter, and log it as on a GPU."""
    from crate_kernels.ops.ista.triton import tables
    from crate_kernels.ops.ista.triton import tune as ista

    cpu = torch.device("cpu")
    table = replace(tables.PRODUCT, candidates=tables.PRODUCT.candidates[:1])
    workload = tune.Workload(table, LaunchRow({}, 24, 64), ista._product(20, 16, 12, "cpu"))
    log = Log(folder / "tuning-log.jsonl")
    if str(workload) in log.found:
        return processes.DONE
    shipped = table.config(cpu, 24, 64, False, torch.float16)
    result = tune.search(
        workload,
        shipped,
        partial(clock.once, prepare=tuple, device=cpu),
        judge,
        timed=lambda number, seconds: log.add(workload, config=number, seconds=seconds),
    )
    log.add(workload, found=dict(result.config), seconds=result.seconds, shipped=result.shipped)
    return processes.DONE


def main(argv=None):
    parser = processes.parser(__doc__)
    parser.add_argument("--candidates", type=Path)
    args = parser.parse_args(argv)
    if args.dry_run:
        return dry_run(args.out)
    command = ["tune", "--minutes", f"{args.seconds / 60:.2f}", "--jobs", str(args.workers)]
    command += ["--max-configs", str(MAX_CONFIGS), *(f"--only={part}" for part in ORDER)]
    command += ["--log", str(args.out / "tuning-log.jsonl"), "--table", str(args.out / "tuned.json")]
    if args.candidates:
        command += ["--candidates", str(args.candidates)]
    status = cli.main(command)
    return processes.FAILED if status == 1 else status


if __name__ == "__main__":
    sys.exit(main())
