"""Decoding by CUDA kernels under the emulator: what every cache does, and the splits that short ones hide."""

import pytest
import torch

from crate_kernels import SubspaceCache, mssa, testing
from tests.ops import test_cache as caches
from tests.ops import test_not_numbers
from tests.ops.common import DTYPES, randn
from tests.tools.emulator.plain import registered

BATCH, HEADS = 2, 2


@pytest.fixture(scope="module")
def decoder(library):
    with registered() as name:
        yield name


@pytest.fixture
def splits(decoder, monkeypatch):
    """Return a function that sets the number of stretches."""
    from tests.tools.emulator.plain.mssa import native

    return lambda count: monkeypatch.setattr(native, "choose_splits", lambda *sizes: count)


@pytest.mark.parametrize("blocks", caches.BLOCKS.values(), ids=caches.BLOCKS)
def test_decoding_equals_the_full_forward(decoder, blocks):
    caches.test_decoding_equals_the_full_forward("mssa", decoder, "cpu", blocks)


@pytest.mark.parametrize("scale", [-0.4, 0.0])
def test_decoding_takes_any_scale(decoder, scale):
    caches.test_decoding_takes_any_scale(decoder, "cpu", scale)


@pytest.mark.parametrize(
    "check",
    [
        caches.test_output_of_a_step_merges_its_heads_as_a_view,
        caches.test_ragged_prefill_then_steps,
        caches.test_an_empty_sequence_gives_zero_until_its_first_token,
        caches.test_reset_forgets_everything,
    ],
)
def test_what_every_cache_does(decoder, check):
    check("mssa", decoder, "cpu")


@pytest.mark.parametrize("ragged", [False, True], ids=["uniform", "ragged"])
def test_a_clone_is_independent(decoder, ragged):
    caches.test_a_clone_is_independent("mssa", decoder, "cpu", ragged)


def test_writes_beyond_the_capacity_are_dropped(decoder):
    caches.test_writes_beyond_the_capacity_are_dropped(decoder, "cpu")


def test_a_step_with_an_infinite_score_has_an_infinite_lse(decoder):
    test_not_numbers.test_a_step_with_an_infinite_score_has_an_infinite_lse(decoder, "cpu")


def filled(cached, capacity, head_dim, dtype, seed=0):
    """Return a cache whose sequences hold ``cached`` tokens, those after them NaN, and the tokens that it will hold."""
    w = randn(BATCH, HEADS, capacity, head_dim, seed=seed, dtype=dtype)
    cache = SubspaceCache(BATCH, HEADS, capacity, head_dim, dtype)
    cache.lengths.copy_(torch.tensor(cached))
    cache.data.fill_(torch.nan)
    for b, n in enumerate(cached):
        cache.data[b, :, :n] = w[b, :, :n]
    cache._bound, cache._uniform = max(cached), min(cached) == max(cached)
    return cache, w


def exact(cache, new, keep=None, dtype=torch.float64):
    """Decode with ``reference`` in ``dtype`` from a copy of the cache."""
    copy = cache.clone()
    copy.data = copy.data.nan_to_num().to(dtype)
    return mssa(new.to(dtype), causal=True, cache=copy, key_padding_mask=keep, return_lse=True, backend="reference")


def over_tolerance(decoder, cache, new, keep=None):
    """Return what a step gets wrong; the step is done."""
    r64, eager = exact(cache, new, keep), exact(cache, new, keep, new.dtype)
    actual = mssa(new, causal=True, cache=cache, key_padding_mask=keep, return_lse=True, backend=decoder)
    outputs, eager, r64 = ({"out": out, "lse": lse} for out, lse in (actual, eager, r64))
    return [m for m in testing.measure(outputs, eager, r64, new.dtype) if not m.passed]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("new", [1, 3, 5, 16, 17, 70], ids=lambda n: f"new{n}")
@pytest.mark.parametrize("count", [1, 2, 7], ids=lambda n: f"splits{n}")
def test_step_is_within_tolerance(decoder, splits, dtype, new, count):
    splits(count)
    cached = (130, 67)
    cache, w = filled(cached, 220, 64, dtype)
    tokens = torch.stack([w[b, :, n : n + new] for b, n in enumerate(cached)])
    assert over_tolerance(decoder, cache, tokens) == []
    assert cache.lengths.tolist() == [n + new for n in cached]
    for b, n in enumerate(cached):
        assert torch.equal(cache.data[b, :, : n + new], w[b, :, : n + new])
        assert cache.data[b, :, n + new :].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [1, 8, 20, 48, 72, 128, 132, 160, 256], ids=lambda d: f"d{d}")
@pytest.mark.parametrize("new", [1, 2, 18], ids=lambda n: f"new{n}")
def test_head_dims(decoder, splits, dtype, head_dim, new):
    splits(3)
    cache, w = filled((50, 0), 70, head_dim, dtype)
    assert over_tolerance(decoder, cache, torch.stack([w[0, :, 50 : 50 + new], w[1, :, :new]])) == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("new", [6, 40], ids=lambda n: f"new{n}")
