"""Both caches behind one set of calls, for the tests of decoding."""

import pytest
import torch

from crate_kernels import SubspaceCache, TokenStatsCache, mssa, tssa
from tests.ops.common import backends, randn

BATCH, HEADS, HEAD_DIM, CAPACITY = 3, 3, 8, 12
TEMP, BIAS = torch.tensor([0.8, 1.0, 1.3]), 0.05 * randn(HEADS, CAPACITY, seed=9)


def tokens(seqlen=CAPACITY, dtype=torch.float32, device="cpu", batch=BATCH, seed=0):
    return randn(batch, seqlen, HEADS, HEAD_DIM, seed=seed, dtype=dtype, device=device).transpose(1, 2)


def new_cache(op, dtype=torch.float32, device="cpu"):
    if op == "mssa":
        return SubspaceCache(BATCH, HEADS, CAPACITY, HEAD_DIM, dtype, device)
    return TokenStatsCache(BATCH, HEADS, HEAD_DIM, device=device)


def attend(op, w, backend, cache=None, mask=None):
    """Return (out, lse) or (out, membership) of the causal form."""
    options = {"causal": True, "cache": cache, "key_padding_mask": mask, "backend": backend}
    if op == "mssa":
        return mssa(w, return_lse=True, **options)
    parameter = torch.float64 if w.dtype == torch.float64 else torch.float32
    temp, bias = TEMP.to(w.device, parameter), BIAS.to(w.device, parameter)
    return tssa(w, temp, denom_bias=bias, return_membership=True, **options)


def contents(cache):
    return [cache.data, cache.lengths] if isinstance(cache, SubspaceCache) else list(cache._tensors())


def calls(reference):
    """List (op, backend, device) for everything that decodes here."""
    ids = ((op, p) for op in ("mssa", "tssa") for p in backends(op, reference))
    return [pytest.param(op, *p.values, id=f"{op}-{p.id}", marks=p.marks) for op, p in ids]
