"""The covering sets of all operators together compile no more than continuous integration has time for."""

from tests.tools.aot import harness

harness.needs_compiler()

from tests.ops.ista import test_aot as test_ista  # noqa: E402
from tests.ops.mssa import test_aot as test_mssa  # noqa: E402
from tests.ops.tssa import test_aot as test_tssa  # noqa: E402  # only where Triton compiles
from tests.ops.tssa.aot import chosen  # noqa: E402

MAX_COMPILATIONS = 149  # compilations, of 0.3 to 2 seconds each


def launches():
    """Yield (launch, target) for every launch that the covering sets compile."""
    for call, targets, _ in test_mssa.COVERING.values():
        yield from ((launch, target) for target in targets for launch in harness.launches(call, target))
    for call, targets, steps in test_tssa.COVERING.values():
        yield from ((launch, target) for target in targets for launch in chosen(harness.launches(call, target), steps))
    for call, targets, which in test_ista.COVERING.values():
        yield from ((launch, target) for target in targets for launch in harness.launches(call, target)[which])


def test_every_launch_asks_for_fused_multiply_adds():
    """Triton 3.9 warns where a launch does not say, and 3.10 fuses none."""
    assert {launch.function.__name__ for launch, _ in launches() if not launch.options.get("enable_fp_fusion")} == set()


def test_the_covering_sets_are_small_and_of_all_targets():
    found = {
        (
            launch.function.__name__,
            target,
            harness.source_of(launch, harness.TARGETS[target]).hash(),
            str(launch.options),
        )
        for launch, target in launches()
    }
    assert len(found) <= MAX_COMPILATIONS
    for op in ("mssa", "tssa", "ista"):
        assert {target for name, target, *_ in found if name.startswith(f"_{op}")} == set(harness.TARGETS)
