"""The emulator: blocks, warps and memory behave as on a GPU, and a fault on a GPU is an error."""

import pytest
import torch

from crate_kernels._core import philox
from crate_kernels._cuda import launch
from crate_kernels._cuda.sources import Kernel
from crate_kernels._native.driver import Shape
from tests.ops.common import randn
from tests.ops.conftest import poisoned_memory  # noqa: F401

ORDERS = pytest.mark.parametrize("descending", [False, True], ids=["ascending", "descending"])
FAULTS = (
    "none",
    "beyond",
    "before",
    "divergent barrier",
    "divergent warp",
    "early return",
    "stack",
    "trap",
    "misaligned",
)


@ORDERS
@pytest.mark.parametrize("threads", [32, 96, 256, 1024])
def test_sums_over_warps_and_blocks(threads, descending, library, device):
    device(descending=descending)
    x = (3 * randn(3, threads)).round().float()  # of which sums are exact in every order
    out = torch.empty(3, threads, 5)
    library.probe_sums(x, out, threads)
    block = x.double().sum(1, keepdim=True).expand(3, threads)
    warps = x.double().view(3, -1, 32)
    expected = [
        block,
        warps.sum(2, keepdim=True).expand_as(warps).reshape(3, threads),
        warps.amax(2, keepdim=True).expand_as(warps).reshape(3, threads),
        block,
        ((x > 0).sum(1, keepdim=True) * 100 + (x > 1).sum(1, keepdim=True)).double().expand(3, threads),
    ]
    assert torch.equal(out.double(), torch.stack(expected, -1))


@ORDERS
def test_shuffles_move_what_a_gpu_would(descending, library, device):
    device(descending=descending)
    out = torch.empty(32, 7, dtype=torch.int32)
    library.probe_shuffles(out)
    lanes = range(32)
    expected = [
        [5] * 32,
        [n ^ 3 for n in lanes],
        [n - 2 if n >= 2 else n for n in lanes],
        [n + 2 if n < 30 else n for n in lanes],
        [n - n % 8 + 1 for n in lanes],
        [n + 3 if n % 4 == 0 else n for n in lanes],
        [sum(1 << k for k in lanes if k % 3 == 0)] * 32,
    ]
    assert out.t().tolist() == expected


def test_a_missing_barrier_shows_in_one_of_the_orders(library, device):
    def run(barrier, descending):
        device(descending=descending)
        out = torch.empty(64)
        library.probe_neighbours(out, barrier)
        return out

    for descending in (False, True):
        assert torch.equal(run(True, descending), torch.ones(64))
    # A thread reads what the next one writes, after it or, but for the first, before.
    assert [run(False, order).isnan().sum() for order in (False, True)] == [63, 1]


def test_shared_memory_is_nan_in_every_block(library):
    out = torch.zeros(5)
    library.probe_poison(out)
    assert out.isnan().all()


def fault(library, name="none", grid=1, threads=64, nbytes=64, cluster=1):
    out = torch.empty(64)
    library.probe_fault(out, FAULTS.index(name), grid, threads, nbytes, cluster)
    return out


STOPPED = {
    "beyond": "left its shared memory",
    "before": "wrote before its shared memory",
    "divergent barrier": "a lane has returned while its warp waits",
    "divergent warp": "wait for each other in different operations",
    "early return": "a lane has returned while its warp waits",
    "stack": "left its shared memory, its stack",
    "trap": "a kernel trapped",
    "misaligned": "no multiple of what it read",
}


@ORDERS
@pytest.mark.parametrize(("name", "message"), STOPPED.items(), ids=STOPPED)
def test_what_a_gpu_does_not_forgive_is_an_error(name, message, descending, library, device):
    device(descending=descending)
    with pytest.raises(RuntimeError, match=message):
        fault(library, name)
    assert torch.equal(fault(library), torch.full((64,), 32.0))  # and the next launch is none the worse


