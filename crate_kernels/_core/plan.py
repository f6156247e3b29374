"""Plans: an op's Python body runs once under a recorder; later calls of the same kind are repeated by C++.

A kind of call is an op, its options, which of its tensors are there, and of every tensor the dtype, device, sizes,
strides and alignment. The second time that one is seen, the body runs under a ``Recorder``, which notes allocations,
views, launches and what PyTorch computes, and writes them down as a list of whole numbers. csrc/common/plan.cpp reads
the list, keeps it, and repeats it in a few microseconds. A body that does anything else stays in Python.

A plan holds what Python chose: whoever changes a choice by other means than a call's arguments calls ``forget``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cache
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from crate_kernels._core.recording import Recorder, Unplannable, this_thread
from crate_kernels._native import extension

_MAX_ENTRIES = 4096
_MAX_FAILURES = 64  # kinds of tensors of one entry that could not be recorded; after so many, none is tried
_MAX_TENSORS, _MAX_RESULTS = 9, 5  # of a call: kMaxTensors and kMaxResults of csrc/common/plan.cpp
_numbers = itertools.count(1)
_forgetful: list[Callable[[], None]] = []


def is_off() -> bool:
    """Return whether calls run in Python now: while one is recorded, and where something follows Triton's launches."""
    return this_thread.recorder is not None or (_is_watched is not None and _is_watched())


_is_watched: Callable[[], bool] | None = None


def watch(is_watched: Callable[[], bool]) -> None:
    """Leave calls to Python while ``is_watched`` says so, as where a profiler wants to see Triton's launches."""
    global _is_watched
    _is_watched = is_watched


