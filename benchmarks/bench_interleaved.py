"""The providers of a case interleaved, with cold caches, beside the warm calls of the other benchmarks."""

from benchmarks import common
from benchmarks.common import What
from crate_kernels import testing
from crate_kernels.bench import interleaved, networks, providers

CASES = [What(f"interleaved-{t.case.op}-{t}", t, ("cpu",), t.brief) for t in testing.TIMED_CASES if "cpu" in t.devices]
NETWORKS = [What(f"interleaved-{n.name}", n, ("cpu",), False) for n in networks.NETWORKS if n.cpu_batch]

_SLOW = ("flex",)  # seconds to compile


@common.grid(CASES, interleaved.DIRECTIONS, ["all"])
def test_interleaved(together, what, dtype, direction, provider):
    found = [p for p in providers.of(what.subject.case.op) if p.name not in _SLOW]
    together(
        [interleaved.blank(what.subject, dtype, direction, p.name) for p in found],
        lambda rows, device, seconds: interleaved.measure(rows, what.subject, found, device, seconds),
    )


@common.grid(NETWORKS, ["forward", "step"], ["all"])
def test_models_interleaved(together, what, dtype, direction, provider):
    network = what.subject
    together(
        networks.blank_interleaved(network, dtype, direction),
        lambda rows, device, seconds: networks.measure_interleaved(rows, network, device, seconds),
    )
