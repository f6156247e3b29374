"""Products of the interpreter have the bits of a score wherever it is met."""

import numpy as np
import pytest

from tests.tools.interpreter.products import GROUP, product

HEAD_DIMS = [16, 40, 64]


def matrix(rows, columns, seed):
    return np.random.default_rng(seed).standard_normal((rows, columns), dtype=np.float32)


def score(a, b):
    return product(a, b.T, np.zeros((len(a), len(b)), np.float32))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_a_score_has_its_bits_in_tiles_of_any_shape(head_dim):
    a, b = matrix(32, head_dim, 0), matrix(64, head_dim, 1)
    whole = score(a, b)
    for rows, columns in ((1, 1), (8, 64), (32, 16), (5, 33)):
        np.testing.assert_array_equal(score(a[:rows], b[:columns]), whole[:rows, :columns])


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_queries_and_keys_may_change_places(head_dim):
    a, b = matrix(32, head_dim, 0), matrix(64, head_dim, 1)
    np.testing.assert_array_equal(score(a, b), score(b, a).T)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_an_accumulator_is_float32(head_dim):
    a, b, total = matrix(16, head_dim, 0), matrix(16, head_dim, 1), np.full((16, 16), 2.0**20, np.float32)
    found = product(a, b.T, total)
    exact = total + a.astype(np.float64) @ b.T.astype(np.float64)
    assert found.dtype == np.float32
    assert 0 < np.abs(found - exact).max() <= -(-head_dim // GROUP) * np.spacing(np.float32(2.0**20))


@pytest.mark.parametrize("bits", [8, 24], ids=["bf16", "fp32"])
def test_a_group_is_exact(bits):
    """Of 1 + (1 + e)(e - 1) it leaves e^2, which products rounded one by one would lose."""
    e = np.float32(2.0 ** (1 - bits))
    ones = np.array([[1, 1 + e]], np.float32)
    assert product(ones, np.array([[1], [e - 1]], np.float32), np.zeros((1, 1), np.float32)) == e**2
