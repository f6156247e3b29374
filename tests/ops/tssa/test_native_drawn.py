"""Drawn calls of tssa in the C++ extension, within the budget of the named cases."""

import pytest

from crate_kernels._native import extension
from tests.ops import drawn
from tests.ops.tssa.test_native import failures, named

pytestmark = pytest.mark.skipif(extension.PATH is None, reason="needs python -m crate_kernels build")


@drawn.calls(batch=3, heads=5, special=("dead channel",))
def test_drawn_calls_are_within_budget(shape, causal, dropout_p, dtype, **how):
    assert failures(named("drawn", shape, causal, options={"dropout_p": dropout_p}, **how), dtype) == []
