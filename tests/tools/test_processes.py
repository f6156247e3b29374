import sys
import time

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

from tests.tools import processes

KEPT = []


def work(rank, folder):
    """Leave gloo's threads waiting for Python's lock: they have tensors to let go of, and this thread gives none."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
    KEPT.append(dist.group.WORLD)
    sys.setswitchinterval(100)
    (folder / f"done-{rank}").touch()
    KEPT.extend(torch.ones(10) for _ in range(100))
    for tensor in KEPT[1:]:
        dist.all_reduce(tensor)
    until = time.perf_counter() + 0.1
    while time.perf_counter() < until:
        pass


def test_threads_that_let_go_of_tensors_abort_no_process(tmp_path):
    processes.spawn(work, (tmp_path,), 2)
    assert {path.name for path in tmp_path.glob("done-*")} == {"done-0", "done-1"}


def fail(rank):
    raise ValueError(f"of process {rank}")


def test_what_a_process_raises_is_raised():
    with pytest.raises(torch.multiprocessing.ProcessRaisedException, match="ValueError: of process 0"):
        processes.spawn(fail, (), 1)
