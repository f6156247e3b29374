"""Tensor parallelism: which weights of a model are cut, and how."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from crate_kernels._core import checks
from crate_kernels.models import tost, tost_lm
from crate_kernels.models.aot import layers as aot
from crate_kernels.models.crate import RateGradientStep
from crate_kernels.nn import MSSA, CausalMSSA

Model = TypeVar("Model", bound=nn.Module)

_NAME = "tensor_parallel"


@checks.suggesting
def tensor_parallel(model: Model, mesh: DeviceMesh) -> Model:
    """Cut the heads of subspace attention, and the hidden units of MLPs, over the ranks of a mesh.

    Input projections are cut by columns and output projections by rows, so that each pair costs one all-reduce forward
    and one backward; a tied projection is cut once. All else is whole in every rank and gets the same gradient there:
    dictionaries, whose square products would cost as much in two halves as whole (shard their memory by
    ``fully_shard``); token statistics, whose softmax is over the heads (shard the tokens by ``sequence_parallel``);
    attention with three projections in one weight; embeddings and heads of models.

    Ranks must be given the same inputs, and draw the same dropout: give them one seed, also where ``generate`` draws
    tokens; its caches have the heads that are here. Dropout of attention weights, and of hidden units, is refused in
    training. With ``fully_shard``, cut first, then shard over another dimension of the mesh.

    Args:
        model: a model of ``crate_kernels.models``, a module of ``crate_kernels.nn``, or blocks of them; changed in
            place.
        mesh: a DeviceMesh of one dimension, whose size divides the heads.

    Returns:
        ``model``.

    Raises:
        TypeError, ValueError: a mesh or model that does not fit.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"{_NAME}: mesh must be a DeviceMesh, got {type(mesh).__name__}")
    if mesh.ndim != 1:
        raise ValueError(f"{_NAME}: mesh must be one dimension of a DeviceMesh, got {mesh.ndim}")
    checks.module(_NAME, "model", model)
    plan = _plan(model, mesh.size())
    if not plan:
        raise ValueError(f"{_NAME}: model must have subspace attention or an MLP, got {type(model).__name__} without")
    for module in model.modules():
        if isinstance(module, tost.ToSTMLP):
            module.register_forward_pre_hook(_refuse_dropout)
    parallelize_module(model, mesh, plan)
    return model


def _plan(model: nn.Module, size: int) -> dict[str, ParallelStyle]:
    """Return the names of the linear layers that are cut, and how each is."""
    plan: dict[str, ParallelStyle] = {}
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        cut = _pair(module)
        if cut is None:
            continue
        columns, rows, units = cut
        if units % size:
            kind = type(module).__name__
            raise ValueError(
                f"{_NAME}: ranks must divide heads and units, got {size} ranks and {units} of {kind} {name}"
            )
        for layer in (columns, rows):
            _require_linear(prefix, layer, module)
        plan[prefix + columns] = ColwiseParallel()
        if rows is not None:
            plan[prefix + rows] = RowwiseParallel()
    return plan


def _require_linear(prefix: str, name: str | None, module: nn.Module) -> None:
    """Require a linear layer that holds its weight, which is to be cut."""
    layer = None if name is None else module.get_submodule(name)
    if layer is not None and not (
        isinstance(layer, nn.Linear) and "weight" in layer._parameters and "forward" not in vars(layer)
    ):
        raise ValueError(
            f"{_NAME}: {prefix}{name} must be a linear layer that holds its weight, got {type(layer).__name__}: "
            "cut the model before layers are adapted, quantised, parametrised or offloaded"
        )


def _pair(module: nn.Module) -> tuple[str, str | None, int] | None:
    """Return the layer that is cut by columns, the one by rows if there is one, and what they have in common."""
    if isinstance(module, MSSA):
        return "qkv", "to_out.0" if isinstance(module.to_out, nn.Sequential) else None, module.heads
    if isinstance(module, RateGradientStep):
        return "qkv", None, module.heads
    if isinstance(module, CausalMSSA):
        return "c_attn", "c_proj", module.n_head
    if isinstance(module, tost_lm.ToSTLMMLP):
        return "c_fc", "c_proj", module.c_fc.out_features
    if isinstance(module, tost.ToSTMLP):
        return "fc1", "fc2", module.fc1.out_features
    if isinstance(module, aot.Layer) and module.mlp is not None:
        wide: Any = module.mlp[0]
        return "mlp.0", "mlp.2", wide.out_features
    return None


def _refuse_dropout(module: Any, *_: Any) -> None:
    if module.training and module.drop.p:
        raise NotImplementedError(
            f"{_NAME}: dropout of hidden units must be 0 in training, got {module.drop.p}: all ranks would draw alike"
        )
