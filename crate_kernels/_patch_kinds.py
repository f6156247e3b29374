"""The published modules that can be patched: how to recognise each, and its forward through an operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from crate_kernels.nn._heads import merge, split
from crate_kernels.ops.ista import ista, ista_overcomplete
from crate_kernels.ops.mssa import mssa
from crate_kernels.ops.tssa import tssa

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True)
class Kind:
    """A published module: how to recognise it by structure, and its forward through an operator.

    Attributes:
        op: the operator, as backends name it.
        fits: whether a module has the parts.
        parts: every parameter and child it may have; another one would be passed over silently.
        bypassed: children whose work the operator does, and what they must be.
        run: from (module, tokens, backend) to the output.
    """

    op: str
    fits: Callable[[nn.Module], bool]
    parts: frozenset[str]
    bypassed: Mapping[str, Callable[[Any], bool]]
    run: Callable[[Any, Tensor, str | None], Tensor]


def _number(module: nn.Module, name: str) -> bool:
    value = vars(module).get(name)
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _heads(module: nn.Module, name: str, width: int) -> bool:
    heads = vars(module).get(name)
    return type(heads) is int and heads > 0 and width % heads == 0


def _matrix(module: nn.Module, name: str) -> Tensor | None:
    parameter = module._parameters.get(name)
    return parameter if parameter is not None and parameter.dim() == 2 else None


def _fits_mssa(module: nn.Module) -> bool:
    qkv = module._modules.get("qkv")
    linear = isinstance(qkv, nn.Linear) and qkv.bias is None and _heads(module, "heads", qkv.out_features)
    return linear and _number(module, "scale")


def _fits_tssa(module: nn.Module) -> bool:
    qkv, temp = module._modules.get("qkv"), _matrix(module, "temp")
    linear = isinstance(qkv, nn.Linear) and _heads(module, "heads", qkv.out_features)
    return linear and temp is not None and temp.shape == (vars(module)["heads"], 1)


def _fits_causal_tssa(module: nn.Module) -> bool:
    c_attn, temp, bias = module._modules.get("c_attn"), _matrix(module, "temp"), module._parameters.get("denom_bias")
    if not (isinstance(c_attn, nn.Linear) and _heads(module, "n_head", c_attn.out_features)):
        return False
    heads = vars(module)["n_head"]
    return temp is not None and temp.shape == (heads, 1) and bias is not None and bias.shape[::2] == (heads, 1)


def _fits_ista(module: nn.Module) -> bool:
    weight = _matrix(module, "weight")
    square = weight is not None and weight.shape[0] == weight.shape[1]
    return square and _number(module, "step_size") and _number(module, "lambd")


def _fits_overcomplete(module: nn.Module) -> bool:
    code, decoder = _matrix(module, "D"), _matrix(module, "D1")
    pair = code is not None and decoder is not None and code.shape == decoder.shape
    return pair and _number(module, "eta") and _number(module, "lmbda")


def _phi(attend: Any) -> str | None:
    """Name what an attention module does to its scores."""
    if type(attend) is nn.Softmax and attend.dim in (-1, 3):
        return "softmax"
    return "identity" if type(attend) is nn.Identity else None


def _dropout(child: Any) -> bool:
    return child is None or type(child) is nn.Dropout


def _rate(module: Any, name: str) -> float:
    child = getattr(module, name, None)
    return child.p if child is not None and child.training else 0.0


def _run_mssa(module: Any, x: Tensor, backend: str | None) -> Tensor:
    w, phi = split(module.qkv(x), module.heads), _phi(module.attend) or "softmax"
    rate = _rate(module, "dropout")
    out = merge(mssa(w, scale=module.scale, dropout_p=rate, phi=phi, backend=backend))
    return module.to_out(out) if "to_out" in module._modules else out


def _run_tssa(module: Any, x: Tensor, backend: str | None) -> Tensor:
    w, rate = split(module.qkv(x), module.heads), _rate(module, "attn_drop")
    return module.to_out(merge(tssa(w, module.temp, dropout_p=rate, backend=backend)))


def _run_causal_tssa(module: Any, x: Tensor, backend: str | None) -> Tensor:
    w, rate = split(module.c_attn(x), module.n_head), _rate(module, "attn_dropout")
    bias = module.denom_bias
    out = tssa(w, module.temp, causal=True, denom_bias=bias, dropout_p=rate, backend=backend)
    return module.resid_dropout(module.c_proj(merge(out)))


def _run_ista(module: Any, x: Tensor, backend: str | None) -> Tensor:
    return ista(x, module.weight, step_size=module.step_size, lambd=module.lambd, backend=backend)


def _run_overcomplete(module: Any, x: Tensor, backend: str | None) -> Tensor:
    numbers = {"step_size": module.eta, "lambd": module.lmbda}
    return ista_overcomplete(x, module.D, module.D1, steps=2, backend=backend, **numbers)


KINDS = {
    "mssa": Kind(
        "mssa",
        _fits_mssa,
        frozenset({"qkv", "attend", "dropout", "to_out"}),
        {"attend": lambda child: _phi(child) is not None, "dropout": _dropout},
        _run_mssa,
    ),
    "tssa": Kind(
        "tssa",
        _fits_tssa,
        frozenset({"qkv", "temp", "attend", "attn_drop", "to_out"}),
        {"attend": lambda child: type(child) is nn.Softmax and child.dim == 1, "attn_drop": _dropout},
        _run_tssa,
    ),
    "causal tssa": Kind(
        "tssa",
        _fits_causal_tssa,
        frozenset({"c_attn", "c_proj", "temp", "denom_bias", "attn_dropout", "resid_dropout"}),
        {"attn_dropout": _dropout},
        _run_causal_tssa,
    ),
    "ista": Kind("ista", _fits_ista, frozenset({"weight"}), {}, _run_ista),
    "ista_overcomplete": Kind("ista", _fits_overcomplete, frozenset({"D", "D1"}), {}, _run_overcomplete),
}


def fusible(module: nn.Module, kind: Kind, x: Tensor) -> bool:
    """Whether the operator does what the published forward would: bypassed children unhooked and as known."""
    if kind.op != "ista" and x.dim() != 3:
        return False
    for name, known in kind.bypassed.items():
        child: Any = module._modules.get(name)
        if not known(child):
            return False
        if child is not None and any(getattr(child, hooks) for hooks in HOOKS):
            return False
    return True
