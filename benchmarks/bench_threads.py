"""A training step on 1 thread, on all, and beside busy processes."""

from benchmarks.common import What, grid
from crate_kernels.bench import threads

SITUATIONS = [
    What(f"threads-{name}", (name, *numbers), ("cpu",), True) for name, numbers in threads.situations().items()
]


@grid(SITUATIONS, ["step"], ["all"], ["fp32"])
def test_threads(together, what, dtype, direction, provider):
    name, count, others = what.subject
    together(
        [threads.blank(name, p) for p in threads.PROVIDERS],
        lambda rows, device, seconds: threads.measure(rows, count, others, seconds),
    )
