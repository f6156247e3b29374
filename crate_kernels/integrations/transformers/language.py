"""Causal CRATE, ToST and AoT as language models of transformers: ``generate``, Trainer, pipelines."""

from __future__ import annotations

import warnings
from dataclasses import fields
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, GenerationMixin
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from crate_kernels._core import checks
from crate_kernels.integrations.transformers import base, configs, documents
from crate_kernels.integrations.transformers.caches import StateLayer
from crate_kernels.models import aot, crate_lm, tost_lm
from crate_kernels.models._shared.base import place, run

# transformers 5.24 renamed the cache of earlier tokens, in calls and in results. Calls may have either name.
_CACHE, _OTHER = "cache", "past_key_values"
if _CACHE not in {field.name for field in fields(BaseModelOutputWithPast)}:
    _CACHE, _OTHER = _OTHER, _CACHE


class LanguageBase(base.Model):
    """Embeddings and blocks: everything but the head. Parameters: ``wte``, ``wpe``, ``h.{i}.*``, ``ln_f.*``."""

    base_model_prefix = "transformer"
    block_class: type[nn.Module]  # ours, which transformers can recompute
    _no_split_modules = ["CRATEBlock", "ToSTBlock", "AoTLayer"]  # noqa: RUF012
    _skip_keys_device_placement = [_CACHE, _OTHER]  # noqa: RUF012

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for name, part in base.network(config).transformer.items():
            self.add_module(name, part)
        for block in cast(nn.ModuleList, self.h):
            block.__class__ = self.block_class
        self.post_init()
        self._fsdp_plan = {"wte": base.FREED, "h.*": base.FREED}
        if hasattr(self, "ln_f"):
            self._fsdp_plan["ln_f"] = base.KEPT

    def _our_name(self, name: str) -> str:
        return f"transformer.{name}"

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding of tokens."""
        return cast(nn.Module, self.wte)

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the embedding of tokens."""
        self.wte = value

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Return the input of the head.

        Args:
            input_ids: (batch, new) tokens.
            attention_mask: (batch, past + new), 0 for padding; positions count the rest alone.
            cache: the cache of earlier tokens, ``DynamicCache(config=...)`` or ``StaticCache``. The result has it as
                ``cache``, before transformers 5.24 as ``past_key_values``.
            inputs_embeds: (batch, new, n_embd) in the place of ``input_ids``.
            use_cache: return a cache; by default the config's. None is made while gradients are recorded, or while
                the attention drops (``drops``).
            output_hidden_states: return the input of each block, and the result.
            **kwargs: ``past_key_values`` is ``cache`` by its name before transformers 5.24. ``cu_seq_lens_q`` and
                ``_k``, ``max_length_q`` and ``_k``, ``seq_idx`` and ``position_ids`` describe documents that follow
                each other in one row, in any combination: each attends to itself alone, and no cache is made.

        Raises:
            ValueError: not one of ``input_ids`` and ``inputs_embeds``, a mask of another shape, a foreign cache, any
                cache while the attention drops, more tokens than the model has positions, documents that do not agree
                or come with padding, a cache, ``use_cache=True`` or several rows.
            NotImplementedError: ``output_attentions``, or other ``position_ids`` than the model counts by itself.
            TypeError: a cache by both names, or by a third; any other argument.
        """
        owner = type(self).__name__
        cache = _one_cache(owner, cache, kwargs)
        base.refuse_attentions(self, kwargs.pop("output_attentions", None))
        described = {name: kwargs.pop(name) for name in documents.NAMES if name in kwargs}
        base.refuse_unknown(self, kwargs)
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError(f"{owner}: give either input_ids or inputs_embeds")
        if input_ids is not None:
            checks.indices(owner, "input_ids", input_ids, cast(nn.Embedding, self.wte).num_embeddings)
        x = cast(Tensor, self.wte(input_ids) if inputs_embeds is None else inputs_embeds)
        layers = _layers(owner, cache, len(cast(nn.ModuleList, self.h)))
        if layers and self.drops():
            rate = self.config.dropout
            raise ValueError(f"{owner}: dropout must be 0 with a cache, got {rate} in training mode: call model.eval()")
        past = layers[0].get_seq_length() if layers else 0
        seen = layers[0].rows() if past else 0
        rows = _Rows(owner, attention_mask, past, x)
        makes_caches = not torch.is_grad_enabled() and not self.drops()
        cached = bool(layers) or bool(use_cache and makes_caches)
        row = documents.take(owner, described, x, None if rows.keep is None else attention_mask, seen, cached)
        longest = past + x.shape[1] if row is None else row.max_seqlen
        if longest > self.config.block_size:
            limit = f"block_size = {self.config.block_size}, the number of positions"
            raise ValueError(f"{owner}: tokens must be at most {limit}, got {longest}")
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if use_cache and cache is None and row is None and makes_caches:
            cache = DynamicCache(config=self.config)

        x = rows.pack(x)
        positions = self._positions(seen, x.shape[1], x.device) if row is None else row.positions
        x = cast(Any, self.drop)(x + place(cast(nn.Embedding, self.wpe), positions, x.shape[0]))
        packing = () if row is None else (None, row.cu_seqlens, row.max_seqlen)
        collect = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        states: list[Tensor] = []
        for index, block in enumerate(cast(nn.ModuleList, self.h)):
            if collect:
                states.append(rows.unpack(x))
                x = rows.pack(states[-1])  # through what is returned, for its gradient
            if cache is not None:
                x, _ = cache.update(x, x, index, block, rows.keep, rows.padded)
            else:
                x = run(self.config.grad_checkpointing, block, x, rows.keep, *packing)
        if hasattr(self, "ln_f"):
            x = cast(Any, self.ln_f)(x)
        x = rows.unpack(x)
        return BaseModelOutputWithPast(
            last_hidden_state=x,
            hidden_states=(*states, x) if collect else None,
            **{_CACHE: cache if use_cache else None},
        )

    def drops(self) -> bool:
        """Say if the attention drops now, which subspace and token-statistics attention refuse with a cache."""
        return self.training and self.config.dropout > 0 and self.config.state != "key_value"

    def _positions(self, seen: int | Tensor, new: int, device: torch.device) -> Tensor:
        """Return the positions of ``new`` tokens after those that each row has seen."""
        return torch.arange(new, device=device) + (seen.to(device)[:, None] if isinstance(seen, Tensor) else seen)


class LanguageHead(base.Model):
    """The base and the head: ``transformer.*`` and ``lm_head.weight``, the embedding's matrix if they are tied."""

    base_model_prefix = "transformer"
    base_class: type[LanguageBase]
    _tied_weights_keys = {"lm_head.weight": "transformer.wte.weight"}  # noqa: RUF012
    _fsdp_plan = {"lm_head": base.KEPT}  # noqa: RUF012 (the base's is added to it)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.transformer = self.base_class(config)
        self.lm_head = base.undrawn(lambda: nn.Linear(config.n_embd, config.vocab_size, bias=False))
        self.post_init()

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as transformers does; without a cache while the attention drops (``LanguageBase.drops``)."""
        if self.transformer.drops():
            kwargs["use_cache"] = False
        if _OTHER == "cache" and "cache" in kwargs:  # the other way round, transformers renames it and warns
            kwargs.setdefault(_CACHE, kwargs.pop("cache"))
        return cast(Any, super()).generate(*args, **kwargs)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Predict the next tokens.

        Args:
            input_ids, attention_mask, cache, inputs_embeds, use_cache, output_hidden_states: as in the base.
            labels: (batch, new), the tokens again, which are shifted here; -100 is ignored.
            logits_to_keep: number of last tokens with logits, or their indices; 0 for all.
            **kwargs: ``past_key_values`` and documents of one row as in the base; ``num_items_in_batch``,
                ``ignore_index`` and ``shift_labels`` of the loss.
        """
        passed = {name: kwargs.pop(name) for name in ("output_attentions", *documents.NAMES) if name in kwargs}
        cache = _one_cache(type(self).__name__, cache, kwargs)
        base.refuse_unknown(self, kwargs, loss=("num_items_in_batch", "ignore_index", "shift_labels"))
        hidden = self.transformer(
            input_ids,
            attention_mask,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            **passed,
        )
        chosen = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(hidden.last_hidden_state[:, chosen])
        loss = None
        if labels is not None or kwargs.get("shift_labels") is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=hidden.hidden_states,
            **{_CACHE: getattr(hidden, _CACHE)},
        )


