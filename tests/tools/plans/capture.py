"""Captures of what plans launch, as CUDA graphs make them: a launch is noted, and made when the graph is replayed."""

import ctypes
from contextlib import contextmanager

_capturing = []  # the graph that notes launches, if one does


@contextmanager
def capturing():
    """Note launches in a Graph, and make none of them."""
    graph = Graph()
    _capturing.append(graph)
    try:
        yield graph
    finally:
        _capturing.pop()


def current():
    """Return the graph that notes launches now; None: they are made."""
    return _capturing[-1] if _capturing else None


class Graph:
    """Launches, to be made later, as often as wanted.

    Of a real graph, memory that was allocated in its capture stays allocated, though its tensors are gone. Here the
    allocator gives it to others, and replays take other memory in its place, which holds NaN before each of them.

    Attributes:
        launches: what makes it, the eight bytes of every parameter, and by its place how far an address reaches.
    """

    def __init__(self):
        self.launches = []

    def note(self, make, parameters, pointers, extents):
        """Note a launch that ``make(pointers)`` makes later."""
        contents = [ctypes.string_at(pointers[place], 8) for place in range(parameters)]
        self.launches.append((make, contents, extents))

    def replay(self, *static):
        """Make all launches. The memory of ``static`` tensors is theirs; all other is the graph's own."""
        memory = [(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in static]
        memory = [(first, first + count, first) for first, count in memory]
        own = self._own(memory)
        for make, contents, extents in self.launches:
            moved = list(contents)
            for place, extent in extents.items():
                address = int.from_bytes(contents[place], "little")
                if extent:
                    moved[place] = _moved(address, (*memory, *own)).to_bytes(8, "little")
            buffers = [ctypes.create_string_buffer(each, 8) for each in moved]
            make((ctypes.c_void_p * len(buffers))(*map(ctypes.addressof, buffers)))

    def _own(self, static):
        """Return (first, end, where it is now) of memory that launches touch and no static tensor has."""
        touched = []
        for _, contents, extents in self.launches:
            for place, extent in extents.items():
                first = int.from_bytes(contents[place], "little")
                if extent and not any(low <= first < end for low, end, _ in static):
                    touched.append((first, first + extent))
        joined = []
        for first, end in sorted(touched):
            if joined and first < joined[-1][1]:
                joined[-1][1] = max(joined[-1][1], end)
            else:
                joined.append([first, end])
        self._held = [ctypes.create_string_buffer(b"\xff" * (end - first + 64)) for first, end in joined]
        found = []
        for (first, end), buffer in zip(joined, self._held, strict=True):
            start = ctypes.addressof(buffer)
            found.append((first, end, start + (first - start) % 64))
        return found


def _moved(address, memory):
    return next(now + address - first for first, end, now in memory if first <= address < end)
