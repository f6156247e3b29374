"""Named cases that are timed: the layers of the published models, and the lengths that people ask about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from crate_kernels.testing.cases import Case

CPU, GPU = "cpu", "cuda"


@dataclass(frozen=True)
class Timed:
    """A case worth timing.

    Attributes:
        case: which call.
        layer: what has such a call.
        devices: device types on which its batch makes sense.
        brief: whether the default run times it; the full one takes all.
    """

    case: Case
    layer: str
    devices: tuple[str, ...]
    brief: bool = False

    def __str__(self) -> str:
        return self.case.name

    @property
    def seqlen(self) -> int:
        """Number of tokens of a sequence."""
        return self.case.shape[self._tokens]

    @property
    def _tokens(self) -> int:
        return 2 if self.case.op in ("mssa", "tssa") else 1

    def with_seqlen(self, seqlen: int) -> Timed:
        """Return the same case at another number of tokens."""
        return self._resized(self._tokens, seqlen)

    def with_batch(self, batch: int) -> Timed:
        """Return the same case at another batch size."""
        return self._resized(0, batch)

    def with_dim(self, dim: int) -> Timed:
        """Return the same case at another width: as many heads as fit, or another dictionary."""
        shape = self.case.shape
        if self.case.op in ("mssa", "tssa"):
            return self._resized(1, dim // shape[3])
        wide = self._resized(2, dim)
        return wide if len(shape) == 3 else wide._resized(3, dim * shape[3] // shape[2])

    def _resized(self, place: int, size: int) -> Timed:
        shape = tuple(size if i == place else n for i, n in enumerate(self.case.shape))
        return replace(self, case=replace(self.case, name="x".join(map(str, shape)), shape=shape))


def _both(
    op: str,
    name: str,
    layer: str,
    shape: tuple[int, ...],
    batches: tuple[int | None, int | None],
    options: Mapping[str, Any],
    brief: bool = False,
) -> list[Timed]:
    """Return the case at its (CPU, GPU) batch; None is a device on which it is not timed."""
    found: list[Timed] = []
    for device, batch in zip((CPU, GPU), batches, strict=True):
        if batch is not None:
            found.append(Timed(Case(op, name, (batch, *shape), options), layer, (device,), brief))
    return found


def _attention(op: str, name: str, layer: str, shape: tuple[int, int, int], batches: Any, **kwargs: Any) -> list[Timed]:
    """Return the full and the causal form of a case."""
    brief = kwargs.pop("brief", "")
    return [
        timed
        for form in ("full", "causal")
        for timed in _both(
            op,
            name if form == "full" else f"{name}-causal",
            layer,
            shape,
            batches,
            {"causal": True} if form == "causal" else {},
            form in brief,
        )
    ]


TIMED_CASES: tuple[Timed, ...] = (
    *_attention("mssa", "vit-197-d48", "CRATE-S, patch 16", (12, 197, 48), (8, 256)),
    *_attention("mssa", "vit-197-d64", "CRATE-B, patch 16", (12, 197, 64), (8, 256), brief="full"),
    *_attention("mssa", "vit-785-d64", "CRATE-B, patch 8", (12, 785, 64), (2, 64)),
    *_attention("mssa", "vit-785-d128", "CRATE-B demo, patch 8", (6, 785, 128), (None, 64)),
    *_attention("mssa", "lm-1024-d48", "CRATE-S width, 1024 tokens", (12, 1024, 48), (2, None)),
    *_attention("mssa", "lm-1024-d64", "causal CRATE base", (12, 1024, 64), (2, 32), brief="causal"),
    *_attention("mssa", "lm-4096-d48", "4096 tokens", (4, 4096, 48), (1, None)),
    *_attention("mssa", "lm-4096-d64", "4096 tokens", (4, 4096, 64), (1, 32), brief="full"),
    *_attention("mssa", "lm-4096-d128", "4096 tokens", (4, 4096, 128), (None, 16)),
    *_attention("mssa", "long-16k-d64", "16384 tokens", (4, 16384, 64), (None, 8)),
    *_attention("mssa", "long-16k-d128", "16384 tokens", (4, 16384, 128), (None, 4)),
    *_attention("mssa", "long-64k-d64", "65536 tokens", (4, 65536, 64), (None, 1)),
    *_attention("tssa", "vit-196-one", "ToST-S, one image", (8, 196, 48), (1, None)),
    *_attention("tssa", "vit-196", "ToST-S, patch 16", (8, 196, 48), (8, 256)),
    *_attention("tssa", "vit-196-many", "ToST-S, patch 16, large batch", (8, 196, 48), (64, None), brief="full"),
    *_attention("tssa", "vit-784", "ToST-M, patch 8", (8, 784, 64), (8, 128)),
    *_attention("tssa", "lm-1024", "ToST language base", (12, 1024, 64), (2, 32), brief="causal"),
    *_attention("tssa", "long-4096", "4096 tokens", (12, 4096, 64), (1, 16)),
    *_attention("tssa", "long-64k", "65536 tokens", (12, 65536, 64), (None, 1)),
    *_both("ista", "tokens-197", "CRATE-Ti, one image", (197, 384), (1, None), {}),
    *_both("ista", "tokens-1576", "CRATE-S, batch 8", (197, 576), (8, None), {}, brief=True),
    *_both("ista", "tokens-12608", "CRATE-S, batch 64", (197, 576), (64, 256), {}),
    *_both("ista", "crate-b", "CRATE-B", (197, 768), (8, 256), {}),
    *_both("ista", "lm-base", "causal CRATE base", (1024, 768), (2, 32), {}),
    *_both("ista_overcomplete", "alpha-s", "CRATE-alpha, 384 wide", (197, 384, 1536), (8, None), {}, brief=True),
    *_both("ista_overcomplete", "alpha-b", "CRATE-alpha B/16", (197, 768, 3072), (2, 128), {}),
)
