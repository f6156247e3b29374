"""Decoding by the C++ extension: blocks of the cache and their edges, at every level, and parts of it for threads."""

import pytest
import torch

from crate_kernels import SubspaceCache, mssa, testing
from tests.ops.common import DTYPES, LEVELS, NANS, NEEDS_EXTENSION, randn

pytestmark = NEEDS_EXTENSION

EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES)


def decode(backend, dtype, cached, lengths, w, keep=None):
    """Attend with ``w`` to the first ``lengths`` tokens of ``cached``; return (out, lse, cached tokens, lengths)."""
    cache = SubspaceCache(*cached.shape, dtype=dtype)
    cache.data.copy_(cached)
    cache.lengths.copy_(torch.tensor(lengths))
    cache._refresh_bound()
    options = {"causal": True, "cache": cache, "key_padding_mask": keep, "return_lse": True, "backend": backend}
    return *mssa(w.to(dtype), **options), cache.data, cache.lengths


_judged = {}


def check(dtype, cached, lengths, w, keep=None):
    """Compare a step of the extension with one of reference, and its results with float64.

    What judges it is computed once for all levels: tokens are drawn by their sizes.
    """
    call, key = (cached, lengths, w, keep), (dtype, cached.shape, *lengths, w.shape)
    if key not in _judged:
        _judged[key] = decode("reference", dtype, *call), decode("reference", torch.float64, *call)
    (eager, exact), (out, lse, data, lengths) = _judged[key], decode("cpp", dtype, *call)
    results = [{"out": o, "lse": torch.where(n == -torch.inf, 0.0, n)} for o, n in ((out, lse), eager[:2], exact[:2])]
    assert [m for m in testing.measure(*results, dtype) if not m.passed] == []
    assert torch.equal(lse == -torch.inf, exact[1] == -torch.inf)
    assert torch.equal(data, eager[2])
    assert torch.equal(lengths, eager[3])


@EACH_DTYPE
@pytest.mark.parametrize("name", LEVELS)
@pytest.mark.parametrize("new", [1, 17])
@pytest.mark.parametrize("head_dim", [40, 64, 144])
def test_every_edge_of_a_block_at_every_level(head_dim, new, name, dtype, level):
    level(name)
    for length in (0, 1, 7, 8, 9, 15, 16, 17, 46, 47, 48, 62, 63, 64, 65, 127, 128, 129):
        cached = randn(2, 2, length + new, head_dim, dtype=dtype)
        check(dtype, cached, [length, length // 2], randn(2, 2, new, head_dim, seed=1, dtype=dtype))


@EACH_DTYPE
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_a_cache_is_read_in_parts_by_more_threads_than_heads(count, dtype, threads):
    threads(count)
    # The second sequence has no token in the later parts; the third has none at all, nor a new one that is kept.
    cached, w = randn(3, 1, 1024, 40, dtype=dtype), randn(3, 1, 3, 40, seed=1, dtype=dtype)
    keep = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])
    check(dtype, cached, [900, 100, 0], w, keep)


@EACH_DTYPE
def test_what_follows_the_last_cached_token_is_not_read(dtype):
    cached, w = randn(1, 2, 200, 64, dtype=dtype), randn(1, 2, 1, 64, seed=1, dtype=dtype)
    clean = decode("cpp", dtype, cached, [69], w)[:2]
    cached[:, :, 70:] = torch.nan
    for result, expected in zip(decode("cpp", dtype, cached, [69], w), clean, strict=False):
        assert torch.equal(result, expected)


PLACES = {"first": 0, "end-of-a-part": 511, "last": 1022, "all-of-a-part": slice(512)}


@pytest.mark.parametrize("bits", NANS.values(), ids=NANS)
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
def test_not_a_number_stays_one_whichever_part_has_it(places, count, bits, threads):
    threads(count)
    cached = randn(1, 1, 1024, 64, dtype=torch.float32)
    cached.view(torch.int32)[:, :, places] = bits
    out, lse, *_ = decode("cpp", torch.float32, cached, [1023], randn(1, 1, 1, 64, seed=1))
    assert out.isnan().all()
    assert lse.isnan().all()
