"""Tensor parallelism and ``fully_shard`` in two processes: equal to one, or refused."""

import json
import traceback
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.sharded.cases import CASES
from tests.tools import processes

RANKS = 2


def work(rank, folder):
    """Run every case in this process and write down what failed."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    mesh = init_device_mesh("cpu", (RANKS,))
    failed = {}
    for name, case in CASES.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                case(mesh)
        except (Exception, pytest.fail.Exception):
            failed[name] = traceback.format_exc()
        dist.barrier()
    dist.destroy_process_group()
    (folder / f"{rank}.json").write_text(json.dumps(failed))


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    """What failed, of all cases, by process: starting the processes takes longer than all of them."""
    folder = tmp_path_factory.mktemp("ranks")
    processes.spawn(work, (folder,), RANKS)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("name", CASES)
def test_two_processes(name, failures):
    told = [f"process {rank}:\n{failed[name]}" for rank, failed in enumerate(failures) if name in failed]
    assert not told, "\n".join(told)
