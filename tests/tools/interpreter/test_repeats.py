"""A repeated launch is copied only where it would compute the same, and then leaves what it would have left."""

import pytest
import torch

triton = pytest.importorskip("triton", reason="copies what Triton interprets: pip install triton")

import triton.language as tl  # noqa: E402
from triton.runtime.interpreter import InterpretedFunction  # noqa: E402

from tests.tools.interpreter import launches, repeats  # noqa: E402

computed = []


def _kernel(x_ptr, y_ptr, out_ptr, factor, SIZE: tl.constexpr):
    """Add the first two numbers of x, times ``factor``, to y's; the last of out is not written, nor x's read."""
    computed.append(1)
    offsets = tl.arange(0, SIZE)
    inside = offsets < SIZE - 1
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0)
    tl.store(out_ptr + offsets, factor * x + tl.load(y_ptr + offsets, mask=inside), mask=inside)


kernel = InterpretedFunction(_kernel)


@pytest.fixture(autouse=True)
def interpreted():
    with launches.quick(), repeats.copied():
        yield


def launch_arguments(**changed):
    numbers = {name: torch.arange(4.0) + place for place, name in enumerate(("x_ptr", "y_ptr"))}
    return {**numbers, "out_ptr": torch.full((4,), torch.nan), "factor": 2.0, "SIZE": 4, **changed}


def launch(**changed):
    """Launch once and return the output."""
    arguments = launch_arguments(**changed)
    kernel[(1,)](**arguments)
    return arguments["out_ptr"]


def repeat(**changed):
    """Launch, repeat it with other arguments; return their output, and whether it was computed."""
    with repeats.noted() as noted:
        launch()
    computed.clear()
    with repeats.repeated(noted):
        out = launch(**changed)
    return out, bool(computed)


x, y = launch_arguments()["x_ptr"], launch_arguments()["y_ptr"]
SAME = {
    "elsewhere": {"x_ptr": x.clone()},
    "what-is-not-read": {"x_ptr": torch.tensor([*x[:3], 7.0]), "out_ptr": torch.zeros(4)},
}
OTHER = {
    "what-is-read": {"x_ptr": torch.tensor([x[0], 7.0, *x[2:]])},
    "sign-of-zero": {"x_ptr": torch.tensor([-0.0, *x[1:]])},
    "number": {"factor": 3.0},
    "type-of-number": {"factor": 2},
    "constant": {"SIZE": 2},
    "dtype": {"y_ptr": y.view(torch.int32)},
    "swapped": {"x_ptr": y, "y_ptr": x},
    "overlapping": {"x_ptr": (memory := torch.arange(5.0))[:4], "y_ptr": memory[1:]},
}


@pytest.mark.parametrize("changed", SAME.values(), ids=SAME)
def test_the_same_is_copied(changed):
    out, was_computed = repeat(**changed)
    assert not was_computed
    torch.testing.assert_close(out.clone(), launch(**changed), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("changed", OTHER.values(), ids=OTHER)
def test_anything_else_is_computed(changed):
    out, was_computed = repeat(**changed)
    assert was_computed
    torch.testing.assert_close(out.clone(), launch(**changed), rtol=0, atol=0, equal_nan=True)


def test_an_output_that_is_an_input_is_copied_and_computed_alike():
    with repeats.noted() as noted:
        first = launch(out_ptr=(shared := y.clone()), y_ptr=shared)
    computed.clear()
    with repeats.repeated(noted):
        again = launch(out_ptr=(shared := y.clone()), y_ptr=shared)
        assert not computed
        launch()  # one that was not noted
    assert computed
    assert again.equal(first)


def test_launches_are_repeated_in_their_order():
    with repeats.noted() as noted:
        launch()
        launch(factor=3.0)
    computed.clear()
    with repeats.repeated(noted):
        launch(factor=3.0)
        launch()
    assert len(computed) == 2
