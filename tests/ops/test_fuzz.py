"""Drawn calls of every operator against float64: shapes, layouts, dtypes, masks and options that nobody thought of.

A few dozen a backend; ``make fuzz`` draws thousands, judged by separate equations.

The named cases check precision. Among hundreds of drawn ones are some where eager happens to be
exact (one token, or a sum that comes out to the last bit), so here an output is wrong if it lacks half the digits
of its dtype and eager does not lack as many: an element that is missed, masked or shifted is off by far more.
"""

import pytest
import torch

from crate_kernels import testing
from crate_kernels.testing import Case
from tests.ops.common import backends, eager_and_exact, measured

hypothesis = pytest.importorskip("hypothesis", reason="needs hypothesis: pip install hypothesis")
assume, given, st = hypothesis.assume, hypothesis.given, hypothesis.strategies

dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
layouts = st.sampled_from(["projection", "contiguous", "strided"])
dropouts = st.sampled_from([0.0, 0.0, 0.3])
magnitudes = st.sampled_from([0.1, 3**-0.5, 1.0, 2.0])
# Sizes on either side of every vector width and tile height, and sometimes of many tiles.
lengths = st.one_of(st.integers(1, 40), st.integers(60, 70), st.integers(120, 200))
packings = st.one_of(st.just(()), st.lists(st.integers(0, 70), min_size=1, max_size=4).map(tuple))
paddings = st.sampled_from(["", "", "right", "left", "scattered", "row"])


@st.composite
def attention_cases(draw, op):
    packed = draw(packings)
    assume(not packed or sum(packed) > 0)
    causal = draw(st.booleans())
    options = {"causal": causal, "dropout_p": draw(dropouts)}
    if op == "mssa":
        options["return_lse"] = draw(st.booleans())
        options["scale"] = draw(st.sampled_from([None, 0.5, -0.3, 0.0]))
        special = draw(st.sampled_from(["", "", "zero token", "mixed norms", "common mean"]))
    else:
        options["return_membership"] = draw(st.booleans())
        special = draw(st.sampled_from(["", "", "dead channel", "mixed norms"]))
    batch = 0 if packed else draw(st.integers(0, 3))
    seqlen = 0 if packed else draw(lengths)
    shape = batch, draw(st.integers(1, 5)), seqlen, draw(st.integers(1, 100))
    padding = "" if packed or batch == 0 else draw(paddings)
    # Special tokens already have large norms. Larger ones saturate the softmax and leave only rounding.
    magnitude = 3**-0.5 if special else draw(magnitudes)
    return Case(op, "drawn", shape, options, padding, packed, draw(layouts), magnitude, special)


@st.composite
def ista_cases(draw, op):
    batch, seqlen, dim = draw(st.integers(0, 3)), draw(st.integers(1, 70)), draw(st.integers(1, 70))
    options = {"step_size": draw(st.sampled_from([0.1, 0.3])), "lambd": draw(st.sampled_from([0.05, 0.1, 0.5]))}
    if op == "ista":
        options["nonnegative"] = draw(st.booleans())
        return Case(op, "drawn", (batch, seqlen, dim), options, layout=draw(layouts))
    options["steps"] = draw(st.integers(1, 3))
    special, hidden = draw(st.sampled_from(["", "tied"])), draw(st.integers(1, 90))
    return Case(op, "drawn", (batch, seqlen, dim, hidden), options, layout=draw(layouts), special=special)


DRAWN = {
    "mssa": ("mssa", attention_cases("mssa")),
    "tssa": ("tssa", attention_cases("tssa")),
    "ista": ("ista", ista_cases("ista")),
    "ista_overcomplete": ("ista", ista_cases("ista_overcomplete")),
}


def largest(values):
    finite = values[values.isfinite()].abs()
    return finite.max().item() if finite.numel() else 0.0


@pytest.mark.parametrize(
    ("cases", "backend", "device"),
    [
        pytest.param(cases, *backend.values, id=f"{name}-{backend.id}", marks=backend.marks)
        for name, (op, cases) in DRAWN.items()
        for backend in backends(op, reference=False)
    ],
)
@given(data=st.data(), dtype=dtypes)
def test_drawn_calls_are_right(cases, backend, device, data, dtype):
    case = data.draw(cases)
    assume(testing.excluded(case, backend, dtype, device) is None)
    try:
        eager, exact = eager_and_exact(case, dtype, device)
    except ValueError as error:
        assume("clear of their thresholds" not in str(error))
        raise
    eps = torch.finfo(dtype).eps
    sizes = {name: largest(value) for name, value in exact.items()}
    cancelled = max(sizes.values())
    if case.op == "mssa":
        # Kernels save out as they return it, rounded: the gradient has the rounding of dout . out, times scale * w.
        squares = testing.make_inputs(case, dtype, device).differentiable["w"].double().square().sum(-1)
        cancelled += abs(case.options.get("scale") or case.shape[-1] ** -0.5) * largest(squares)
    for m in measured(case, dtype, backend, device, eager, exact):
        assert m.finite, m
        # An almost cancelled result has the rounding of its terms.
        assert m.error <= m.tolerance + eps**0.5 * sizes[m.output] + eps * cancelled, m
