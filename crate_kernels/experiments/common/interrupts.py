"""Ctrl-C without the loss of a completed step."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred() -> Iterator[list[int]]:
    """Note Ctrl-C and termination instead of raising: raised inside a step, they leave half the weights updated.

    A second signal raises as usual.
    """
    received: list[int] = []
    previous = {}

    def note(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        for each, handler in previous.items():
            signal.signal(each, handler)

    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:  # keep ignoring it in a background job
            previous[number] = signal.signal(number, note)
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