class Entry:
    """The plans of the calls with the same options, by a number that C++ knows.

    Attributes:
        number: unique.
        tensors: how many a call has.
        run: takes the call's tensors and ``number``; returns the results, None for each where no plan serves it.
        failed: the kinds of tensors of which no plan could be made; with the same options, others may have one.
    """

    __slots__ = ("failed", "number", "run", "tensors")

    def __init__(self, tensors: int, results: int) -> None:
        self.number, self.tensors = next(_numbers), tensors
        self.failed: set[tuple] = set()
        self.run = runner(tensors, results)

    def record(self, tensors: Sequence[Tensor], body: Callable[[], Any]) -> Any:
        """Run a call that has no plan, and leave one the second time that its tensors are of one kind."""
        ops = torch.ops.crate_kernels_C
        if self.is_hopeless(tensors) or not ops.plan_meet(tensors, self.number):
            return body()
        with Recorder(tensors) as record:
            results = body()
        try:
            words = record.words(results if isinstance(results, tuple) else (results,))
            ops.plan_store(tensors, self.number, words)
        except (Unplannable, RuntimeError):
            self.failed.add(_kind(tensors))
        return results

    def is_hopeless(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether no plan can serve a call on such tensors, so that recording it is in vain."""
        if len(set(map(id, tensors))) < len(tensors):
            return True  # a plan could not tell one tensor that is passed twice from two
        if any([t._is_zerotensor() for t in tensors]):
            return True  # the dispatcher gives an op another tensor in its place, of other strides
        return bool(self.failed) and (len(self.failed) >= _MAX_FAILURES or _kind(tensors) in self.failed)


def _kind(tensors: Sequence[Tensor]) -> tuple:
    return tuple([(t.device, t.dtype, t.shape, t.stride()) for t in tensors])


class Planned:
    """The calls of one op that plans may serve.

    Args:
        places: which of the op's arguments are tensors; the last of the others is the name of the backend.
        count: of all arguments.
        results: how many tensors the op returns.
        serves: whether plans may serve a backend of that name, and the first tensor of a call.
    """

    def __init__(self, places: Sequence[int], count: int, results: int, serves: Callable[[str, Tensor], bool]) -> None:
        self.results, self._serves = results, serves
        self._places = tuple(places)
        others = [i for i in range(count) if i not in self._places]
        self._options = itemgetter(*others) if len(others) > 1 else lambda args: (args[others[0]],)
        self._entries: dict[tuple, Entry | None] = {}
        on_forget(self._entries.clear)

    def entry(self, args: Sequence[Any]) -> tuple[Entry | None, list[Tensor]]:
        """Return the entry of a call's options, None where no plan may serve them, and its tensors."""
        arguments = [args[i] for i in self._places]
        tensors = [t for t in arguments if t is not None]
        options = self._options(args)
        first = tensors[0]
        if len(tensors) < len(arguments):
            options += tuple([t is None for t in arguments])
        options += settings(first)
        found = self._entries.get(options)
        if found is None and options not in self._entries:
            if len(self._entries) >= _MAX_ENTRIES:
                self._entries.clear()
            served = len(tensors) <= _MAX_TENSORS and self._serves(args[-1], first)
            found = self._entries[options] = Entry(len(tensors), self.results) if served else None
        return found, tensors

    def __call__(self, args: tuple, body: Callable[..., Any]) -> Any:
        """Make a call by its plan, or by ``body``."""
        entry, tensors = self.entry(args)
        if entry is None:
            return body(*args)
        found = entry.run(*tensors, entry.number)
        if (found if self.results == 1 else found[0]) is not None:
            return found
        return entry.record(tensors, lambda: body(*args))


def settings(first: Tensor) -> tuple[Any, ...]:
    """Return the global settings on which a call on a GPU depends; none for other devices.

    Whether algorithms must be deterministic and, for float32, PyTorch's precision of products.
    """
    if not first.is_cuda:
        return ()
    found = ("deterministic",) if torch.are_deterministic_algorithms_enabled() else ()
    if first.dtype is torch.float32:
        found += (torch.backends.cuda.matmul.fp32_precision, torch._C._get_float32_matmul_precision())
    return found


@cache
def runner(tensors: int, results: int) -> Callable[..., Any]:
    """Return the C++ op that runs plans of so many tensors, and returns so many of their results."""
    _load()
    overload = getattr(torch.ops.crate_kernels_C, f"plan_{tensors}_{results}").default
    return getattr(overload, "_op", overload)  # what an overload calls, in nine tenths of the time


@cache
def offsets_fit() -> Callable[[Tensor, int, int], bool]:
    """Return the C++ op that checks the values of offsets on a CPU: for so many rows, and so long sequences."""
    _load()
    overload = torch.ops.crate_kernels_C.offsets_fit.default
    return getattr(overload, "_op", overload)


_fallthroughs: list[torch.library.Library] = []


@cache
def _load() -> None:
    """Load the extension, and let its ops that run plans take tensors that require a gradient, and nested ones.

    Of nested tensors there is no plan: the public functions say which argument must not be one.
    """
    extension.load()
    library = torch.library.Library("crate_kernels_C", "FRAGMENT")
    _fallthroughs.append(library)  # what it registers ends with it
    for results in range(1, _MAX_RESULTS + 1):
        nothing = None if results == 1 else (None,) * results
        for tensors in range(1, _MAX_TENSORS + 1):
            name = f"plan_{tensors}_{results}"
            library.impl(name, torch.library.fallthrough_kernel, "Autograd")
            for key in ("NestedTensorCPU", "NestedTensorCUDA"):
                library.impl(name, lambda *_, nothing=nothing: nothing, key)


def available() -> bool:
    """Return whether calls can have plans in this process."""
    return extension.PATH is not None


def on_forget(clear: Callable[[], None]) -> None:
    """Call ``clear`` whenever plans are dropped."""
    _forgetful.append(clear)


def forget() -> None:
    """Drop all plans: something on which they depend, and that no call names, has changed."""
    for clear in _forgetful:
        clear()
    if _fallthroughs:
        torch.ops.crate_kernels_C.plan_forget()


def counts() -> tuple[int, int, int]:
    """Return how many calls had a plan and how many had none, and how many plans there are."""
    return tuple(torch.ops.crate_kernels_C.plan_counts()) if _fallthroughs else (0, 0, 0)
