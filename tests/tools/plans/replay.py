"""Plans compared with the calls that they repeat: the first of every kind is recorded and repeated at once on copies.

The copies have other addresses, and the same strides, alignment and values. Results, and tensors that the call writes,
have to be the same bits. Later calls of that kind are repetitions, which the test itself judges.
"""

from contextlib import contextmanager

import pytest
import torch

from crate_kernels._core import launches, plan, recording
from tests.tools.interpreter import repeats

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def copies_of(tensors):
    """Copy tensors with all that lies around them: those of one memory are of one again, for a kernel may tell."""
    memory = {}
    for t in tensors:
        storage = t.untyped_storage()
        if storage.data_ptr() not in memory:
            before, after = len(storage) and storage.data_ptr() % 16, storage.nbytes()
            memory_of_copy = torch.zeros(after + 16, dtype=torch.uint8, device=t.device).untyped_storage()
            shift = (before - memory_of_copy.data_ptr()) % 16
            torch.tensor([], dtype=torch.uint8, device=t.device).set_(memory_of_copy, shift, (after,)).copy_(
                torch.tensor([], dtype=torch.uint8, device=t.device).set_(storage)
            )
            memory[storage.data_ptr()] = memory_of_copy, shift
    found = []
    for t in tensors:
        memory_of_copy, shift = memory[t.untyped_storage().data_ptr()]
        first = t.storage_offset() + shift // t.element_size()
        found.append(torch.tensor([], dtype=t.dtype, device=t.device).set_(memory_of_copy, first, t.shape, t.stride()))
    return found


def same_bits(a, b):
    """Return whether two tensors have the same layout and bits."""
    if (a.shape, a.stride(), a.dtype) != (b.shape, b.stride(), b.dtype):
        return False
    whole = _BITS[a.element_size()]
    return torch.equal(a.detach().contiguous().view(whole), b.detach().contiguous().view(whole))


def layout(t):
    return tuple(t.shape), t.stride(), t.dtype


class Checked:
    """What the checks have seen: how many kinds of calls were repeated, and why others were not."""

    def __init__(self):
        self.repeated, self.refused = 0, []


@contextmanager
def checked():
    """Check every kind of call inside this context; yields a Checked."""
    seen = Checked()

    def record(self, tensors, body):
        ops = torch.ops.crate_kernels_C
        if self.is_hopeless(tensors):
            return body()
        with torch.no_grad():
            copies = copies_of(tensors)
        with repeats.noted() as launched, recording.Recorder(tensors) as recorder:
            results = body()
        listed = results if isinstance(results, tuple) else (results,)
        try:
            words = recorder.words(listed)
        except launches.Unplannable as reason:
            self.failed.add(plan._kind(tensors))
            seen.refused.append(str(reason))
            return results
        ops.plan_store(tensors, self.number, words)
        with repeats.repeated(launched):
            again = self.run(*copies, self.number)
        again = again if isinstance(again, (tuple, list)) else (again,)
        assert again[0] is not None, "a plan that was just recorded did not run"
        seen.repeated += 1
        for number, (one, other) in enumerate(zip(listed, again, strict=True)):
            steps = [step.kind for step in recorder.steps]
            assert same_bits(one, other), f"result {number} of {steps}: {layout(one)}, {layout(other)}, {one - other}"
        for number, (one, other) in enumerate(zip(tensors, copies, strict=True)):
            assert same_bits(one, other), f"tensor {number}, which the call writes, differs"
        return results

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan.Entry, "record", record)
        plan.forget()
        try:
            yield seen
        finally:
            plan.forget()
