"""Runs cases in several processes at once; each case takes the group and raises where something is wrong."""

import importlib
import json
import time
import traceback
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.tools import processes

# Each has a dict CASES.
MODULES = (
    "sharding_cases",
    "mssa_cases",
    "tssa_cases",
    "traffic_cases",
    "sequence_cases",
    "dtensor_cases",
    "tensor_cases",
    "training_cases",
    "page_cases",
)


def cases(modules):
    return {
        name: case
        for module in modules
        for name, case in importlib.import_module(f"tests.distributed.{module}").CASES.items()
    }


def work(rank, folder, size, names, modules):
    """Run the cases of these names in this process, and write down what failed."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(minutes=5))
    failed = {}
    for name in names:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                # A group per case: where one process fails, another may wait for it in vain, in this group alone.
                group = dist.new_group(timeout=timedelta(seconds=15))
                cases(modules)[name](group)
        except (Exception, SystemExit, pytest.fail.Exception):
            failed[name] = traceback.format_exc()
        dist.barrier()
        dist.destroy_process_group(group)  # its threads wake a hundred times a second
    dist.destroy_process_group()
    (folder / f"{rank}.json").write_text(json.dumps(failed))


def run(folder, size, names, modules):
    """Return what failed, by process; starting the processes takes longer than all cases."""
    processes.spawn(work, (folder, size, list(names), modules), size)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


def run_once(folder, *what):
    """Of the processes of pytest that have a part of the cases, one runs them, and the others read what failed."""
    try:
        folder.mkdir()
    except FileExistsError:
        while not (folder / "ended").exists():
            time.sleep(0.2)
        return json.loads((folder / "failed.json").read_text())
    try:
        failed = run(folder, *what)
        (folder / "failed.json").write_text(json.dumps(failed))
    finally:
        (folder / "ended").touch()
    return failed
