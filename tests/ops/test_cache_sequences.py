"""Decoding: any sequence of operations on a cache, against a plain list of tokens."""

import pytest
import torch

from tests.ops.common import interpreted
from tests.ops.decoding import BATCH, CAPACITY, HEAD_DIM, HEADS, attend, calls, contents, new_cache, tokens

hypothesis = pytest.importorskip("hypothesis", reason="needs hypothesis: pip install hypothesis")
st = hypothesis.strategies

EACH = pytest.mark.parametrize(("op", "backend", "device"), calls(reference=True))


@st.composite
def operations(draw):
    """Draw what happens to a cache of three sequences, as (name, argument)."""
    lengths = st.tuples(*[st.integers(0, 4)] * BATCH)
    kinds = {
        "append": st.integers(1, 4),
        "ragged": lengths,
        "truncate": st.integers(0, 8),
        "truncate-each": lengths,
        "reorder": st.tuples(*[st.integers(0, BATCH - 1)] * BATCH),
        "clone": st.none(),
        "reset": st.none(),
    }
    names = st.sampled_from(["append", "append", "ragged", "ragged", *kinds])
    return [(name, draw(kinds[name])) for name in draw(st.lists(names, min_size=1, max_size=8))]


class Model:
    """A cache, and beside it what it must hold: a list of tokens a sequence."""

    def __init__(self, op, backend, device):
        self.op, self.backend, self.device = op, backend, device
        self.dtype = torch.float64 if backend in ("reference", "composite") else torch.float32
        self.cache, self.drawn = new_cache(op, self.dtype, device), 0
        self.sequences = [torch.zeros(HEADS, 0, HEAD_DIM, dtype=self.dtype, device=device)] * BATCH

    def apply(self, name, argument):
        if name in ("append", "ragged"):
            self.append((argument,) * BATCH if name == "append" else argument, ragged=name == "ragged")
        elif name in ("truncate", "truncate-each"):
            if self.op == "tssa":
                return
            limits = (argument,) * BATCH if name == "truncate" else argument
            self.cache.truncate(argument if name == "truncate" else torch.tensor(argument, device=self.device))
            self.sequences = [sequence[:, :limit] for sequence, limit in zip(self.sequences, limits, strict=True)]
        elif name == "reorder":
            self.cache.reorder(torch.tensor(argument, device=self.device))
            self.sequences = [self.sequences[b] for b in argument]
        elif name == "clone":
            abandoned, self.cache = self.cache, self.cache.clone()
            for tensor in contents(abandoned):
                tensor.fill_(7)
        else:
            self.cache.reset()
            self.sequences = [sequence[:, :0] for sequence in self.sequences]
        assert self.cache.lengths.tolist() == [sequence.shape[1] for sequence in self.sequences]

    def append(self, kept, ragged):
        new, self.drawn = max(kept), self.drawn + 1
        w = tokens(new, self.dtype, self.device, seed=self.drawn)
        mask = torch.arange(new, device=self.device) < torch.tensor(kept, device=self.device)[:, None]
        mask = mask if ragged else None
        # The host's bound on the longest sequence may be too high where it cannot read lengths, never too low.
        longest = max(sequence.shape[1] for sequence in self.sequences)
        assert self.cache._bound == longest if self.device == "cpu" else self.cache._bound >= longest
        if self.cache._bound + new > CAPACITY:  # capacity of the cache, or length of the tests' bias
            with pytest.raises(ValueError, match=r"capacity is 12|must cover the sequence"):
                attend(self.op, w, self.backend, self.cache, mask)
            return
        results = attend(self.op, w, self.backend, self.cache, mask)
        for b, n in enumerate(kept):
            self.sequences[b] = torch.cat([self.sequences[b], w[b, :, :n]], 1)
            if n:
                expected = attend(self.op, self.sequences[b][None], self.backend)
                for actual, full in zip(results, expected, strict=True):
                    torch.testing.assert_close(actual[b, :, :n], full[0, :, full.shape[2] - n :])


@EACH
def test_any_sequence_of_operations(op, backend, device):
    examples = 2 if interpreted(backend, device) else 30

    @hypothesis.settings(max_examples=examples, deadline=None, derandomize=True, database=None)
    @hypothesis.given(operations())
    def check(steps):
        model = Model(op, backend, device)
        for step in steps:
            model.apply(*step)

    check()
