"""Whether a module computes what an operator computes: two probes, on a shadow of the module.

The first draws every parameter anew, in float64 on the CPU, and compares outputs and gradients with the
equations: zero-initialised biases and stop-gradients cannot hide there. The second runs the chosen
backend with the module's own parameters, dtype and device. A shadow has the module's classes and
attributes without its hooks, so that nothing of the user's is called, moved or left behind.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from crate_kernels import _backend
from crate_kernels._patch_kinds import Kind

# A module may do part of its work in float32: some dozen roundings of 1.2e-7. Another function differs by
# far more: the smallest published constant, a threshold of 0.01 on tokens of size 1, is a thousand times that.
_SAME_FUNCTION = 1e-5
# Roundings to the module's dtype between input and output, published (about ten) and fused together.
_ROUNDINGS = 16
_SEQLEN = 7
_MODULE_STATE = frozenset(vars(nn.Module()))


def signature(module: nn.Module) -> tuple | None:
    """Return what, besides its parameters' values, a module's function depends on; None if that cannot be told.

    Layers of one model share it, and so share one ``same_function``.
    """
    plain = {name: value for name, value in vars(module).items() if name not in _MODULE_STATE}
    known = all(isinstance(value, (bool, int, float, str, type(None))) for value in plain.values())
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    if not known or module._buffers or len(names) != len(list(module.parameters())):
        return None
    children = [None if child is None else signature(child) or () for child in module._modules.values()]
    if () in children:
        return None
    shapes = [None if p is None else p.shape for p in module._parameters.values()]
    return type(module), *plain.items(), *module._parameters, *shapes, *module._modules, *children


def same_function(module: nn.Module, kind: Kind) -> str | None:
    """Say how a module differs from the equations, in float64 with parameters drawn anew; None if it does not."""
    generator = torch.Generator().manual_seed(0)
    drawn: dict[int, Tensor] = {}

    def draw(tensor: Tensor) -> Tensor:
        if id(tensor) not in drawn:  # tied parameters stay tied
            if isinstance(tensor, nn.Parameter):
                fan_in = tensor.shape[-1] if tensor.dim() else 1
                value = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
                drawn[id(tensor)] = nn.Parameter(value * 0.5 / max(1, fan_in) ** 0.5)
            else:
                dtype = torch.float64 if tensor.is_floating_point() else tensor.dtype
                drawn[id(tensor)] = tensor.detach().to("cpu", dtype, copy=True)
        return drawn[id(tensor)]

    try:
        with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.enable_grad():
            x = _probe_tokens(module, generator).requires_grad_()
            for training in (False, True):
                shadow = _shadow(module, draw, training, {})
                expected, actual = shadow.forward(x), kind.run(shadow, x, "reference")
                reason = _difference(expected, actual, _SAME_FUNCTION)
                if reason is None and training:
                    leaves = [x, *(leaf for leaf in drawn.values() if leaf.requires_grad)]
                    dout = torch.randn(actual.shape, generator=generator, dtype=actual.dtype)
                    grads = (
                        torch.autograd.grad(out, leaves, dout, allow_unused=True, materialize_grads=True)
                        for out in (expected, actual)
                    )
                    differences = (_difference(a, b, _SAME_FUNCTION, "gradient") for a, b in zip(*grads, strict=True))
                    reason = next(filter(None, differences), None)
                if reason is not None:
                    return f"looks like {kind.op}, but computes something else: {reason}"
    except Exception as error:
        return _failure(error)
    return None


def same_numbers(module: nn.Module, kind: Kind, backend: str | None, patched: type) -> str | None:
    """Say why the backend cannot stand in for a module as it is, its parameters, dtype and device; None if it can."""
    weight = _projection(module)
    device, dtype = weight.device, weight.dtype
    shadow = _shadow(module, lambda t: t if isinstance(t, nn.Parameter) else t.clone(), False, {})
    try:
        shadow.__class__ = patched
    except TypeError as error:
        return f"its class cannot be replaced: {error}"
    if device.type == "meta":
        return None
    try:
        _backend.resolve(kind.op, backend, device, dtype)
    except NotImplementedError as error:
        return str(error)
    try:
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), torch.no_grad(), torch.autocast(device.type, enabled=False):
            x = _probe_tokens(module, torch.Generator().manual_seed(0)).to(device, dtype)
            expected, actual = type(module).forward(shadow, x), kind.run(shadow, x, backend)
    except Exception as error:
        return _failure(error)
    rounding = torch.finfo(dtype).eps * (x.shape[-1] ** 0.5 if dtype.itemsize > 2 else 1)
    if dtype == torch.float32 and device.type != "cpu":
        rounding = 2.0**-10  # products may run in TF32, as the user has set it
    reason = _difference(expected, actual, max(_SAME_FUNCTION, _ROUNDINGS * rounding))
    return reason and f"looks like {kind.op}, but its numbers differ: {reason}"


def _shadow(
    module: nn.Module, tensor: Callable[[Tensor], Tensor], training: bool, memo: dict[int, nn.Module]
) -> nn.Module:
    """Rebuild a module from its own attributes, each tensor through ``tensor``, without hooks or dropout."""
    if id(module) in memo:
        return memo[id(module)]
    shadow = memo[id(module)] = object.__new__(type(module))
    state = vars(shadow)
    for name, value in vars(module).items():
        value = copy.copy(value) if isinstance(value, (dict, list, set)) else value
        state[name] = tensor(value) if isinstance(value, Tensor) else value
    for kept in ("_parameters", "_buffers"):
        state[kept] = {name: None if t is None else tensor(t) for name, t in state[kept].items()}
    children = state["_modules"].items()
    state["_modules"] = {n: None if c is None else _shadow(c, tensor, training, memo) for n, c in children}
    state["training"] = training
    if isinstance(module, _DropoutNd):
        state["p"] = 0.0
    # What Module.compile sets: a call then goes there at once, past global hooks too.
    state["_compiled_call_impl"] = shadow.forward
    return shadow


def _projection(module: nn.Module) -> Tensor:
    """Return the matrix that meets the tokens."""
    linear: Any = module._modules.get("qkv") or module._modules.get("c_attn")
    matrix: Any = module._parameters.get("weight", module._parameters.get("D"))
    return matrix.t() if linear is None else linear.weight  # (..., dim)


def _probe_tokens(module: nn.Module, generator: torch.Generator) -> Tensor:
    """Draw tokens (2, seqlen, dim) that a threshold does not silence."""
    positions = module._parameters.get("denom_bias")
    seqlen = _SEQLEN if positions is None else min(_SEQLEN, positions.shape[1])
    threshold = abs(vars(module).get("lambd", vars(module).get("lmbda", 0.0)))
    x = torch.randn(2, seqlen, _projection(module).shape[-1], generator=generator, dtype=torch.float64, device="cpu")
    return (1.0 + 4.0 * threshold) * x


def _difference(expected: Any, actual: Tensor, tolerance: float, what: str = "output") -> str | None:
    """Say how far two tensors are apart, relative to the larger; None if within ``tolerance``."""
    if not isinstance(expected, Tensor):
        return f"{what} is a {type(expected).__name__}"
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        return f"{what} is {expected.dtype} {tuple(expected.shape)}, not {actual.dtype} {tuple(actual.shape)}"
    size = max(expected.abs().max().item(), actual.abs().max().item())
    error = (expected - actual).abs().max().item()
    return None if error <= tolerance * size else f"{what} differs by {error / size:.1e} of its size"


def _failure(error: Exception) -> str:
    return f"the probe failed: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
