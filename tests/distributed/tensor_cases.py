"""``tensor_parallel``: models of which each process has some heads and hidden units, against one process."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from crate_kernels.distributed import sequence_parallel, tensor_parallel
from crate_kernels.nn import MSSA, TSSA
from tests.distributed.common import same, same_gradients
from tests.distributed.sequence_cases import blocks, made
from tests.models import families
from tests.nn.adapters import LowRank, replaced

HEADS = {
    "crate": {"heads": 6},
    "crate_alpha": {"heads": 6},
    "crate_lm": {"n_head": 6},
    "crate_lm_overcomplete": {"n_head": 6},
    "aot_lm": {"n_head": 6, "mlp": True},
    "tost": {},
    "tost_lm": {},
}


def mesh_of(group):
    size = dist.get_world_size(group)
    return init_device_mesh("cpu", (1, size), mesh_dim_names=("data", "tensor"))


def cut(model):
    """How many parameters are cut."""
    return sum(hasattr(p, "device_mesh") and p.placements[-1].is_shard() for p in model.parameters())


def equal_to_one(family, **changes):
    def run(group):
        expected = made(family, **HEADS[family], **changes).eval()
        model = tensor_parallel(copy.deepcopy(expected), mesh_of(group)["tensor"])
        assert cut(model)
        inputs = families.inputs(family, dtype=torch.float64)
        out, wanted = families.output(family, model(*inputs)), families.output(family, expected(*inputs))
        same(out, wanted)
        out.square().mean().backward()
        wanted.square().mean().backward()
        same_gradients(model, expected)

    return run


def sharded_too(group):
    """fully_shard over the other dimension of the mesh."""
    mesh = mesh_of(group)
    expected = made("crate_lm", n_head=6)
    model = tensor_parallel(copy.deepcopy(expected), mesh["tensor"])
    for part in blocks(model):
        fully_shard(part, mesh=mesh["data"])
    assert model.new_caches(1, 3)[0].data.shape == (1, 6 // dist.get_world_size(group), 3, 4)
    (tokens,) = families.inputs("crate_lm")
    model(tokens, tokens)[1].backward()
    expected(tokens, tokens)[1].backward()
    same_gradients(model, expected)


def sequence_too(group):
    """sequence_parallel over the other dimension of the mesh."""
    size = dist.get_world_size(group)
    for shape in ((1, size), (size, 1)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("sequence", "tensor"))
        expected = made("crate_lm", n_head=6)
        model = tensor_parallel(copy.deepcopy(expected), mesh["tensor"])
        sequence_parallel(model, mesh["sequence"])
        (tokens,) = families.inputs("crate_lm")
        same(model(tokens, tokens)[1], expected(tokens, tokens)[1])
        model(tokens, tokens)[1].backward()
        expected(tokens, tokens)[1].backward()
        same_gradients(model, expected)


def normed(module):
    """A module whose output projection is computed before each call."""
    torch.nn.utils.parametrizations.weight_norm(module.to_out[0])
    return module


def refused(group):
    mesh = mesh_of(group)
    for error, message, call in (
        (
            TypeError,
            r"tensor_parallel: mesh must be a DeviceMesh, got ProcessGroup",
            lambda: tensor_parallel(MSSA(4), group),
        ),
        (ValueError, r"tensor_parallel: mesh must be one dimension .*, got 2", lambda: tensor_parallel(MSSA(4), mesh)),
        (TypeError, r"tensor_parallel: model must be a Module, got int", lambda: tensor_parallel(1, mesh["tensor"])),
        (
            ValueError,
            r"tensor_parallel: model must have subspace attention or an MLP, got TSSA without",
            lambda: tensor_parallel(TSSA(8, 2), mesh["tensor"]),
        ),
        (
            ValueError,
            r"tensor_parallel: ranks must divide heads and units, got \d ranks and 5 of MSSA 0",
            lambda: tensor_parallel(torch.nn.Sequential(MSSA(8, 5, 2)), mesh["tensor"]),
        ),
        (
            ValueError,
            r"tensor_parallel: 0\.qkv must be a linear layer that holds its weight, got LowRank: cut the model before",
            lambda: tensor_parallel(
                replaced(torch.nn.Sequential(MSSA(8, 6, 2)), torch.nn.Linear, LowRank), mesh["tensor"]
            ),
        ),
        (
            ValueError,
            r"tensor_parallel: to_out\.0 must be a linear layer that holds its weight, got ParametrizedLinear",
            lambda: tensor_parallel(normed(MSSA(8, 6, 2)), mesh["tensor"]),
        ),
    ):
        with pytest.raises(error, match=message):
            call()
    model = tensor_parallel(families.build("tost", drop_rate=0.5), mesh["tensor"])
    with pytest.raises(NotImplementedError, match=r"tensor_parallel: dropout of hidden units must be 0 in training"):
        model.blocks[0](torch.zeros(1, 3, 24))
    model.eval().blocks[0](torch.zeros(1, 3, 24))


CASES = {
    **{f"tensor-{family}": equal_to_one(family) for family in HEADS},
    # Outside training nothing is drawn, so that nothing is refused.
    **{
        f"tensor-{family}-dropout-eval": equal_to_one(family, **{name: 0.5})
        for family, name in (
            ("crate", "dropout"),
            ("crate_lm", "dropout"),
            ("aot_lm", "dropout"),
            ("tost", "drop_rate"),
        )
    },
    "tensor-crate-tied": equal_to_one("crate", attention="tied"),
    "tensor-crate-gradient": equal_to_one("crate", attention="gradient"),
    "tensor-fsdp": sharded_too,
    "tensor-sequence": sequence_too,
    "tensor-refused": refused,
}
