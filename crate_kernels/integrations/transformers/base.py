"""What all models for transformers share: building, drawing weights, the one implementation of attention."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from crate_kernels.integrations.transformers.configs import ModelConfig
from crate_kernels.models._shared import pretrained

Module = TypeVar("Module", bound=nn.Module)

# How ``fully_shard`` treats a module's gathered weights after its forward, as plans of transformers name it.
FREED, KEPT = "free_full_weight", "keep_full_weight"
_OURS = (None, "eager")  # what transformers calls a model's own attention


class Model(PreTrainedModel):
    """A model of ours as transformers loads, saves and moves it.

    Parameters have the names that ours have, up to a prefix, so that one folder serves both libraries.

    Args:
        config: sizes and options.
    """

    supports_gradient_checkpointing = True
    model_tags = ["crate_kernels"]  # noqa: RUF012 (transformers declares it so)

    def __init__(self, config: Any) -> None:
        _require_ours(type(self).__name__, config._attn_implementation)
        _refuse_quantization(type(self).__name__, getattr(config, "quantization_config", None))
        super().__init__(config)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a model as transformers does, but never from a pickle.

        Args:
            pretrained_model_name_or_path: a folder, or a name on the Hub.
            *args: as in transformers.
            **kwargs: as in transformers; ``use_safetensors`` is True by default.

        Raises:
            ValueError: a link or the name of a shard leads out of the folder.
            NotImplementedError: ``quantization_config``.
        """
        _refuse_quantization(cls.__name__, kwargs.get("quantization_config"))
        kwargs.setdefault("use_safetensors", True)
        if pretrained_model_name_or_path is not None and os.path.isdir(pretrained_model_name_or_path):
            pretrained.check_links(Path(pretrained_model_name_or_path, kwargs.get("subfolder") or ""))
        return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)

    def set_attn_implementation(self, attn_implementation: Any, *args: Any, **kwargs: Any) -> None:
        """Refuse every implementation of attention but our own."""
        _require_ours(type(self).__name__, attn_implementation)
        super().set_attn_implementation(attn_implementation, *args, **kwargs)

    def _our_name(self, name: str) -> str:
        """Return the name that our model has for a parameter of this one."""
        return name

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Draw the weights that no checkpoint has, as the constructor of our model draws them."""
        lacking = {
            self._our_name(f"{owner}.{name}".removeprefix(".")): tensor
            for owner, module in self.named_modules()
            if not getattr(module, "_is_hf_initialized", False)  # a resized head
            for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
            if f"{owner}.{name}" not in self.all_tied_weights_keys and not getattr(tensor, "_is_hf_initialized", False)
        }
        if lacking:
            fresh = self.config.network()
            drawn: dict[str, Tensor] = {**dict(fresh.named_parameters()), **dict(fresh.named_buffers())}
            for name, tensor in lacking.items():
                tensor.copy_(drawn[name])
                tensor._is_hf_initialized = True  # pyright: ignore[reportAttributeAccessIssue]


def _require_ours(owner: str, attention: Any) -> None:
    """Refuse an implementation of attention that is not ours."""
    if attention not in _OURS:
        raise ValueError(
            f'{owner}: attn_implementation must be "eager", which is our own operators, got {attention!r}: no other '
            "computes subspace or token-statistics attention. config.backend chooses how ours is computed"
        )


def _refuse_quantization(owner: str, config: Any) -> None:
    """Refuse to quantise: no method of transformers has been tried, and dictionaries are in no linear layer."""
    if config is not None:
        raise NotImplementedError(f"{owner}: quantization_config cannot be given: these models are not quantised")


def refuse_unknown(model: PreTrainedModel, arguments: dict[str, Any], loss: tuple[str, ...] = ()) -> None:
    """Refuse arguments that nothing would read; the loss reads some, and a loss of the user's own may read any.

    Arguments that change nothing pass: defaults of transformers, and ``cache_position``, which follows from the cache.
    """
    if hasattr(model, "_loss_function"):
        return
    for name, value in arguments.items():
        if value is None or name in (*loss, "cache_position") or (name == "is_causal" and value):
            continue
        if value is False and name != "is_causal":
            continue
        if name == "token_type_ids" and isinstance(value, Tensor) and not value.any():  # of one type, as tokenizers say
            continue
        raise TypeError(f"{type(model).__name__}: {name} cannot be given: it is no argument of this model")


def refuse_attentions(model: PreTrainedModel, wanted: bool | None) -> None:
    """Refuse to return attention probabilities, asked for by an argument or, without one, by the config."""
    if model.config.output_attentions if wanted is None else wanted:
        raise NotImplementedError(
            f"{type(model).__name__}: output_attentions cannot be given: the operators never hold the probabilities"
        )


def undrawn(build: Callable[[], Module]) -> Module:
    """Build a module without values on torch's default device: ``initialize_weights`` draws them, once."""
    with torch.device("meta"):
        module = build()
    return module.to_empty(device=torch.get_default_device())


def network(config: ModelConfig) -> Any:
    """Build our model of a config, without values."""
    return undrawn(config.network)
