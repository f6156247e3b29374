"""Drawn calls of mssa in the C++ extension, within the budget of the named cases."""

import pytest

from crate_kernels import testing
from crate_kernels._native import extension
from tests.ops.mssa.test_native import DTYPES, failures

hypothesis = pytest.importorskip("hypothesis", reason="needs hypothesis: pip install hypothesis")
given, settings, st = hypothesis.given, hypothesis.settings, hypothesis.strategies

pytestmark = pytest.mark.skipif(extension.PATH is None, reason="needs python -m crate_kernels build")


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(hypothesis.HealthCheck))
@given(
    shape=st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 150), st.integers(1, 80)),
    dtype=st.sampled_from(list(DTYPES.values())),
    causal=st.booleans(),
    dropout_p=st.sampled_from([0.0, 0.0, 0.4]),
    padding=st.sampled_from(["", "", "right", "left", "scattered", "row"]),
    layout=st.sampled_from(["projection", "contiguous", "strided"]),
    magnitude=st.sampled_from([0.1, 0.6, 2.0]),
    special=st.sampled_from(["", "", "zero token", "mixed norms", "common mean"]),
    scale=st.sampled_from([None, None, 0.7, -0.2]),
)
def test_drawn_calls_are_within_budget(shape, causal, dropout_p, dtype, padding, layout, magnitude, special, scale):
    options = {"causal": causal, "dropout_p": dropout_p, "scale": scale, "return_lse": True}
    case = testing.Case(
        "mssa", "drawn", shape, options, padding=padding, layout=layout, magnitude=magnitude, special=special
    )
    assert failures(case, dtype) == []
