"""English text from every Python installation: the topics of its documentation, as bytes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from crate_kernels.experiments.common.draws import generator

_HELD_OUT = 0.1  # share of the text, at its end


@dataclass(frozen=True, eq=False)
class Corpus:
    """Bytes for training and for testing.

    Attributes:
        name: for people. train, test: (n,) uint8.
    """

    name: str
    train: Tensor
    test: Tensor


def load() -> Corpus:
    """Read ``pydoc_data.topics``: the texts of ``help()``, nearly half a megabyte."""
    from pydoc_data import topics

    whole = "\n\n".join(topics.topics[name] for name in sorted(topics.topics)).encode()
    data = torch.frombuffer(bytearray(whole), dtype=torch.uint8)
    start = int(len(data) * (1 - _HELD_OUT))
    name = f"the {len(topics.topics)} topics of Python's documentation, {len(data):,} bytes"
    return Corpus(name, data[:start], data[start:])


def batch(data: Tensor, length: int, count: int, *purpose: int) -> tuple[Tensor, Tensor]:
    """Draw ``count`` stretches of ``length`` bytes, and the next byte of each byte: (count, length) int64, twice."""
    starts = torch.randint(len(data) - length, (count,), generator=generator(*purpose))
    windows = data[starts[:, None] + torch.arange(length + 1)].long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def stretches(data: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Cut ``data`` into stretches of ``length`` and the next byte of each byte; drop the rest at the end."""
    count = (len(data) - 1) // length
    inputs, targets = data[: count * length], data[1 : count * length + 1]
    return inputs.view(count, length).long(), targets.view(count, length).long()


def readable(data: Tensor) -> str:
    """Turn bytes (n,) into text; invalid UTF-8 becomes a replacement character."""
    return bytes(data.tolist()).decode("utf-8", errors="replace")