def _one_cache(owner: str, cache: Any, others: dict[str, Any]) -> Any:
    """Return the cache of a call, taken out of the other arguments if it is among them by its other name.

    A cache by a third name is refused: without it, tokens would be wrong.
    """
    old = "past_key_values" in others
    other = others.pop("past_key_values", None)
    if cache is not None and other is not None:
        raise TypeError(f"{owner}: give either cache or past_key_values, which are the same")
    if old and _CACHE == "cache" and not torch.compiler.is_compiling():  # as transformers does, with its text
        end = f"is deprecated and will be removed in version 5.40.0 for `{owner}.forward`. Use `cache` instead."
        warnings.warn(f"`past_key_values` {end}", FutureWarning, stacklevel=2)
    for name, value in others.items():
        if isinstance(value, Cache):
            raise TypeError(f"{owner}: a cache must be passed as cache or past_key_values, got {name}")
    return other if cache is None else cache


def _layers(owner: str, cache: Any, count: int) -> list[StateLayer]:
    """Return the layers of a cache, which must be ours, one per block."""
    if cache is None:
        return []
    layers = getattr(cache, "layers", None)
    if layers is None or len(layers) != count or not all(isinstance(layer, StateLayer) for layer in layers):
        raise ValueError(
            f"{owner}: cache must be a cache of this model, DynamicCache(config=model.config) or "
            f"StaticCache(config=model.config, max_cache_len=...), got {cache!r}"
        )
    return layers


