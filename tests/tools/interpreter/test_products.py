"""Products of the interpreter have the bits of a score wherever it is met."""

import numpy as np
import pytest

from tests.tools.interpreter.products import GROUP, product

HEAD_DIMS = [16, 40, 64]
pytestmark = pytest.mark.parametrize("group", [1, GROUP], ids=["float32", "half"])


def matrix(rows, columns, seed):
    return np.random.default_rng(seed).standard_normal((rows, columns), dtype=np.float32)


def score(a, b, group):
    return product(a, b.T, np.zeros((len(a), len(b)), np.float32), group)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_a_score_has_its_bits_in_tiles_of_any_shape(head_dim, group):
    a, b = matrix(32, head_dim, 0), matrix(64, head_dim, 1)
    whole = score(a, b, group)
    for rows, columns in ((1, 1), (8, 64), (32, 16), (5, 33)):
        np.testing.assert_array_equal(score(a[:rows], b[:columns], group), whole[:rows, :columns])


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_queries_and_keys_may_change_places(head_dim, group):
    a, b = matrix(32, head_dim, 0), matrix(64, head_dim, 1)
    np.testing.assert_array_equal(score(a, b, group), score(b, a, group).T)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_an_accumulator_is_float32(head_dim, group):
    a, b, total = matrix(16, head_dim, 0), matrix(16, head_dim, 1), np.full((16, 16), 2.0**20, np.float32)
    found = product(a, b.T, total, group)
    exact = total + a.astype(np.float64) @ b.T.astype(np.float64)
    assert found.dtype == np.float32
    assert 0 < np.abs(found - exact).max() <= -(-head_dim // group) * np.spacing(np.float32(2.0**20))


def test_a_float32_channel_is_rounded_once(group):
    """As by a fused multiply-add: of 1 - (1 + e)(1 - e) it leaves e^2, which a rounded product would lose."""
    e = np.float32(2.0**-20)
    found = product(np.array([[1 + e]]), np.array([[e - 1]]), np.ones((1, 1), np.float32), group)
    assert found == e**2
