"""Forward passes and training steps of whole models."""

from benchmarks.common import What, grid
from crate_kernels.bench import networks

BRIEF_PROVIDERS = ("eager", "default")  # a whole model takes a minute to compile
NETWORKS = [
    What(
        n.name,
        n,
        tuple(d for d, batch in (("cpu", n.cpu_batch), ("cuda", n.gpu_batch)) if batch is not None),
        n.brief,
    )
    for n in networks.NETWORKS
]


@grid(NETWORKS, ["forward", "step"], networks.PROVIDERS)
def test_model(timed, what, dtype, direction, provider):
    network = what.subject
    timed(
        networks.blank(network, dtype, direction, provider),
        lambda row, device, timer: networks.measure(row, network, device, timer),
    )
