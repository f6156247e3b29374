"""A checkpoint of two processes is loaded by three, saved again and loaded by one: no bit of it changes."""

import copy
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from crate_kernels import models
from crate_kernels.distributed import tensor_parallel
from tests.distributed.sharded_cases import BLOCKS
from tests.distributed.tensor_cases import HEADS
from tests.distributed.training_cases import checkpoints
from tests.models import families
from tests.tools import processes

pytestmark = pytest.mark.exhaustive
FAMILIES = ("crate_lm", "tost_lm", "crate_alpha")
# Processes, and how many of them share a layer; the others cut the weights.
CHAINS = {"weights": ((2, 1), (3, 1), (1, 1)), "layers": ((4, 2), (3, 3), (2, 1), (1, 1))}


def cut(model, family, size, tensor):
    if size == 1:
        return model
    mesh = init_device_mesh("cpu", (size // tensor, tensor), mesh_dim_names=("data", "tensor"))
    if tensor > 1:
        tensor_parallel(model, mesh["tensor"])
    for part in (*BLOCKS[family](model), model):
        fully_shard(part, mesh=mesh["data"])
    return model


def step(model, family, optimiser):
    families.output(family, model(*families.inputs(family))).square().mean().backward()
    optimiser.step()
    optimiser.zero_grad()


def work(rank, folder, size, tensor, number):
    """Train if this is the first link of the chain, else load what the last one saved; save."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / f"store-{number}"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(minutes=2))
    for family in FAMILIES:
        model = cut(families.drawn(families.build(family, **HEADS[family]), seed=number), family, size, tensor)
        optimiser = torch.optim.AdamW(model.parameter_groups(0.1), lr=1e-2 if number == 0 else 1.0)
        place = folder / family
        if rank == 0:
            place.mkdir(exist_ok=True)
        dist.barrier()
        if number == 0:
            for _ in range(3):
                step(model, family, optimiser)
        else:
            assert checkpoints.newest(place) == number
            checkpoints.load(place, number, model, optimiser)
        whole = get_state_dict(model, optimiser, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(copy.deepcopy(whole), place / f"whole-{number}.pt")
        checkpoints.save(place, model, optimiser, number + 1, keep=9)
        checkpoints.export(place / f"model-{number}", model)
    dist.destroy_process_group()


def tensors(tree, name=""):
    """Every tensor and number of nested dicts and lists, by path."""
    if isinstance(tree, dict):
        return {k: v for key, value in tree.items() for k, v in tensors(value, f"{name}.{key}").items()}
    if isinstance(tree, (list, tuple)):
        return {k: v for key, value in enumerate(tree) for k, v in tensors(value, f"{name}.{key}").items()}
    return {name: tree}


@pytest.mark.parametrize("chain", CHAINS)
def test_every_bit_is_kept(chain, tmp_path):
    for number, (size, tensor) in enumerate(CHAINS[chain]):
        processes.spawn(work, (tmp_path, size, tensor, number), size)
    for family in FAMILIES:
        first = tensors(torch.load(tmp_path / family / "whole-0.pt"))
        assert sum(name.endswith("exp_avg_sq") for name in first) > 10
        for number in range(1, len(CHAINS[chain])):
            other = tensors(torch.load(tmp_path / family / f"whole-{number}.pt"))
            assert first.keys() == other.keys()
            for name, value in first.items():
                same = torch.equal(value, other[name]) if torch.is_tensor(value) else value == other[name]
                assert same, name
        weights = models.from_pretrained(tmp_path / family / "model-0").state_dict()
        for number in range(len(CHAINS[chain])):
            saved = models.from_pretrained(tmp_path / family / f"model-{number}").state_dict()
            assert all(torch.equal(saved[name], weight) for name, weight in weights.items())
            assert all(torch.equal(weight, first[f".0.{name}"]) for name, weight in weights.items())
