"""Let a plan that is checked repeat interpreted launches without computing them: what they left is copied.

A launch is a function of its kernel, its numbers, which of its tensors overlap, and the bytes that it reads. While a
call is ``noted``, each launch leaves its arguments, and what it read and wrote. While it is ``repeated``, a launch that
has the same arguments, in the same order, writes the same; any other is computed.
"""

from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_noted, _repeated = [], []  # of contexts that are open: lists of launches, and iterators of such


def _flat(arguments):
    """Return the bits of a launch's tensors, each from its first element to its last, and other arguments."""
    tensors = []

    def place(value):
        if isinstance(value, torch.Tensor):
            last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
            whole = value.detach().as_strided((last + 1 if value.numel() else 0,), (1,))
            tensors.append(whole.view(_BITS[value.element_size()]))
            return value.dtype, len(whole)
        return (type(value), *map(place, value)) if isinstance(value, tuple) else (type(value), value)

    others = {name: place(value) for name, value in arguments.items()}
    ranges = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors]
    overlaps = [b[0] - a[0] if a[0] < b[1] and b[0] < a[1] else None for a in ranges for b in ranges]
    return tensors, (others, overlaps)


class _Launch:
    """A launch's arguments, and what it read and wrote."""

    def __init__(self, executor, arguments):
        self._tensors, self._others = _flat(arguments)
        self._kernel = executor.fn, executor.grid
        self._before = [t.clone() for t in self._tensors]
        self.read, self.written = [], []  # addresses

    def end(self):
        """Find the elements that were read and written, and hold no tensor of the call."""
        read, written = (np.concatenate([*parts, np.zeros(0, np.uint64)]) for parts in (self.read, self.written))
        self._read_before = [
            (p := _places(t, read), old[p]) for t, old in zip(self._tensors, self._before, strict=True)
        ]
        self._left = [(p := _places(t, written), t[p]) for t in self._tensors]
        del self._tensors, self._before, self.read, self.written

    def repeat(self, executor, arguments):
        """Write what this launch wrote, and return True, if another has the same arguments."""
        tensors, others = _flat(arguments)
        if (self._kernel, self._others) != ((executor.fn, executor.grid), others):
            return False
        if not all(
            torch.equal(t[places], values) for t, (places, values) in zip(tensors, self._read_before, strict=True)
        ):
            return False
        for tensor, (places, values) in zip(tensors, self._left, strict=True):
            tensor[places] = values
        return True


def _places(tensor, addresses):
    """Return the elements of a tensor that lie at some of ``addresses``."""
    first, size = tensor.data_ptr(), tensor.element_size()
    inside = addresses[(addresses >= first) & (addresses < first + tensor.nbytes)]
    seen = np.zeros(len(tensor), dtype=bool)
    seen[((inside - np.uint64(first)) // np.uint64(size)).astype(np.int64)] = True
    return torch.from_numpy(seen.nonzero()[0])


@contextmanager
def noted():
    """Note the launches inside; yields them."""
    _noted.append([])
    try:
        yield _noted[-1]
    finally:
        _noted.pop()


@contextmanager
def repeated(launches):
    """Copy what ``launches`` left for those that repeat them, in their order."""
    _repeated.append(iter(launches))
    try:
        yield
    finally:
        _repeated.pop()


@contextmanager
def copied():
    """Patch the interpreter for as long as the context is open."""
    from triton.runtime import interpreter  # a process of plans need not have it

    compute, memory = interpreter.GridExecutor.__call__, interpreter._interpreter
    running = []  # the launch that is noted

    def launch(self, *values, **arguments):
        if _repeated:
            made = next(_repeated[-1], None)
            return None if made is not None and made.repeat(self, arguments) else compute(self, *values, **arguments)
        if not _noted or values:
            return compute(self, *values, **arguments)
        running.append(_Launch(self, arguments))
        try:
            compute(self, **arguments)
        finally:
            made = running.pop()
        made.end()
        _noted[-1].append(made)

    def load(pointers, mask, *rest):
        if running:
            running[-1].read.append(pointers[mask])
        return memory.load(pointers, mask, *rest)

    def store(pointers, values, mask):
        if running:
            running[-1].written.append(pointers[mask])
        return memory.store(pointers, values, mask)

    def unknown(*_):
        raise NotImplementedError("an atomic operation reads and writes: note both")

    functions = {"load": load, "store": store, "atomic_rmw": unknown, "atomic_cas": unknown}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "__call__", launch)
        patch.setattr(interpreter, "_interpreter", SimpleNamespace(**vars(memory) | functions))
        yield
