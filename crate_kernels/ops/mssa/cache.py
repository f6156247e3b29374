"""The decoding cache of subspace attention: one tensor, because key and value are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from crate_kernels._core import checks


class RepeatableMSSA(NamedTuple):
    """A step that succeeded, for repeat.py.

    Attributes:
        options: the arguments beside the tokens and the cache. The next step must have the same objects: equal ones
            may be of a type that is refused, as 1 for True.
        kind: shape, dtype and device of the tokens.
        data, lengths: the tensors of the cache; the next step must have the same objects.
        sizes: shapes and dtypes of these, which an assignment to their ``data`` changes.
        capacity: the largest number of tokens of a sequence.
        scale: factor of the scores.
        need_lse: whether lse is returned too.
        backend: the op's argument of that name.
        kernel: name and function of the backend that was chosen.
    """

    options: tuple[Any, ...]
    kind: tuple[torch.Size, torch.dtype, torch.device]
    data: Tensor
    lengths: Tensor
    sizes: tuple[Any, ...]
    capacity: int
    scale: float
    need_lse: bool
    backend: str
    kernel: tuple[str, Callable]


class SubspaceCache:
    """Cache of projected tokens: half the bytes of a key-value cache.

    Pass it as ``mssa(w_new, causal=True, cache=cache)``: the new tokens are appended, and each
    attends to everything cached before it and to the new tokens up to itself. Inference only.

    Capacity is checked on the host against an upper bound of the lengths, so that no step waits
    for the device; after a ragged prefill on a GPU the bound is the padded length.

    Args:
        batch: number of sequences.
        nheads: number of heads.
        max_seqlen: capacity, in tokens per sequence.
        head_dim: channels per head.
        dtype: dtype of the cached tokens; torch's default dtype by default.
        device: device of the cache; torch's default device by default.

    Attributes:
        data: (batch, nheads, max_seqlen, head_dim), the cached tokens.
        lengths: (batch,) int32 on the cache's device, number of tokens of each sequence.

    Raises:
        TypeError: a size is not an int.
        ValueError: a size is not positive, or dtype is not floating.
    """

    @checks.closed
    def __init__(
        self,
        batch: int,
        nheads: int,
        max_seqlen: int,
        head_dim: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **unknown: NoReturn,
    ) -> None:
        if unknown:
            checks.no_keyword(SubspaceCache.__init__, unknown)
        sizes = {"batch": batch, "nheads": nheads, "max_seqlen": max_seqlen, "head_dim": head_dim}
        checks.cache_sizes("SubspaceCache", sizes, dtype)
        self.data = torch.zeros(batch, nheads, max_seqlen, head_dim, dtype=dtype, device=device)
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        self._bound = 0  # upper bound of the lengths
        self._uniform = True  # every sequence has exactly _bound tokens
        self._last: RepeatableMSSA | None = None  # the previous step, if the next may repeat it

    @property
    def max_seqlen(self) -> int:
        """Capacity, in tokens per sequence."""
        return self.data.shape[2]

    def reset(self) -> None:
        """Forget every token."""
        self.truncate(0)

    def truncate(self, lengths: int | Tensor) -> None:
        """Keep at most the first ``lengths`` tokens of each sequence.

        Args:
            lengths: one length for all, or an integer (batch,) tensor on the cache's device.
        """
        if isinstance(lengths, Tensor):
            checks.cache_rows("SubspaceCache.truncate", "lengths", lengths, self.lengths)
            self.lengths.copy_(torch.minimum(self.lengths, lengths.clamp(min=0)))
            self._refresh_bound()
            return
        checks.integer("SubspaceCache.truncate", "lengths", lengths, minimum=0)
        self.lengths.clamp_(max=lengths)
        self._bound = min(self._bound, lengths)
        # A limit above every length leaves ragged lengths ragged; 0 makes them equal.
        self._uniform = self._uniform or self._bound == 0
        if not self._uniform:
            self._refresh_bound()

    def reorder(self, index: Tensor) -> None:
        """Replace sequence i by sequence ``index[i]``, as beam search does.

        Args:
            index: integer (batch,) tensor on the cache's device.
        """
        checks.cache_index("SubspaceCache.reorder", index, self.lengths)
        stored = self.data[:, :, : self._bound]
        stored.copy_(stored.index_select(0, index))
        self.lengths.copy_(self.lengths.index_select(0, index))
        if not self._uniform:  # the longest sequence may be gone
            self._refresh_bound()

    def clone(self) -> SubspaceCache:
        """Copy the cache, tokens and lengths."""
        copy = object.__new__(SubspaceCache)
        copy.data, copy.lengths = self.data.clone(), self.lengths.clone()
        copy._bound, copy._uniform, copy._last = self._bound, self._uniform, None
        return copy

    def __getstate__(self) -> dict[str, Any]:
        """Return what to pickle or copy; a kernel that was chosen here may be missing elsewhere."""
        return {**self.__dict__, "_last": None}

    def _check_space(self, w: Tensor) -> None:
        """Refuse new tokens that do not fit this cache; nothing is written."""
        sizes = self.data.shape
        checks.cache_matches("mssa", w, (*sizes[:2], *sizes[3:]), self.data.device, self.data.dtype)
        capacity = sizes[2]
        if self._bound + w.shape[2] > capacity:
            raise ValueError(
                f"mssa: cache is full: its capacity is {capacity} tokens a sequence, "
                f"up to {self._bound} are stored and {w.shape[2]} more came"
            )

    def _advance(self, new: int, ragged: bool) -> None:
        """Account for ``new`` appended tokens; ``ragged``: a padding mask kept fewer of them."""
        self._bound += new
        if ragged:
            self._refresh_bound()

    def _make_replayable(self, new: int) -> None:
        """Make the next step, of ``new`` tokens, right for any lengths, so that a CUDA graph may replay it."""
        self._bound, self._uniform = self.max_seqlen - new, False

    def _refresh_bound(self) -> None:
        """Tighten the host's bound where the lengths are free to read."""
        self._uniform = False
        if self.lengths.device.type == "cpu" and not torch.compiler.is_compiling():
            lengths = self.lengths.tolist()
            self._bound, self._uniform = max(lengths), min(lengths) == max(lengths)
