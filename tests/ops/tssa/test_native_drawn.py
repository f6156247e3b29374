"""Drawn calls of tssa in the C++ extension, within the budget of the named cases."""

import pytest

from crate_kernels._native import extension
from tests.ops.tssa.test_native import DTYPES, failures, named

hypothesis = pytest.importorskip("hypothesis", reason="needs hypothesis: pip install hypothesis")
given, settings, st = hypothesis.given, hypothesis.settings, hypothesis.strategies

pytestmark = pytest.mark.skipif(extension.PATH is None, reason="needs python -m crate_kernels build")


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(hypothesis.HealthCheck))
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 150), st.integers(1, 80)),
    dtype=st.sampled_from(list(DTYPES.values())),
    causal=st.booleans(),
    dropout_p=st.sampled_from([0.0, 0.0, 0.4]),
    padding=st.sampled_from(["", "", "right", "left", "scattered", "row"]),
    layout=st.sampled_from(["projection", "contiguous", "strided"]),
    magnitude=st.sampled_from([0.1, 0.6, 2.0]),
    special=st.sampled_from(["", "", "zero token", "mixed norms", "common mean", "dead channel"]),
)
def test_drawn_calls_are_within_budget(shape, dtype, causal, dropout_p, padding, layout, magnitude, special):
    how = {"padding": padding, "layout": layout, "magnitude": magnitude, "special": special}
    assert failures(named("drawn", shape, causal, options={"dropout_p": dropout_p}, **how), dtype) == []
