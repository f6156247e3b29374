"""Read checkpoints of CRATE-alpha: the published class's, CLIPA's vision tower, and the training code's, in Flax."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from crate_kernels.models._shared import official

# Prefixes of a CLIPA checkpoint's text tower, an ordinary transformer.
_TEXT = ("transformer.", "token_embedding.", "positional_embedding", "ln_final.", "text_projection", "logit_scale")


def _is_clipa(bare: Mapping[str, Any]) -> bool:
    return any("in_proj_weight" in name for name in bare)


def _vision_tower(bare: Mapping[str, Any]) -> dict[str, Any]:
    """Return the vision tower of a CLIPA checkpoint under its published names."""
    if not any(name.startswith("visual.") for name in bare):
        return dict(bare)
    kept = official.without(bare, lambda name: name.startswith(_TEXT), "the text tower")
    return {name.removeprefix("visual."): t for name, t in kept.items()}


def _one_of_three(name: str, weight: Any) -> Tensor:
    """Take one of the three equal projections that CLIPA stores as query, key and value."""
    if not isinstance(weight, Tensor) or weight.dim() != 2 or weight.shape[0] % 3:
        got = tuple(weight.shape) if isinstance(weight, Tensor) else type(weight).__name__
        raise ValueError(f"from_official: {name} must be (3 * dim, dim), got {got}")
    query, key, value = weight.chunk(3)
    if not (torch.equal(query, key) and torch.equal(query, value)):
        raise ValueError(f"from_official: {name} must hold one projection three times, got different ones")
    return query


def _of_clipa(tower: Mapping[str, Any]) -> dict[str, Any]:
    """Rename the weights of a CLIPA vision tower: its image embedding is our head, without a bias."""
    renamed: dict[str, Any] = {}
    places = {"ln_1": "0.norm", "ln_2": "1.norm", "attn.out_proj": "0.fn.to_out.0"}
    for name, t in tower.items():
        if name.startswith("transformer.resblocks."):
            index, part = name.removeprefix("transformer.resblocks.").split(".", 1)
            module, _, leaf = part.rpartition(".")
            layer = f"transformer.layers.{index}."
            if part == "attn.in_proj_weight":
                renamed[layer + "0.fn.qkv.weight"] = _one_of_three(name, t)
            elif part in ("mlp.c_fc", "mlp.c_proj"):
                renamed[layer + ("1.fn.D" if part == "mlp.c_fc" else "1.fn.D1")] = t
            else:
                renamed[f"{layer}{places.get(module, module)}.{leaf}"] = t
        elif name == "class_embedding":
            renamed["cls_token"] = t[None, None]
        elif name == "positional_embedding":
            renamed["pos_embedding"] = t[None]
        elif name == "proj":
            renamed["mlp_head.1.weight"] = t.T
        else:
            renamed[name.replace("ln_post", "mlp_head.0")] = t
    return renamed


_FLAX = re.compile(r"(?:.*/)?Transformer/encoderblock_(\d+)/")
_ATTENTION = re.compile(r"(?:MultiHeadDotProductSubspaceAttention|Attention)_0/(proj|out)/kernel")
_PLACES = {
    "cls": "cls_token",
    "pos_embedding": "pos_embedding",
    "embedding/bias": "conv1.bias",
    "encoder_norm/scale": "mlp_head.0.weight",
    "encoder_norm/bias": "mlp_head.0.bias",
    "head/bias": "mlp_head.1.bias",
}
_BLOCK_PLACES = {
    "LayerNorm_0/scale": "0.norm.weight",
    "LayerNorm_0/bias": "0.norm.bias",
    "LayerNorm_1/scale": "1.norm.weight",
    "LayerNorm_1/bias": "1.norm.bias",
    "OvercompleteISTABlock_0/D": "1.fn.D",
    "OvercompleteISTABlock_0/D1": "1.fn.D1",
}


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested mappings under their paths, with slashes between, as Flax writes them to a file."""
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        path = f"{prefix}{name}"
        leaves |= _flat(value, f"{path}/") if isinstance(value, Mapping) else {path: value}
    return leaves


def _parameters(bare: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the parameters of a Flax checkpoint under their paths; None for any other checkpoint."""
    leaves = _flat(bare)
    found = next(filter(None, map(_FLAX.match, leaves)), None)
    if found is None:
        return None
    root = found[0][: found[0].rindex("Transformer/")]  # such as "params/", beside the optimizer's state
    kept = official.without(leaves, lambda name: not name.startswith(root), "beside the parameters")
    return {name.removeprefix(root): value for name, value in kept.items()}


def _tensor(name: str, value: Any) -> Tensor:
    """Return an array of NumPy or JAX as a tensor with a copy of its numbers."""
    if isinstance(value, Tensor):
        return value
    if not hasattr(value, "__array__"):
        raise ValueError(f"from_official: {name} must be an array, got {type(value).__name__}")
    import numpy  # which a checkpoint of arrays brings

    array = numpy.array(value)
    if array.dtype.itemsize == 2 and array.dtype.kind == "V":  # NumPy has no bfloat16
        return torch.from_numpy(array.view(numpy.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _of_flax(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Rename the parameters of the training code, whose kernels are (inputs, outputs) and have a dimension of heads."""
    renamed: dict[str, Any] = {}
    for name, value in parameters.items():
        t, block = _tensor(name, value), _FLAX.match(name)
        inner = name[block.end() :] if block else name
        part = _ATTENTION.fullmatch(inner) if block else None
        if block is None and name == "embedding/kernel" and t.dim() == 4:
            renamed["conv1.weight"] = t.permute(3, 2, 0, 1)
        elif block is None and name == "head/kernel" and t.dim() == 2:
            renamed["mlp_head.1.weight"] = t.T
        elif block is None:
            renamed[_PLACES.get(name, name)] = t
        elif part is not None and t.dim() == 3:
            ours = (
                ("0.fn.qkv.weight", t.flatten(1).T)
                if part[1] == "proj"
                else ("0.fn.to_out.0.weight", t.flatten(0, 1).T)
            )
            renamed[f"transformer.layers.{block[1]}.{ours[0]}"] = ours[1]
        else:
            renamed[f"transformer.layers.{block[1]}.{_BLOCK_PLACES.get(inner, inner)}"] = t
    return renamed


def _with_biases(weights: dict[str, Any]) -> dict[str, Any]:
    """Add zeros where a stem or a head was trained without a bias."""
    for layer in ("conv1", "mlp_head.1"):
        weight = weights.get(f"{layer}.weight")
        if isinstance(weight, Tensor) and weight.dim() > 1:
            weights.setdefault(f"{layer}.bias", weight.new_zeros(weight.shape[0]))
    return weights


def read(bare: dict[str, Any]) -> dict[str, Any]:
    """Return the weights under our names."""
    parameters = _parameters(bare)
    if parameters is not None:
        return _with_biases(_of_flax(parameters))
    return _with_biases(_of_clipa(_vision_tower(bare))) if _is_clipa(bare) else bare


def implied(bare: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a checkpoint says of the config: eps of its last norm and, in Flax, the heads."""
    leaves = _flat(bare)
    heads = next((value.shape[1:] for name, value in leaves.items() if name.endswith("Attention_0/proj/kernel")), None)
    if heads is not None and len(heads) == 2:
        return {"head_eps": 1e-6, "heads": int(heads[0]), "dim_head": int(heads[1])}
    return {"head_eps": 1e-6} if _is_clipa(bare) else {}
