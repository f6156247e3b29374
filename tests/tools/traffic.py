"""Count reads and writes of interpreted Triton kernels and of PyTorch's operators beside them.

Within a launch an element is read from memory once: a later read, or a read after a write, is from a cache. The
docstrings of the kernels count in this way.
"""

from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter


def _tensors(argument):
    """Yield the tensors of a launch's arguments, some of which are records."""
    if isinstance(argument, torch.Tensor):
        yield argument
    elif isinstance(argument, tuple):
        for part in argument:
            yield from _tensors(part)


class _Operand:
    """A tensor of a launch, and which of its elements are in a cache."""

    def __init__(self, tensor):
        self.size, self.itemsize, self.first = tensor.numel(), tensor.element_size(), tensor.data_ptr()
        reach = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        self.cached = np.zeros(reach + 1 if self.size else 0, dtype=bool)

    def holds(self, address):
        return self.first <= address < self.first + self.cached.size * self.itemsize


class Traffic(TorchDispatchMode):
    """Elements read and written, by the size of the tensor; ``launches`` by kernel."""

    def __init__(self):
        super().__init__()
        self.read, self.written, self.launches = Counter(), Counter(), Counter()
        self._operands = None

    def passes(self, size):
        """Return how often tensors of ``size`` elements are (read, written)."""
        return self.read[size] / size, self.written[size] / size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        moves = isinstance(result, torch.Tensor) and not func.is_view and "empty" not in func.name()
        if func.name() == "crate_kernels_C::lt_product":  # all but its workspace, which may go unused
            self._count((t for t in args[:4] if t is not None), args[-1])
        elif self._operands is None and moves:
            # Keyword arguments name at most the output.
            self._count((t for t in args if isinstance(t, torch.Tensor)), result)
        return result

    def _count(self, read, written):
        for tensor in read:
            self.read[tensor.numel()] += tensor.numel()
        self.written[written.numel()] += written.numel()

    def __enter__(self):
        self._patch = pytest.MonkeyPatch()
        launch, builder = interpreter.GridExecutor.__call__, interpreter.InterpreterBuilder
        load, store = builder.create_masked_load, builder.create_masked_store

        def launched(executor, *args, **kwargs):
            self.launches[executor.fn.__name__] += 1
            self._operands = [_Operand(t) for t in _tensors((*args, *kwargs.values()))]
            try:
                return launch(executor, *args, **kwargs)
            finally:
                self._operands = None

        def loaded(own, ptrs, mask, *rest):
            for operand, places in self._places(ptrs, mask):
                places = np.unique(places)
                self.read[operand.size] += int((~operand.cached[places]).sum())
                operand.cached[places] = True
            return load(own, ptrs, mask, *rest)

        def stored(own, ptrs, value, mask, *rest):
            for operand, places in self._places(ptrs, mask):
                self.written[operand.size] += places.size
                operand.cached[places] = True
            return store(own, ptrs, value, mask, *rest)

        self._patch.setattr(interpreter.GridExecutor, "__call__", launched)
        self._patch.setattr(builder, "create_masked_load", loaded)
        self._patch.setattr(builder, "create_masked_store", stored)
        return super().__enter__()

    def __exit__(self, *exception):
        self._patch.undo()
        return super().__exit__(*exception)

    def _places(self, ptrs, mask):
        """Yield the tensor of a load or store and the indices of its elements; nothing if all are masked."""
        there = np.broadcast_to(mask.data, ptrs.data.shape).astype(bool)  # a mask of one number is an integer
        addresses = ptrs.data[there].astype(np.int64).ravel()
        if addresses.size:
            operand = next(o for o in self._operands if o.holds(addresses[0]))
            yield operand, (addresses - operand.first) // operand.itemsize
