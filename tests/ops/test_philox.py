"""The dropout mask as a function of (seed, position): its boundary, and what seeds are drawn."""

import pytest
import torch

from crate_kernels._core import operator, philox
from tests.ops.naive_philox import philox4x32_10

COUNTER = (3, 1, 2)


@pytest.mark.parametrize("seed", [0, 5, -1, 2**63 - 1, 0x299F31D0A4093822])
def test_word_0_is_that_of_python_integers(seed):
    word = philox.word0(torch.tensor(seed), *map(torch.tensor, COUNTER))
    assert int(word) == philox4x32_10((*COUNTER, 0), seed)[0]


@pytest.mark.parametrize(("above", "kept"), [(0, True), (-1, True), (1, False)], ids=["at", "below", "above"])
def test_a_weight_is_kept_from_p_on(above, kept):
    word = philox4x32_10((*COUNTER, 0), 5)[0]
    columns, rows, heads = map(torch.tensor, COUNTER)
    p = (word + above) / 2**32  # exact in a Python float
    factor = philox.keep_factor(torch.tensor(5), p, heads, rows, columns, torch.float64)
    assert factor.item() == (1 / (1 - p) if kept else 0.0)


def test_seeds_fill_both_words_of_the_key():
    seeds = torch.stack([operator.draw_seed(torch.device("cpu")) for _ in range(16)])
    assert seeds.dtype == torch.int64
    assert (seeds >> 32).unique().numel() == (seeds & 0xFFFFFFFF).unique().numel() == 16
