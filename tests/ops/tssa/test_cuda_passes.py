"""How often the kernels on chip and the walking ones read and write each tensor: docs/kernels.md, docs/cuda.md.

The emulator counts the bytes of each launch, with its asynchronous copies.
"""

import pytest
import torch

from crate_kernels._cuda import launch
from crate_kernels.ops.tssa import op
from crate_kernels.ops.tssa.call import TSSACall
from tests.ops.tssa.common import DEVICES, halves, temps
from tests.ops.tssa.persistent import MAX_SHARED, PAIRS, TWICE, Persistent
from tests.ops.tssa.walking import PAIRS as WALKS
from tests.ops.tssa.walking import Walking, step_of

pytestmark = pytest.mark.exhaustive  # every kernel is compiled once more, to be followed

ONCE_READ, ONCE_WRITTEN = (1, 0), (0, 1)
STEP = step_of(WALKS, 96)


@pytest.fixture
def moved(library, device, unrepeated):
    """Return what says how often each tensor was read and written by the last launch; a Hopper GPU is emulated."""
    device(capability=90, shared_limit=MAX_SHARED, multiprocessors=4, traced=True)
    return lambda *tensors: [launch.gpu(torch.device("cpu")).moved(t) for t in tensors]


@pytest.mark.parametrize("config", [PAIRS, TWICE], ids=["cluster", "clusters"])
def test_the_persistent_kernels_read_and_write_tokens_once(config, moved, backend):
    w, temp, options = halves(3, 3, 45, 16).contiguous(), temps(3), TSSACall()
    dout = halves(3, 3, 45, 16, seed=1).contiguous()
    with Persistent.taking(config):
        out, *saved = op.tssa_fwd(w, temp, *options, backend)
        assert moved(w, out, saved[0]) == [ONCE_READ, ONCE_WRITTEN, ONCE_WRITTEN]
        dw, _ = op.tssa_bwd(dout, None, w, temp, *saved, *options, backend)
        assert moved(w, dout, dw, saved[0]) == [ONCE_READ, ONCE_READ, ONCE_WRITTEN, ONCE_READ]


@pytest.mark.parametrize("way", ["block", "cluster"])
def test_the_kernels_on_chip_read_and_write_tokens_once(way, moved, backend, device):
    device(**DEVICES[way], traced=True)
    w, temp, options = halves(2, 3, 85, 32).contiguous(), temps(3), TSSACall()
    dout = halves(2, 3, 85, 32, seed=1).contiguous()
    out, *saved = op.tssa_fwd(w, temp, *options, backend)
    assert moved(w, out) == [ONCE_READ, ONCE_WRITTEN]
    dw, _ = op.tssa_bwd(dout, None, w, temp, *saved, *options, backend)
    assert moved(w, dout, dw) == [ONCE_READ, ONCE_READ, ONCE_WRITTEN]


@pytest.mark.parametrize("saves", [True, False], ids=["saved", "found"])
@pytest.mark.parametrize("seqlen", [STEP, 190, 3 * STEP])
def test_the_walking_kernels_take_five_passes_over_tokens_with_saved_sums(seqlen, saves, moved, backend):
    """Without them the backward reads w and the membership of every step but the last once more."""
    w, temp, options = halves(4, 3, seqlen, 32).contiguous(), temps(3), TSSACall(sums_every=STEP if saves else 0)
    dout, walked = halves(4, 3, seqlen, 32, seed=1).contiguous(), (seqlen - 1) // STEP * STEP / seqlen
    read = (pytest.approx(1 + (not saves) * walked), 0)
    with Walking.taking(WALKS):
        out, membership, sums = op.tssa_causal_fwd(w, temp, None, *options, backend)
        assert moved(w, out, membership) == [ONCE_READ, ONCE_WRITTEN, ONCE_WRITTEN]
        assert (sums.numel() > 0) == (saves and walked > 0)
        if sums.numel():
            assert moved(sums) == [ONCE_WRITTEN]
        dw, *_ = op.tssa_causal_bwd(dout, None, w, temp, None, membership, sums, *options, backend)
        assert moved(w, dout, dw, membership) == [read, ONCE_READ, ONCE_WRITTEN, read]
