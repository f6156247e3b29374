"""fp32 heads with a negative scale and a few long tokens, whose rows have all of a head's error.

A score of a hundred is off by some 2^-17, and so is the logarithm of its weight. Eager's error may be small by chance.
"""

import math

import pytest
import torch

from crate_kernels import mssa, testing
from tests.ops.common import LEVELS, NEEDS_EXTENSION, randn

pytestmark = NEEDS_EXTENSION

SCALE, OWN_SCORE, EVERY = -0.3, -122.0, 20
SEEDS = (20, 33, 57)
ROUNDINGS = 4.5  # of the largest output; from scores in fp32 10 to 24 in each case, eager's up to 16
# (seqlen, head_dim, options)
CASES = {
    "full": (216, 24, {}),
    "wide": (216, 64, {}),
    "causal": (216, 24, {"causal": True}),
    "short-causal": (64, 24, {"causal": True}),
    "dropout": (216, 24, {"dropout_p": 0.3}),
    "padded": (216, 24, {"key_padding_mask": torch.arange(216)[None] % 7 != 1}),
    "packed": (216, 24, {"cu_seqlens": torch.tensor([0, 216], dtype=torch.int32), "max_seqlen": 216}),
}


def tokens(seqlen, head_dim, seed, packed=False):
    w = 0.1 * randn(1, 2, seqlen, head_dim, seed=seed, dtype=torch.float32)
    long = w[:, :, seed % EVERY :: EVERY]
    long *= math.sqrt(OWN_SCORE / SCALE) / long.norm(dim=-1, keepdim=True)
    return w[0].transpose(0, 1).contiguous() if packed else w


def results(w, backend, options):
    torch.manual_seed(0)
    out, lse = mssa(w, scale=SCALE, return_lse=True, backend=backend, **options)
    return {"out": out, "lse": lse}


@pytest.mark.parametrize("name", LEVELS)
@pytest.mark.parametrize("case", CASES)
def test_rows_of_a_few_long_tokens(case, name, level):
    level(name)
    seqlen, head_dim, options = CASES[case]
    for seed in SEEDS:
        w = tokens(seqlen, head_dim, seed, "cu_seqlens" in options)
        exact, eager = (results(x, "reference", options) for x in (w.double(), w))
        found = testing.measure(results(w, "cpp", options), eager, exact, torch.float32)
        assert all(one.passed for one in found), found
        assert found[0].error <= ROUNDINGS * torch.finfo(torch.float32).eps * exact["out"].abs().max()


@pytest.mark.parametrize("name", LEVELS)
def test_later_long_tokens_change_no_bit_of_a_causal_prefix(name, level):
    level(name)
    w, seen = tokens(216, 24, 0), 150
    other = torch.cat([w[:, :, :seen], 30 * w[:, :, seen:]], 2)
    one, two = (results(x, "cpp", {"causal": True}) for x in (w, other))
    assert all(torch.equal(one[key][:, :, :seen], two[key][:, :, :seen]) for key in one)
