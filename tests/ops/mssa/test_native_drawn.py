"""Drawn calls of mssa in the C++ extension, within the budget of the named cases."""

import pytest

from crate_kernels import testing
from crate_kernels._native import extension
from tests.ops import drawn
from tests.ops.mssa.test_native import failures

pytestmark = pytest.mark.skipif(extension.PATH is None, reason="needs python -m crate_kernels build")


@drawn.calls(batch=2, heads=3, scale=drawn.st.sampled_from([None, None, 0.7, -0.2]))
def test_drawn_calls_are_within_budget(shape, causal, dropout_p, dtype, scale, **how):
    options = {"causal": causal, "dropout_p": dropout_p, "scale": scale, "return_lse": True}
    assert failures(testing.Case("mssa", "drawn", shape, options, **how), dtype) == []
