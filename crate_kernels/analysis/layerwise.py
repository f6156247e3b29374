"""Measurements of compression and sparsification, layer by layer, while a model runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from crate_kernels._core import checks

from .rates import projected_coding_rate, sparsity

_EXPECTED = "(PreNorm(norm, fn with .qkv and .heads), PreNorm(norm, fn))"


@dataclass(frozen=True, eq=False)
class LayerMeasurement:
    """Measurements of one layer on a batch; every field is a tensor (batch,), so the user takes mean and spread.

    Attributes:
        rate_input: The measure of ``qkv(norm_1(Z))``, the projection of the block's INPUT. The published hooks
            plot this value under the name of the attention block.
        rate_half: The measure of ``qkv(norm_2(Z'))``, ``Z' = Z + MSSA(norm_1(Z))`` (or whatever the model
            feeds its second half): the same subspaces after compression, normalised by the ISTA block's
            own ``norm_2``. This is the quantity the papers describe.
        sparsity: Fraction of nonzeros in the output of the ISTA block, before a residual if there is one.
    """

    rate_input: Tensor
    rate_half: Tensor
    sparsity: Tensor


def _unit_norm_rate(w: Tensor) -> Tensor:
    return projected_coding_rate(nn.functional.normalize(w.double(), dim=-1))


def _observe(layer: Any, record: dict[str, Tensor], measure: Callable[[Tensor], Tensor]) -> list[RemovableHandle]:
    """Hook one layer; the hooks fill ``record``."""
    attention, ista = layer
    qkv, nheads, norm = attention.fn.qkv, attention.fn.heads, ista.norm

    def projected(output: Tensor) -> Tensor:
        return measure(output.unflatten(-1, (nheads, -1)).transpose(-3, -2))

    def on_qkv(_module: nn.Module, _args: tuple[Any, ...], output: Tensor) -> None:
        record["rate_input"] = projected(output)

    def on_ista_input(_module: nn.Module, args: tuple[Any, ...]) -> None:
        # .forward: a second projection through __call__ would fire on_qkv again
        record["rate_half"] = projected(qkv.forward(norm.forward(args[0])))

    def on_ista_output(_module: nn.Module, _args: tuple[Any, ...], output: Tensor) -> None:
        record["sparsity"] = sparsity(output)

    return [
        qkv.register_forward_hook(on_qkv),
        ista.register_forward_pre_hook(on_ista_input),
        ista.register_forward_hook(on_ista_output),
    ]


@checks.suggesting
def layerwise(
    model: nn.Module,
    x: Tensor,
    *,
    measure: Callable[[Tensor], Tensor] | None = None,
    layers: Iterable[nn.Module] | None = None,
) -> list[LayerMeasurement]:
    """Run ``model(x)`` and measure each layer's coding rate Rc and sparsity (CRATE, the layer-wise figures).

    The model runs in eval mode without gradients. Afterwards its modes are restored and the hooks removed, also
    after an error.

    Args:
        model: A CRATE-like model, published or ours.
        x: Input of the model; a batch.
        measure: From projected tokens (batch, nheads, seqlen, head_dim) to a tensor (batch,). By default
            None: ``projected_coding_rate`` of tokens scaled to unit norm with eps_squared 0.01, as the
            published code measures (a zero token gives nan there, and counts as zero here).
        layers: The layers to measure, each a pair ``(PreNorm(norm, fn with .qkv and .heads),
            PreNorm(norm, fn))``. By default None: ``model.transformer.layers``. For CRATE-MAE,
            ``[block.layers[0] for block in model.blocks]``.

    Returns:
        One ``LayerMeasurement`` per layer, in order.

    Raises:
        TypeError: model is not a Module, or a layer is not such a pair.
        RuntimeError: A layer did not call its submodules, so nothing could be measured.
    """
    checks.module("layerwise", "model", model)
    if layers is None:
        layers = getattr(getattr(model, "transformer", None), "layers", None)
        if layers is None:
            name = type(model).__name__
            raise TypeError(f"layerwise: {name} must have transformer.layers, each {_EXPECTED}; or pass layers")
    modes = [(module, module.training) for module in model.modules()]
    records: list[dict[str, Tensor]] = []
    handles: list[RemovableHandle] = []
    try:
        for index, layer in enumerate(layers):
            records.append({})
            try:
                handles += _observe(layer, records[-1], measure or _unit_norm_rate)
            except (AttributeError, TypeError, ValueError) as error:
                raise TypeError(f"layerwise: layer {index} must be {_EXPECTED}: {error}") from None
        model.eval()
        with torch.no_grad():
            model(x)
    finally:
        for handle in handles:
            handle.remove()
        for module, training in modes:
            module.training = training
    for index, record in enumerate(records):
        if len(record) < 3:
            raise RuntimeError(f"layerwise: layer {index} did not call its qkv and second block")
    return [LayerMeasurement(**record) for record in records]
