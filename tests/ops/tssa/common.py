"""What the tests of tssa share: forms, inputs, and the devices that the emulator is."""

import pytest
import torch

from crate_kernels import tssa
from tests.ops.common import randn

# The full form with a sequence of a few kB: all of it in one block, spread over a cluster, or in chunks of 32 tokens.
# The causal form has chunks of 64 tokens forward and 32 backward wherever a sequence is longer.
DEVICES = {
    "block": {"multiprocessors": 1},
    "cluster": {"capability": 90, "multiprocessors": 16},
    "chunks": {"shared_limit": 13 * 1024},  # the minimum that takes 512 channels
}
WAYS = pytest.mark.parametrize(
    ("causal", "way"),
    [*((False, way) for way in DEVICES), (True, "block")],
    ids=[*(f"full-{way}" for way in DEVICES), "causal"],
)


def going(device, way):
    """Make the emulated GPU one on which the full form goes a way of ``DEVICES``."""
    device(**DEVICES[way])


def call(causal, backend, **options):
    """Return ``tssa`` as a function of w, temp and possibly denom_bias."""

    def function(w, temp, bias=None):
        return tssa(w, temp, causal=causal, denom_bias=bias, return_membership=True, backend=backend, **options)

    return function


def tokens(*shape, dtype=torch.float32, seed=0, device="cpu"):
    batch, nheads, seqlen, head_dim = shape
    return randn(batch, seqlen, nheads, head_dim, dtype=dtype, seed=seed, device=device).transpose(1, 2)


def halves(*shape, seed=0):
    return tokens(*shape, dtype=torch.bfloat16, seed=seed)


def temps(nheads, device="cpu"):
    return 1 + 0.2 * randn(nheads, seed=7, dtype=torch.float32, device=device)


def bias(nheads, seqlen, device="cpu"):
    return 0.1 * randn(nheads, seqlen, dtype=torch.float32, seed=3, device=device)
