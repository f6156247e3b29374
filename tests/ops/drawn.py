"""What hypothesis draws for a kernel of the C++ extension, whichever the operator."""

import pytest
import torch

hypothesis = pytest.importorskip("hypothesis", reason="needs hypothesis: pip install hypothesis")
st = hypothesis.strategies


def calls(batch, heads, special=(), **own):
    """Decorate a test of drawn calls; ``special`` are the operator's own kinds of tokens, ``own`` its own options.

    The sizes are of up to ``batch`` sequences, ``heads`` heads, 150 tokens and 80 channels.
    """
    draw = hypothesis.given(
        shape=st.tuples(st.integers(1, batch), st.integers(1, heads), st.integers(1, 150), st.integers(1, 80)),
        dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
        causal=st.booleans(),
        dropout_p=st.sampled_from([0.0, 0.0, 0.4]),
        padding=st.sampled_from(["", "", "right", "left", "scattered", "row"]),
        layout=st.sampled_from(["projection", "contiguous", "strided"]),
        magnitude=st.sampled_from([0.1, 0.6, 2.0]),
        special=st.sampled_from(["", "", "zero token", "mixed norms", "common mean", *special]),
        **own,
    )
    every = list(hypothesis.HealthCheck)
    settings = hypothesis.settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=every)
    return lambda test: settings(draw(test))