@pytest.mark.parametrize("count", [1, 4], ids=lambda n: f"splits{n}")
def test_ragged_blocks_on_long_caches(decoder, splits, dtype, new, count):
    splits(count)
    cache, _ = filled((100, 0), 160, 32, dtype)
    keep = torch.arange(new) < torch.tensor([new - 2, 0])[:, None]
    tokens = randn(BATCH, HEADS, new, 32, seed=1, dtype=dtype)
    assert over_tolerance(decoder, cache, tokens, keep) == []
    assert cache.lengths.tolist() == [100 + new - 2, 0]
    assert torch.equal(cache.data[0, :, 100 : 98 + new], tokens[0, :, : new - 2])
    assert cache.data[0, :, 98 + new :].isnan().all()
    assert cache.data[1].isnan().all()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-7)])
@pytest.mark.parametrize("new", [3, 20], ids=lambda n: f"new{n}")
@pytest.mark.parametrize("lengths", [(-7, 300), (58, 60)], ids=["absurd", "nearly-full"])
def test_lengths_are_clamped_on_the_device(decoder, splits, dtype, tolerance, new, lengths):
    """They are public: whatever is written there, nothing beside the cache is touched and nothing dropped is seen."""
    splits(2)
    cache, _ = filled((60, 60), 60, 16, dtype)
    cache.lengths.copy_(torch.tensor(lengths))
    before, cache._bound = cache.data.clone(), 10
    cached = [min(max(n, 0), 60) for n in lengths]
    tokens = randn(BATCH, HEADS, new, 16, seed=1, dtype=dtype)
    out, lse = mssa(tokens, causal=True, cache=cache, return_lse=True, backend=decoder)
    for b, n in enumerate(cached):
        fits = min(new, 60 - n)
        before[b, :, n : n + fits] = tokens[b, :, :fits]
        keys = before[b, :, : n + fits].double()
        scores = 0.25 * tokens[b].double() @ keys.mT
        seen = torch.arange(n + fits) <= n + torch.arange(new)[:, None]
        scores = scores.masked_fill(~seen, -torch.inf)
        torch.testing.assert_close(out[b].double(), scores.softmax(-1) @ keys, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(lse[b].double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-5)
    assert torch.equal(cache.data, before)
    assert cache.lengths.tolist() == [min(n + new, 60) for n in cached]


def test_splits_follow_the_device(decoder, monkeypatch):
    """Few heads and a long cache are split as ``choose_splits`` says; what it is asked is the launch's real shape."""
    from tests.tools.emulator.plain.mssa import native

    asked, choose = [], native.choose_splits
    monkeypatch.setattr(native, "choose_splits", lambda *sizes: asked.append(sizes) or choose(*sizes))
    cache, w = filled((600, 600), 620, 16, torch.float32)
    mssa(w[:, :, :1], causal=True, cache=cache, backend=decoder)
    mssa(w[:, :, :9], causal=True, cache=cache, backend=decoder)
    # 16: four blocks for each of four multiprocessors. 600 / 64 and 601 / 64 tokens; 9 new are groups of 4, 4 and 1.
    assert asked == [(4, 16, 10), (12, 16, 10)]
    assert choose(*asked[0]) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("new", [1, 5, 30], ids=lambda n: f"new{n}")
def test_no_order_of_threads_changes_a_bit(decoder, splits, device, dtype, new):
    splits(3)
    results = []
    for descending in (False, True, False):
        device(descending=descending)
        cache, w = filled((90, 41), 140, 32, dtype)
        results.append((*mssa(w[:, :, :new], causal=True, cache=cache, return_lse=True, backend=decoder), cache.data))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=0, equal_nan=True)


def shifted(x):
    """Return a contiguous copy, an element off a multiple of 16 bytes."""
    return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("new", [1, 2, 30], ids=lambda n: f"new{n}")
def test_strides_change_no_bit(decoder, splits, dtype, new):
    splits(2)
    results = []
    layouts = (lambda t: t, lambda t: t.mT.contiguous().mT, lambda t: t.repeat_interleave(2, 2)[:, :, ::2], shifted)
    for lay_out in layouts:
        cache, w = filled((70, 9), 110, 24, dtype)
        results.append(mssa(lay_out(w[:, :, :new]), causal=True, cache=cache, return_lse=True, backend=decoder))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("new", [1, 5], ids=lambda n: f"new{n}")
def test_a_cache_may_start_anywhere(decoder, dtype, new):
    """The data of a cache that was put together from a larger tensor are not read in packs."""
    cache, w = filled((70, 9), 110, 24, dtype)
    cache.data = shifted(cache.data)
    assert over_tolerance(decoder, cache, w[:, :, :new]) == []


def test_lse_is_left_out(decoder):
    cache, w = filled((9, 9), 20, 16, torch.float32)
    expected, _ = exact(cache, w[:, :, :1])
    out = mssa(w[:, :, :1], causal=True, cache=cache, backend=decoder)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