REFUSED = {
    "too many threads": {"threads": 1056},
    "part of a warp": {"threads": 40},
    "shared memory": {"nbytes": 163 * 1024 + 16},
    "a cluster before sm_90": {"grid": 2, "cluster": 2},
}


@pytest.mark.parametrize("options", REFUSED.values(), ids=REFUSED)
def test_a_launch_that_a_gpu_refuses_is_an_error(options, library, device):
    device()
    with pytest.raises(RuntimeError, match=r"^CUDA error [19]$"):
        fault(library, **options)
    assert torch.equal(fault(library, nbytes=163 * 1024), torch.full((64,), 32.0))


@ORDERS
def test_blocks_of_a_cluster_see_each_other(descending, library, device):
    device(capability=90, descending=descending)
    out = torch.empty(8)
    library.probe_cluster(out, 4)
    assert out.tolist() == [11, 112, 213, 310, 15, 116, 217, 314]
    with pytest.raises(RuntimeError, match="CUDA error 9"):
        library.probe_cluster(torch.empty(6), 4)


@ORDERS
def test_blocks_of_a_cooperative_launch_wait_for_each_other(descending, library, device):
    device(capability=90, multiprocessors=8, descending=descending)

    def waiting(count, cooperative=True):
        out = torch.empty(count)
        library.probe_grid(out, torch.empty(count), torch.zeros(1, dtype=torch.int32), 2, cooperative)
        return out.tolist()

    assert waiting(8) == [36, 136] * 4
    assert waiting(2, cooperative=False) == [3, 103], "a cluster runs together"
    with pytest.raises(RuntimeError, match="emulator: threads wait for others that wait elsewhere"):
        waiting(4, cooperative=False)
    with pytest.raises(RuntimeError, match="CUDA error 720"):
        waiting(10)


def test_a_test_sets_what_planners_ask_the_device(library, device):
    cpu = torch.device("cpu")
    kernel = launch.function(Kernel("ista/cuda/update.cuh", "ista_symmetrize_kernel<bf16>"), cpu)

    def facts(cluster=1, nbytes=0):
        gpu = launch.gpu(cpu)
        clusters = gpu.active_clusters(kernel, Shape(cluster, 64, nbytes, cluster))
        return gpu.capability, gpu.multiprocessors, gpu.shared_limit, clusters

    device(capability=90, multiprocessors=12, shared_limit=99 * 1024)
    assert facts() == (90, 12, 99 * 1024, 12)
    assert facts(4, 60 * 1024)[3] == 3
    assert facts(4, 100 * 1024)[3] == 0
    device(capability=75)
    assert facts(2)[3] == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_conversions_round_as_pytorch_does(dtype, library):
    special = [0.0, -0.0, 1.0, torch.inf, -torch.inf, 65504.0, 65520.0, 1e-8, 6e-8, 3.4e38, 1 + 2**-8, 1 + 3 * 2**-8]
    special += [1 + 2**-11, 1 + 3 * 2**-11, 2.0**-24, 2.0**-25, 1.5 * 2.0**-24, 1e-40]
    x = torch.cat([torch.tensor(special), randn(4096, dtype=torch.float32) * torch.logspace(-9, 9, 4096)])
    out, back = torch.empty_like(x, dtype=dtype), torch.empty_like(x)
    library.probe_convert(x, out, back)
    assert torch.equal(out.view(torch.int16), x.to(dtype).view(torch.int16))
    assert torch.equal(back, x.to(dtype).float())
    library.probe_convert(torch.full((2,), torch.nan), out[:2], back[:2])
    assert out[:2].isnan().all()
    assert back[:2].isnan().all()


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, 0x123456789ABCDEF])
def test_philox_is_that_of_every_backend(seed, library):
    seed, out = torch.tensor(seed), torch.empty(64, dtype=torch.int32)
    library.probe_philox(seed, out, 3, 2**31 + 7)
    expected = philox.word0(seed, torch.arange(64), torch.tensor(3), torch.tensor(2**31 + 7))
    assert torch.equal(out.long() & 0xFFFFFFFF, expected)
