"""The decoding state of causal token-statistics attention: constant in the length of the text."""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from crate_kernels._core import checks
from crate_kernels.ops.tssa.call import State


class RepeatableTSSA(NamedTuple):
    """A step that succeeded, for repeat.py.

    Attributes:
        options: the arguments beside tensors and cache. The next step must have the same objects: equal ones may be of
            a type that is refused, as 1 for True.
        kinds: sizes, dtype and device of the tokens, the temperature, the bias and the tensors of the cache.
        state: these; the next step must have the same objects.
        backend: the op's argument of that name.
    """

    options: tuple[Any, ...]
    kinds: tuple[Any, ...]
    state: State
    backend: str


class TokenStatsCache:
    """Running sums of causal TSSA: 2 * head_dim + 1 numbers per head, whatever the length.

    Pass it as ``tssa(w_new, temp, causal=True, cache=cache)``: the new tokens enter the sums one after the
    other. Inference only.

    Sums are float64, whatever the tokens are: in float32 every step would round them, which after thousands of steps is
    more than all other rounding. A cache with float32 sums, as earlier versions have saved, resumes in float32.

    Args:
        batch: number of sequences.
        nheads: number of heads.
        head_dim: channels per head.
        dtype: dtype of the sums, float64 or, but for float64 tokens, float32. float64 by default, float32 on a device
            without it.
        device: device of the sums; torch's default device by default.

    Attributes:
        energy: (batch, nheads, head_dim), sum of w^2.
        weighted: (batch, nheads, head_dim), sum of Pi w^2.
        mass: (batch, nheads), sum of Pi.
        lengths: (batch,) int32, tokens seen; the position that indexes ``denom_bias``.

    Raises:
        TypeError: a size is not an int.
        ValueError: a size is not positive, or dtype is not floating.
    """

    @checks.closed
    def __init__(
        self,
        batch: int,
        nheads: int,
        head_dim: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **unknown: NoReturn,
    ) -> None:
        if unknown:
            checks.no_keyword(TokenStatsCache.__init__, unknown)
        sizes = {"batch": batch, "nheads": nheads, "head_dim": head_dim}
        checks.cache_sizes("TokenStatsCache", sizes, dtype)
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        if dtype is None:
            dtype = torch.float32 if self.lengths.device.type == "mps" else torch.float64
        self.energy = torch.zeros(batch, nheads, head_dim, dtype=dtype, device=device)
        self.weighted = torch.zeros_like(self.energy)
        self.mass = torch.zeros(batch, nheads, dtype=dtype, device=device)
        self._bound = 0  # upper bound of the lengths
        self._last: RepeatableTSSA | None = None  # the previous step, if the next may repeat it

    def _tensors(self) -> State:
        return State(self.energy, self.weighted, self.mass, self.lengths)

    def reset(self) -> None:
        """Forget every token."""
        for tensor in self._tensors():
            tensor.zero_()
        self._bound = 0

    def truncate(self, lengths: int | Tensor) -> None:
        """Refuse: a token cannot be taken out of a running sum.

        Raises:
            NotImplementedError: always, except for ``lengths=0``, which is ``reset``.
        """
        if isinstance(lengths, int) and lengths == 0:
            return self.reset()
        raise NotImplementedError(
            "TokenStatsCache.truncate: running sums cannot be shortened; clone() the cache where you may return to"
        )

    def reorder(self, index: Tensor) -> None:
        """Replace sequence i by sequence ``index[i]``, as beam search does.

        Args:
            index: integer (batch,) tensor on the cache's device.
        """
        checks.cache_index("TokenStatsCache.reorder", index, self.lengths)
        for tensor in self._tensors():
            tensor.copy_(tensor.index_select(0, index))
        self._refresh_bound()

    def clone(self) -> TokenStatsCache:
        """Copy the sums and lengths."""
        copy = object.__new__(TokenStatsCache)
        copy.energy, copy.weighted, copy.mass, copy.lengths = (t.clone() for t in self._tensors())
        copy._bound, copy._last = self._bound, None
        return copy

    def __getstate__(self) -> dict[str, Any]:
        """Return what to pickle or copy; a backend that was chosen here may be missing elsewhere."""
        return {**self.__dict__, "_last": None}

    def _advance(self, new: int, ragged: bool) -> None:
        """Account for ``new`` tokens; ``ragged``: a padding mask kept fewer of them."""
        self._bound += new
        if ragged:
            self._refresh_bound()

    def _make_replayable(self, new: int) -> None:
        """Do nothing: every step of ``new`` tokens is right for any sums, and a CUDA graph may replay it."""

    def _refresh_bound(self) -> None:
        """Tighten the host's bound where the lengths are free to read."""
        if self.lengths.device.type == "cpu" and not torch.compiler.is_compiling():
            self._bound = int(self.lengths.max())
