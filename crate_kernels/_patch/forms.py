"""What a module may compute: forms, each with a forward that calls an operator in the module's place."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from crate_kernels._patch import masks
from crate_kernels._patch.shadow import shadow_of
from crate_kernels.nn import _heads, _maps
from crate_kernels.ops.ista import ista, ista_overcomplete
from crate_kernels.ops.mssa import mssa
from crate_kernels.ops.tssa import tssa

PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_EMPTY = nn.Module()
_SOFTMAX: dict[int | None, str] = {-1: "softmax", 3: "softmax", 1: "softmax over heads", -2: "softmax over heads"}


@dataclass(frozen=True)
class ModuleForm:
    """One reading of a module: the role of each attribute.

    Attributes:
        kind: name that ``patch`` reports.
        op: the operator, as backends name it.
        tensors: parameters that the operator takes.
        numbers: attributes that the operator takes, read at each call.
        bypassed: children that the operator replaces, each with its ``label``.
        mask: the forward's mask argument, if there is one.
        assumed: other plain attributes, with their values at the time of the probe.
        maps: the module takes feature maps (batch, dim, height, width), and flattens them itself.
    """

    kind: str
    op: str
    tensors: tuple[str, ...]
    numbers: tuple[str, ...]
    bypassed: tuple[tuple[str, str], ...]
    mask: masks.Argument | None
    assumed: tuple[tuple[str, type, Any], ...]
    maps: bool

    def assuming(self, module: nn.Module) -> ModuleForm:
        """Return the form with the present values of the attributes that are not read at each call."""
        read = {*self.live(), *vars(_EMPTY)}
        others = ((name, type(value), value) for name, value in vars(module).items() if name not in read)
        return replace(self, assumed=tuple(item for item in others if isinstance(item[2], PLAIN)))

    def live(self) -> set[str]:
        """Return the attributes that are read at each call."""
        return set(self.numbers)

    def parts(self) -> set[str]:
        """Return the parameters and children that the form accounts for; any other would be ignored silently."""
        return {*self.tensors, *(name for name, _ in self.bypassed)}

    def weight(self, module: nn.Module) -> Tensor:
        """Return a parameter with the module's dtype and device."""
        raise NotImplementedError

    def token_dim(self, module: nn.Module) -> int:
        """Return the width of the tokens."""
        raise NotImplementedError

    def shape(self, module: nn.Module, batch: int, seqlen: int, rows: int = 2) -> tuple[int, ...]:
        """Return the shape of an input of ``seqlen`` tokens, or, of a map, of about as many in some rows."""
        dim = self.token_dim(module)
        return (batch, dim, rows, seqlen // rows) if self.maps else (batch, seqlen, dim)

    def ready(self, module: nn.Module, x: Tensor) -> bool:
        """Say if the operator equals the published forward now: all is as probed, bypassed children have no hooks."""
        if x.is_nested or (self.maps and x.dim() != 4):
            return False
        if not all(number(module, name) for name in self.numbers):
            return False
        for name, kind, value in self.assumed:
            current = vars(module).get(name)
            if current is not value and (type(current) is not kind or current != value):
                return False
        for name, known in self.bypassed:
            child: Any = module._modules.get(name)
            if label(child) != known or (child is not None and any(getattr(child, hooks) for hooks in HOOKS)):
                return False
        return True

    def options(self, x: Tensor, mask: Any) -> dict[str, Any] | None:
        """Return the operator's options for the mask of a call; None if only the published forward can take it."""
        return {} if mask is None else None

    def run(self, module: Any, x: Tensor, backend: str | None, options: dict[str, Any]) -> Tensor:
        """Return the module's output; ``options`` are the operator's options for the mask of the call."""
        raise NotImplementedError


@dataclass(frozen=True)
class AttentionForm(ModuleForm):
    """Attention with one projection.

    Attributes:
        projection: child that projects the tokens for the operator.
        heads: attribute with the number of heads.
        after: children through which the output goes.
        causal, phi: options of the operator.
        scale: attribute, or the number itself; None is head_dim ** -0.5.
        dropout: child, or attribute, with the dropout rate of the operator.
    """

    projection: str
    heads: str
    after: tuple[str, ...]
    causal: bool = False
    phi: str = "softmax"
    scale: str | float | None = None
    dropout: str | None = None

    def live(self) -> set[str]:
        return super().live() | {self.heads, self.dropout or ""}

    def parts(self) -> set[str]:
        return super().parts() | {self.projection, *self.after}

    def weight(self, module: nn.Module) -> Tensor:
        own = (*module.get_submodule(self.projection).parameters(), *module.parameters())
        return next(p for p in own if p.is_floating_point())

    def token_dim(self, module: nn.Module) -> int:
        return linear_sizes(module._modules[self.projection])[1]

    def ready(self, module: nn.Module, x: Tensor) -> bool:
        # At a rate of 1 the published dropout gives zeros; the operators refuse that rate.
        return x.dim() == (4 if self.maps else 3) and super().ready(module, x) and self.rate(module) < 1.0

    def options(self, x: Tensor, mask: Any) -> dict[str, Any] | None:
        return super().options(x, mask) if self.mask is None else self.mask.options(mask, x, self.causal)

    def rate(self, module: nn.Module) -> float:
        """Return the operator's dropout rate."""
        if self.dropout is None:
            return 0.0
        child: Any = module._modules.get(self.dropout)
        if child is None:
            return vars(module)[self.dropout] if module.training else 0.0
        return child.p if child.training else 0.0

    def run(self, module: Any, x: Tensor, backend: str | None, options: dict[str, Any]) -> Tensor:
        projection, heads = getattr(module, self.projection), getattr(module, self.heads)
        size = x.shape[2:] if self.maps else None
        convolved = isinstance(projection, nn.Conv2d)
        projected = projection(x.flatten(2).mT if self.maps and not convolved else x)
        projected = projected.flatten(2).mT if convolved else projected
        # The width of the whole: under tensor parallelism this process has a part.
        width = linear_sizes(projection)[0] or projected.shape[-1]
        options = {"causal": self.causal, "backend": backend, **options}
        if self.op == "mssa":
            w = _heads.split_local("patch", projected, width // heads)
            options["dropout_p"] = _heads.check_dropout("patch", self.rate(module), w, heads)
            scale = getattr(module, self.scale) if isinstance(self.scale, str) else self.scale
            out = mssa(w, scale=scale, phi=self.phi, **options)
        else:
            w = _heads.split(_heads.whole("patch", projected, width, _heads.SOFTMAX_OVER_HEADS), heads)
            temp, *bias = (getattr(module, name) for name in self.tensors)
            out = tssa(w, temp, denom_bias=bias[0] if bias else None, dropout_p=self.rate(module), **options)
        out = _heads.merge(out)
        out = _maps.map_of(out, size) if convolved else out
        for name in self.after:
            out = getattr(module, name)(out)
        return out if convolved else _maps.map_of(out, size)


@dataclass(frozen=True)
class SparseForm(ModuleForm):
    """ISTA: plain for ``steps`` = 0, else overcomplete with ``steps`` steps, a number or an attribute's name.

    Attributes:
        step: attributes with the step size and the threshold, numbers or tensors.
        transposed: the module's weight is the transpose of the operator's dictionary.
        steps: number of proximal steps, or the attribute with it.
        deep: inputs of four axes and more are tokens too.
    """

    step: tuple[str, str]
    transposed: bool
    steps: str | int
    deep: bool = True

    def live(self) -> set[str]:
        return super().live() | {str(self.steps)}

    def parts(self) -> set[str]:
        return super().parts() | set(self.step)

    def weight(self, module: nn.Module) -> Tensor:
        weight = tensor(module, self.tensors[0])
        assert weight is not None
        return weight

    def token_dim(self, module: nn.Module) -> int:
        return self.weight(module).shape[1 if self.transposed else 0]

    def ready(self, module: nn.Module, x: Tensor) -> bool:
        return (x.dim() < 4 or self.maps or self.deep) and super().ready(module, x)

    def run(self, module: Any, x: Tensor, backend: str | None, options: dict[str, Any]) -> Tensor:
        if self.maps:
            tokens = replace(self, maps=False).run(module, x.flatten(2).mT, backend, options)
            return _maps.map_of(tokens, x.shape[2:])
        step_size, lambd = (getattr(module, name) for name in self.step)
        weights = [getattr(module, name) for name in self.tensors]
        if self.transposed:
            weights = [weight.t() for weight in weights]
        if self.steps == 0:
            return ista(x, weights[0], step_size=step_size, lambd=lambd, backend=backend)
        steps = getattr(module, self.steps) if isinstance(self.steps, str) else self.steps
        return ista_overcomplete(x, *weights, step_size=step_size, lambd=lambd, steps=steps, backend=backend)


def label(child: Any) -> str:
    """Name the function of a child; "other" where no operator can replace it."""
    if child is None:
        return "nothing"
    if type(child) is nn.Softmax:
        return _SOFTMAX.get(child.dim, "other")
    return {nn.Dropout: "dropout", nn.Identity: "identity", nn.ReLU: "relu"}.get(type(child), "other")


def tensor(module: nn.Module, name: str) -> Tensor | None:
    """Return a parameter, a buffer, or the tensor that a parametrization or pruning computes under that name."""
    if is_parametrized(module, name):  # ask a shadow: a parametrization may count its calls
        with torch.no_grad():
            return getattr(shadow_of(module, lambda _, t: t.clone(), False, itertools.repeat(0.0)), name)
    value = module._parameters.get(name, module._buffers.get(name, vars(module).get(name)))
    return value if isinstance(value, Tensor) else None


def number(module: nn.Module, name: str) -> bool:
    """Say if an attribute is a plain number."""
    value = vars(module).get(name)
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def linear_sizes(child: Any) -> tuple[int, int]:
    """Return (out_features, in_features) of a linear child or a convolution of single pixels; zeros for any other."""
    if isinstance(child, nn.Conv2d):
        plain = child.kernel_size == child.stride == (1, 1) and child.padding in (0, (0, 0)) and child.groups == 1
        return (child.out_channels, child.in_channels) if plain else (0, 0)
    sizes = getattr(child, "out_features", 0), getattr(child, "in_features", 0)
    return sizes if all(type(size) is int for size in sizes) else (0, 0)
