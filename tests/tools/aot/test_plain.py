"""A step of ista takes little more of a multiprocessor than a plain product of the same tile."""

import pytest

from tests.tools.aot import harness

harness.needs_compiler()

from tests.tools.aot import families, plain, report  # noqa: E402  # only where Triton compiles

LEAST = 0.85  # of the plain product's speed, by the bounds of both


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", report.TARGETS)
def test_a_step_is_nearly_as_fast_as_a_plain_product(target):
    every = families.launches("ista-d768", target, harness.launches)
    products = [launch for launch in every if "inner" in launch.arguments]
    assert products
    for launch in products:
        assert plain.clocks(plain.like(launch), target) >= LEAST * plain.clocks(launch, target)
