"""Our decoding caches as layers of a transformers cache: ``DynamicCache(config=model.config)`` builds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import cache_utils


class StateLayer(cache_utils.CacheLayerMixin):
    """A layer with one of our caches, which the first tokens allocate.

    Every tensor of such a cache has the batch as its first dimension, so that beam search is the same for all.

    Args:
        max_cache_len: capacity, in tokens per sequence; a cache grows by default.

    Attributes:
        cache: the cache of our attention module; None before the first tokens.
        columns: tokens seen, padding included: what transformers calls the length.
        padded: number of columns up to the last one with padding.
    """

    supports_early_init = False  # the sizes of a state are known to the attention module alone

    def __init__(self, max_cache_len: int | None = None, **kwargs: Any) -> None:
        self.max_cache_len = max_cache_len
        self.reset()

    def reset(self) -> None:
        """Forget every token."""
        self.cache: Any = None
        self.device: torch.device | None = None
        self.columns = self.padded = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: ``update`` allocates."""

    @property
    def is_initialized(self) -> bool:
        """Say if tokens were seen."""
        return self.cache is not None

    def update(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, key_states: Tensor, value_states: Tensor, block: Any = None, keep: Tensor | None = None, padded: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Run a block of a language model on new tokens, with the cache.

        Args:
            key_states: (batch, new, n_embd), the block's input; transformers moves offloaded layers before this call
                and after it, so that the block has to run inside.
            value_states: ignored.
            block: the block.
            keep: (batch, new) bool, False for padding on the right; None keeps all.
            padded: number of new columns up to the last one with padding, before it was moved to the right.

        Returns:
            The block's output, twice.
        """
        if block is None:
            raise TypeError(f"{type(self).__name__}: only the models of crate_kernels can use this cache")
        batch, new, _ = key_states.shape
        self._allocate(block, batch, new)
        out = block(key_states, keep, self.cache)
        if keep is not None:
            self.padded = self.columns + padded
        self.columns += new
        return out, out

    def _allocate(self, block: Any, batch: int, new: int) -> None:
        """Allocate the cache before the first tokens; a cache that grows makes space for ``new`` more."""
        if self.cache is None:
            self.cache = block.attn.new_cache(batch, self.max_cache_len or new)

    def _change(self, function: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor of the cache; the first call notes the device on which its block runs."""
        state = vars(self.cache) if self.cache is not None else {}
        for name, tensor in state.items():
            if isinstance(tensor, Tensor):
                self.device = self.device or tensor.device
                state[name] = function(tensor)

    def rows(self) -> int | Tensor:
        """Return the number of cached tokens of each sequence, without padding: one for all, or (batch,)."""
        return self.cache.lengths if self.padded else self.columns

    def get_seq_length(self) -> int:
        """Return the number of tokens seen, padding included."""
        return self.columns

    def get_max_length(self) -> int:
        """Return the capacity; -1 for none."""
        return -1 if self.max_cache_len is None else self.max_cache_len

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the length and the offset of a mask for ``query_length`` new tokens."""
        return self.columns + query_length, 0

    def offload(self) -> None:
        """Move the cache to the CPU."""
        self._change(lambda tensor: tensor.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Move the cache back to where its block runs."""
        self._change(lambda tensor: tensor.to(self.device, non_blocking=True))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace sequence i by sequence ``beam_idx[i]``."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences of these indices only."""
        self._change(lambda tensor: tensor[indices.to(tensor.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence."""
        self._change(lambda tensor: tensor.repeat_interleave(repeats, dim=0))


class StatsLayer(StateLayer):
    """The running sums of a ToST layer, of constant size. No token can be removed."""

    _layer_type = "token_stats"
    keys = values = None

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse to remove tokens, which running sums cannot do."""
        if tokens_to_remove:
            raise NotImplementedError("StatsLayer: tokens cannot be taken out of running sums; copy the cache before")


class SubspaceLayer(StateLayer):
    """The projected tokens of a subspace attention: one tensor, which grows by doubling."""

    _layer_type = "subspace"
    is_croppable = True
    _growing: tuple[str, ...] = ("data",)

    def _allocate(self, block: Any, batch: int, new: int) -> None:
        super()._allocate(block, batch, new)
        if self.max_cache_len is not None or self.columns + new <= self.cache.max_seqlen:
            return  # a cache that may not grow refuses what does not fit
        capacity = max(2 * self.cache.max_seqlen, self.columns + new)
        for name in self._growing:
            stored = getattr(self.cache, name)
            setattr(self.cache, name, F.pad(stored, (0, 0, 0, capacity - stored.shape[2])))

    @property
    def keys(self) -> Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Return the cached tokens, (batch, heads, columns, head_dim); None before the first."""
        return None if self.cache is None else getattr(self.cache, self._growing[0])[:, :, : self.columns]

    @property
    def values(self) -> Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Return the cached values; with subspace attention they are the keys."""
        return None if self.cache is None else getattr(self.cache, self._growing[-1])[:, :, : self.columns]

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens of every sequence."""
        tokens_to_remove = int(tokens_to_remove)  # transformers 5.17 passes a tensor
        if tokens_to_remove > 0:
            raise ValueError(f"{type(self).__name__}: tokens_to_remove must be at most 0, got {tokens_to_remove}")
        if not tokens_to_remove or self.cache is None:
            return
        remaining = self.columns + tokens_to_remove
        if remaining < self.padded:
            raise ValueError(
                f"{type(self).__name__}: at least the {self.padded} padded tokens must stay, got {remaining}"
            )
        if self.padded:
            self.cache.truncate(self.cache.lengths + tokens_to_remove)
            self.cache.truncate(int(self.cache.lengths.max()))  # on a GPU only a number tightens the host's bound
        else:
            self.cache.truncate(remaining)
        self.columns = remaining


class KeyValueLayer(SubspaceLayer):
    """Keys and values of the ordinary attention that AoT is compared with."""

    _layer_type = "key_value"
    _growing = ("keys", "values")


# Subclasses of StaticLayer would register themselves, and be compiled: ours are not fit for that.
cache_utils.STATIC_LAYER_TYPE_MAPPING.update(
    {"token_stats": StatsLayer, "subspace": SubspaceLayer, "key_value": KeyValueLayer}
)
