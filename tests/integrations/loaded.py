"""Loads a folder in eight processes at once, by transformers and by us; each writes the sums of its weights."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

from tests.integrations import conftest  # noqa: F401 (torchvision)

torch.set_num_threads(1)
from transformers import AutoModelForCausalLM  # noqa: E402

import crate_kernels.integrations.transformers  # noqa: E402, F401 (registers)
from crate_kernels import models  # noqa: E402

SIZE = 8


def load(rank, folder):
    """Load in one process, named as torchrun names it, while all others do."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(SIZE))
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), SIZE), rank=rank, world_size=SIZE)
    dist.barrier()
    loaded = [read(folder / "model") for read in (AutoModelForCausalLM.from_pretrained, models.from_pretrained)]
    sums = [sum(p.double().sum().item() for p in model.parameters()) for model in loaded]
    (folder / f"{rank}.json").write_text(json.dumps(sums))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    # Forked: importing transformers takes seconds.
    torch.multiprocessing.start_processes(load, (Path(sys.argv[1]),), SIZE, start_method="fork")
