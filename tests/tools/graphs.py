"""A stand-in for CUDA graphs on CPU tensors: what a capture calls is noted, and done when the graph is replayed.

As in a capture on a GPU, nothing is computed in one: tensors that were there keep their values, results hold NaN
until a replay, numbers of the host are those of the capture, and a read of a value on the host is an error.
"""

from contextlib import contextmanager, nullcontext
from typing import ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from crate_kernels._core import checks
from crate_kernels.models._shared import graphed
from crate_kernels.ops.mssa import composite

_READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.equal.default}


def _tensors(*trees):
    return [leaf for leaf in tree_leaves(trees) if isinstance(leaf, torch.Tensor)]


class Graph:
    """Takes the place of ``torch.cuda.CUDAGraph``.

    Attributes:
        made: every graph of a test.
        calls: (operator, arguments, keywords, results) of the capture.
        replays: how often it was replayed.
        generators: those that it may draw from, beside torch's own.
    """

    made: ClassVar = []

    def __init__(self):
        self.calls, self.replays, self.generators = [], 0, []
        Graph.made.append(self)

    def register_generator_state(self, generator):
        self.generators.append(generator)

    def replay(self):
        self.replays += 1
        with torch.no_grad():
            for function, args, kwargs, results in self.calls:
                for old, new in zip(_tensors(results), _tensors(function(*args, **kwargs)), strict=True):
                    if old.data_ptr() != new.data_ptr():
                        old.copy_(new)


class _Capture(TorchDispatchMode):
    def __init__(self, graph):
        super().__init__()
        self.graph, self.before, self.own = graph, {}, {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in _READS:
            raise RuntimeError(f"{function}: operation not permitted when stream is capturing")
        kwargs = kwargs or {}
        inputs = _tensors(args, kwargs)
        for t in inputs:
            storage = t.untyped_storage()
            if storage.data_ptr() not in self.own and storage.data_ptr() not in self.before:
                self.before[storage.data_ptr()] = storage, storage.clone()
        results = function(*args, **kwargs)
        for t in _tensors(results):
            storage = t.untyped_storage()
            if storage.data_ptr() not in self.before:
                self.own[storage.data_ptr()] = storage
        self.graph.calls.append((function, args, kwargs, results))
        return results

    def end(self):
        """Undo what the calls did."""
        for storage, content in self.before.values():
            storage.copy_(content)
        for storage in self.own.values():
            storage.copy_(torch.full((storage.nbytes(),), 0xFF, dtype=torch.uint8).untyped_storage())


@contextmanager
def _capturing(graph, capture_error_mode="global"):
    drawn = [(generator, generator.get_state()) for generator in (torch.default_generator, *graph.generators)]
    with _Capture(graph) as capture:
        yield
    capture.end()
    for generator, state in drawn:
        generator.set_state(state)


def stand_in(monkeypatch):
    """Put ``Graph`` in the place of CUDA's graphs; what is read because a CPU's values are at hand is read no more."""
    Graph.made = []
    monkeypatch.setattr(graphed, "_DEVICES", ("cpu",))
    monkeypatch.setattr(checks, "_readable", lambda tensor: None)
    monkeypatch.setattr(composite, "_clear_beyond", composite._clear_unread)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", _capturing)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
