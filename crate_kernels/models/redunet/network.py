"""ReduNet: layers built one after the other from labelled data, in a single forward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from crate_kernels._core import checks
from crate_kernels.models._shared import fields
from crate_kernels.models.redunet.layers import ReduLayer
from crate_kernels.models.redunet.rates import mcr2


@dataclass(frozen=True)
class ReduNetConfig:
    """Config fields that every ReduNet has; the shape of a sample follows."""

    num_classes: int
    num_layers: int

    def __post_init__(self) -> None:
        fields.check_types("ReduNet", self)


class ReduNet(nn.Sequential):
    """A white-box network whose layers are gradient steps on the rate reduction (Chan et al. 2021).

    It takes any modules, with lifts before layers. In a run of layers, the first normalises its input (and
    transforms it, on signals and images); the last transforms it back.

    A slice is a ReduNet of these layers, which likewise normalises its own input.

    Args:
        *modules: ``Vector``, ``Fourier1D``, ``Fourier2D`` and other modules.
    """

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__(*modules)
        self._clear_loss()

    def __getitem__(self, idx: int | slice) -> Any:
        """Return a module, or a ReduNet of a slice of them under their names here."""
        if not isinstance(idx, slice):
            return super().__getitem__(idx)
        part = ReduNet()  # a published class is built of a config
        for name, module in list(self._modules.items())[idx]:
            part.add_module(name, module)
        return part

    @checks.closed
    def forward(self, input: Tensor, labels: Tensor | None = None, loss: bool = False, **unknown: NoReturn) -> Tensor:
        """Transform samples (m, ...).

        Args:
            input: samples, as the first module takes them.
            labels: (m,) classes for the rates of ``loss``; default None: each layer's own estimate, as
                published.
            loss: measure the rate reduction after each layer, for ``get_loss``; default False.
        """
        if isinstance(unknown, dict) and unknown:
            checks.no_keyword(ReduNet.forward, unknown)
        return self._run(input, lambda layer, z: None, labels, loss)

    @torch.no_grad()
    def init(self, X: Tensor, y: Tensor) -> Tensor:
        """Build every layer from samples and labels (m,); return the output of the last.

        Raises:
            TypeError: y is not a Tensor.
            ValueError: a shape or dtype that does not fit, or a class without a sample.
        """
        return self._run(X, lambda layer, z: layer.init(z, y), None, True)

    @torch.no_grad()
    def update(self, X: Tensor, y: Tensor, tau: float = 0.1) -> Tensor:
        """Move every layer by the fraction ``tau`` towards the layer that these samples would build.

        ``gam`` does not change, as published. Raises the same errors as ``init``.
        """
        tau = checks.number("ReduNet", "tau", tau)
        return self._run(X, lambda layer, z: layer.update(z, y, tau), None, True)

    def zero(self) -> ReduNet:
        """Set E and C_j of every layer to zero; return the network."""
        for module in self:
            if isinstance(module, ReduLayer):
                module.zero()
        return self

    def batch_forward(
        self, input: Tensor, batch_size: int = 1000, loss: bool = False, device: torch.device | str | None = None
    ) -> Tensor:
        """Transform samples in batches, each moved to ``device`` (the input's by default); outputs are on the CPU.

        ``get_loss`` then returns the values of the last batch.
        """
        checks.integer("ReduNet", "batch_size", batch_size, minimum=1)
        return torch.cat([self(batch.to(device), loss=loss).cpu() for batch in input.split(batch_size)])

    def get_loss(self) -> dict[str, list[float]]:
        """Return the rates that the last pass measured after each layer, given the layer's estimated classes.

        Returns:
            Lists ``layer`` (indices), ``loss_total`` (R - Rc), ``loss_expd`` (R) and ``loss_comp`` (Rc).
        """
        return self._losses

    def _clear_loss(self) -> None:
        self._losses: dict[str, list[float]] = {"layer": [], "loss_total": [], "loss_expd": [], "loss_comp": []}

    def _run(self, z: Tensor, build: Callable[[ReduLayer, Tensor], None], labels: Tensor | None, loss: bool) -> Tensor:
        self._clear_loss()
        modules = list(self)
        inside = False
        for index, module in enumerate(modules):
            if not isinstance(module, ReduLayer):
                z = module(z)
                continue
            if not inside:
                z, inside = module.preprocess(z), True
            build(module, z)
            z, estimated = module(z, return_y=True)
            if loss:
                measured = mcr2(z.detach(), estimated if labels is None else labels, module.eps)
                for name, value in zip(self._losses, (index, *measured), strict=True):
                    self._losses[name].append(value)
            if index + 1 == len(modules) or not isinstance(modules[index + 1], ReduLayer):
                z, inside = module.postprocess(z), False
        return z
