"""Sharding rules of the ops: how DTensors pass through the public functions.

``ista`` runs on any tokens apart; ``mssa`` on any sequences and heads apart; ``tssa`` on any sequences apart, since its
softmax is over all heads. Gradients of what all processes share are partial sums. What does not fit is redistributed by
PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

# The placements of the outputs, and those of the input tensors that are not replicated.
Way = tuple[list[Placement], dict[str, Placement]]
_ALL, _BATCH, _HEADS = Replicate(), Shard(0), Shard(1)


def _is_tensor(value: Any) -> bool:
    """Return whether a rule's argument is a tensor, of which it sees the DTensorSpec."""
    return hasattr(value, "placements")


def _register(name: str, ways: Callable[[dict[str, Any]], Iterable[Way]]) -> None:
    """Register an op by the ways to shard it, besides none."""
    overload = getattr(torch.ops.crate_kernels, name).default
    names = [argument.name for argument in overload._schema.arguments]
    nothing: Way = [_ALL] * len(overload._schema.returns), {}

    def rule(*args: Any) -> list[tuple[list[Placement], list[Placement | None]]]:
        arguments = dict(zip(names, args, strict=True))
        if arguments.get("seed") is not None:
            op = name.partition("_")[0]
            raise NotImplementedError(
                f"{op}: dropout_p must be 0 with DTensors: all processes would draw the same masks"
            )
        return [
            (outputs, [inputs.get(each, _ALL) if _is_tensor(arguments[each]) else None for each in names])
            for outputs, inputs in (nothing, *ways(arguments))
        ]

    register_sharding(overload)(rule)


def _mssa(outputs: str) -> Callable[[dict[str, Any]], Iterable[Way]]:
    """Return the ways of an op of mssa with these outputs, "w" like tokens and "l" like lse."""

    def ways(arguments: dict[str, Any]) -> Iterable[Way]:
        packed = arguments["cu_seqlens"] is not None
        for tokens in (_HEADS,) if packed else (_HEADS, _BATCH):
            numbers = _BATCH if packed else tokens  # (nheads, total) beside (total, nheads, head_dim)
            inputs: dict[str, Placement] = dict.fromkeys(("dout", "w", "out"), tokens)
            inputs |= dict.fromkeys(("dlse", "lse"), numbers)
            if tokens == _BATCH:
                inputs["key_padding_mask"] = _BATCH
            yield [tokens if kind == "w" else numbers for kind in outputs], inputs

    return ways


_PER_SEQUENCE = ("dout", "dmembership", "w", "membership", "energy", "moment", "sums", "key_padding_mask")


def _tssa(outputs: int, sums: tuple[str, ...] = ()) -> Callable[[dict[str, Any]], Iterable[Way]]:
    """Return the ways of an op of tssa: this many outputs per sequence, then sums, the gradients of inputs."""

    def ways(arguments: dict[str, Any]) -> Iterable[Way]:
        if arguments["cu_seqlens"] is None:
            placed: list[Placement] = [_BATCH] * outputs
            placed += [Partial() if arguments[name] is not None else _ALL for name in sums]
            yield placed, dict.fromkeys(_PER_SEQUENCE, _BATCH)

    return ways


def _ista_fwd(arguments: dict[str, Any]) -> Iterable[Way]:
    for dim in range(arguments["x"].ndim - 1):
        yield [Shard(dim)], {"x": Shard(dim)}


def _ista_bwd(arguments: dict[str, Any]) -> Iterable[Way]:
    for dim in range(arguments["x"].ndim - 1):
        outputs: list[Placement] = [
            Shard(dim) if arguments["need_dx"] else _ALL,
            Partial() if arguments["need_dweight"] else _ALL,
        ]
        yield outputs, dict.fromkeys(("dy", "x", "y"), Shard(dim))


def _whole_tokens(x: Any) -> bool:
    """Return whether parts along the first dimension are the even parts of all tokens that the codes must be in."""
    return x.ndim > 1 and x.shape[0] % x.mesh.size() == 0


def _overcomplete_fwd(arguments: dict[str, Any]) -> Iterable[Way]:
    if _whole_tokens(arguments["x"]):
        kept = _HEADS if arguments["keep"] else _ALL  # (steps, tokens, atoms)
        yield [_BATCH, kept, kept], {"x": _BATCH}


def _overcomplete_bwd(arguments: dict[str, Any]) -> Iterable[Way]:
    if _whole_tokens(arguments["x"]):
        decoder: Placement = _ALL if arguments["decoder"] is None else Partial()
        inputs: dict[str, Placement] = {"dout": _BATCH, "x": _BATCH, "codes": _HEADS, "residuals": _HEADS}
        yield [_BATCH, Partial(), decoder], inputs


def register() -> None:
    """Register all rules; ``crate_kernels.distributed`` does it once."""
    _register("mssa_fwd", _mssa("wl"))
    _register("mssa_bwd", _mssa("w"))
    _register("mssa_lse_fwd", _mssa("l"))
    _register("mssa_lse_bwd", _mssa("w"))
    _register("tssa_fwd", _tssa(4))
    _register("tssa_bwd", _tssa(1, ("temp",)))
    _register("tssa_causal_fwd", _tssa(3))
    _register("tssa_causal_bwd", _tssa(1, ("temp", "denom_bias")))
    _register("ista_fwd", _ista_fwd)
    _register("ista_bwd", _ista_bwd)
    _register("ista_overcomplete_fwd", _overcomplete_fwd)
    _register("ista_overcomplete_bwd", _overcomplete_bwd)
