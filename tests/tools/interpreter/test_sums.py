"""Sums of the interpreter round as few times as a GPU's."""

import numpy as np
import pytest

from tests.tools.interpreter.sums import total


@pytest.mark.parametrize(("shape", "axis"), [((4096, 2), 0), ((2, 4096), 1), ((2, 4096), -1), ((64, 64), None)])
def test_thousands_of_numbers(shape, axis):
    numbers = np.random.default_rng(0).random(shape, dtype=np.float32)
    exact = numbers.sum(axis, dtype=np.float64)
    found = total(numbers, axis)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, exact, rtol=2e-7)