class _Rows:
    """Padding anywhere in a row, moved to its end for the operators and back for the caller.

    Attributes:
        keep: (batch, new) bool, True for the tokens of each row, which come first; None if nothing is padded.
        padded: number of columns up to the last one with padding.
    """

    def __init__(self, owner: str, mask: Tensor | None, past: int, x: Tensor) -> None:
        self.keep: Tensor | None = None
        self.padded = 0
        self._order: Tensor | None = None
        if mask is None:
            return
        shape = (x.shape[0], past + x.shape[1])
        if tuple(mask.shape) != shape:
            raise ValueError(f"{owner}: attention_mask must be (batch, past + new) = {shape}, got {tuple(mask.shape)}")
        kept = mask[:, past:].to(x.device).bool()
        self.padded = x.shape[1]
        # Reading the mask waits for the device, as transformers does for its own models; a compiler cannot read it.
        if not torch.compiler.is_compiling():
            if bool(kept.all()):
                return
            self.padded = int((~kept).any(0).nonzero().max()) + 1
        self._order = kept.int().argsort(dim=1, descending=True, stable=True)
        self.keep = kept.gather(1, self._order)

    def pack(self, x: Tensor) -> Tensor:
        """Gather the tokens of each row of (batch, new, n_embd) to its front."""
        return x if self._order is None else _take(x, self._order)

    def unpack(self, x: Tensor) -> Tensor:
        """Undo ``pack``."""
        return x if self._order is None else _take(x, self._order.argsort(dim=1))


def _take(x: Tensor, order: Tensor) -> Tensor:
    """Reorder the tokens of each row."""
    return x.gather(1, order.to(x.device)[:, :, None].expand_as(x))


class CRATEBlock(GradientCheckpointingLayer, crate_lm.CausalMSSABlock):
    """A block of causal CRATE."""


class ToSTBlock(GradientCheckpointingLayer, tost_lm.CausalTSSABlock):
    """A block of ToST."""


class AoTLayer(GradientCheckpointingLayer, aot.Layer):
    """A layer of AoT."""


class CRATELMModel(LanguageBase):
    """Causal CRATE of either form, without its head."""

    block_class = CRATEBlock
    config_class = configs.CRATELMConfig


class CRATELMForCausalLM(LanguageHead, GenerationMixin):
    """Causal CRATE of either form."""

    config_class = configs.CRATELMConfig
    base_class = CRATELMModel


class ToSTLMModel(LanguageBase):
    """ToST's language model, without its head."""

    block_class = ToSTBlock
    config_class = configs.ToSTLMConfig
    _is_stateful = True


class ToSTLMForCausalLM(LanguageHead, GenerationMixin):
    """ToST's language model. Its state cannot be shortened: assisted decoding is refused."""

    config_class = configs.ToSTLMConfig
    base_class = ToSTLMModel
    _is_stateful = True


class AoTLMModel(LanguageBase):
    """The attention-only language model, without its head."""

    block_class = AoTLayer
    config_class = configs.AoTLMConfig


class AoTLMForCausalLM(LanguageHead, GenerationMixin):
    """The attention-only language model."""

    config_class = configs.AoTLMConfig
    base_class = AoTLMModel
