"""Decoding: whatever the blocks, a cache gives what the full causal forward gives."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from crate_kernels import SubspaceCache, mssa, testing
from crate_kernels._core import operator
from crate_kernels.ops.mssa import composite
from tests.ops.common import DTYPES, TURNS, backends, randn, seldom
from tests.ops.decoding import BATCH, CAPACITY, HEAD_DIM, HEADS, attend, calls, contents, new_cache, tokens

EACH = pytest.mark.parametrize(("op", "backend", "device"), calls(reference=True))
FUSED = pytest.mark.parametrize(("op", "backend", "device"), calls(reference=False))
SUBSPACE = pytest.mark.parametrize(("backend", "device"), backends("mssa"))
# NumPy warns where Triton's interpreter computes with inf and NaN.
INTERPRETED = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def decode(op, w, backend, cache, blocks):
    parts = [attend(op, block, backend, cache) for block in w.split(blocks, dim=2)]
    return tuple(torch.cat(results, 2) for results in zip(*parts, strict=True))


BLOCKS = {
    "token-by-token": [1] * 12,
    "all-at-once": [12],
    "prefill-and-steps": [9, 1, 1, 1],
    "blocks": [4, 4, 4],
    "uneven-blocks": [1, 5, 2, 4],
}


@EACH
@pytest.mark.parametrize("blocks", seldom(BLOCKS, "uneven-blocks"))
def test_decoding_equals_the_full_forward(op, backend, device, blocks):
    w, cache = tokens(device=device), new_cache(op, device=device)
    torch.testing.assert_close(decode(op, w, backend, cache, blocks), attend(op, w, backend))
    assert cache.lengths.tolist() == [CAPACITY] * BATCH


STEPS = pytest.mark.parametrize("blocks", seldom({"steps": [1] * 12, "blocks": [7, 1, 4]}, "blocks"))


@SUBSPACE
def test_a_block_of_many_tokens_is_appended_once(backend, device):
    """Several programs of a head share it; the cache has space to append it again."""
    w, cache = tokens(41, device=device), SubspaceCache(BATCH, HEADS, 100, HEAD_DIM, device=device)
    torch.testing.assert_close(decode("mssa", w, backend, cache, [40, 1]), attend("mssa", w, backend))
    assert cache.lengths.tolist() == [41] * BATCH


@TURNS
@EACH
@pytest.mark.parametrize("dtype", DTYPES)
@STEPS
def test_decoding_is_within_tolerance(op, backend, device, dtype, blocks):
    w = tokens(dtype=dtype, device=device)
    names = ("out", "statistic")
    actual, eager, exact = (
        dict(zip(names, results, strict=True))
        for results in (
            decode(op, w, backend, new_cache(op, dtype, device), blocks),
            attend(op, w, "reference"),
            attend(op, w.double(), "reference"),
        )
    )
    assert (actual["out"].dtype, actual["statistic"].dtype) == (dtype, torch.float32)
    assert [m for m in testing.measure(actual, eager, exact, dtype) if not m.passed] == []


@pytest.mark.parametrize("channel", [0.0, 1e-8, 6e-7], ids=["zero", "below", "across"])
@STEPS
@pytest.mark.parametrize(("backend", "device"), backends("tssa"))
def test_decoding_has_the_floor_of_the_full_forward(backend, device, blocks, channel):
    w = tokens(device=device)
    w[..., 5] *= channel
    actual = decode("tssa", w, backend, new_cache("tssa", device=device), blocks)
    torch.testing.assert_close(actual, attend("tssa", w, "reference"))


@SUBSPACE
@pytest.mark.parametrize("scale", seldom([-0.4, 0.0], -0.4))
def test_decoding_takes_any_scale(backend, device, scale):
    w, cache = tokens(device=device), new_cache("mssa", device=device)
    call = partial(mssa, causal=True, scale=scale, backend=backend)
    parts = [call(part, cache=cache) for part in w.split([7, 1, 4], dim=2)]
    torch.testing.assert_close(torch.cat(parts, 2), mssa(w, causal=True, scale=scale, backend="reference"))


@FUSED
def test_output_of_a_step_merges_its_heads_as_a_view(op, backend, device):
    cache = new_cache(op, device=device)
    for seqlen in (3, 1):
        out, _ = attend(op, tokens(seqlen, device=device), backend, cache)
        assert out.transpose(1, 2).flatten(2).data_ptr() == out.data_ptr()


@EACH
def test_ragged_prefill_then_steps(op, backend, device):
    """Sequences of 2, 5 and no tokens, right-padded; then a common step, a ragged block and another step."""
    cache, sequences = new_cache(op, device=device), [torch.empty(HEADS, 0, HEAD_DIM, device=device)] * BATCH
    for step, kept in enumerate([(2, 5, 0), (1, 1, 1), (3, 0, 2), (1, 1, 1)]):
        w = tokens(max(kept), device=device, seed=step)
        mask = torch.arange(max(kept), device=device) < torch.tensor(kept, device=device)[:, None]
        results = attend(op, w, backend, cache, mask if min(kept) < max(kept) else None)
        assert all(r.isfinite().all() for r in results) or step == 0, "a padded query of an empty sequence has lse -inf"
        for b, n in enumerate(kept):
            sequences[b] = torch.cat([sequences[b], w[b, :, :n]], 1)
            for actual, full in zip(results, attend(op, sequences[b][None], backend), strict=True):
                torch.testing.assert_close(actual[b, :, :n], full[0, :, full.shape[2] - n :])
    assert cache.lengths.tolist() == [7, 7, 4]


@EACH
def test_an_empty_sequence_gives_zero_until_its_first_token(op, backend, device):
    cache, mask = new_cache(op, device=device), torch.tensor([[True] * 2, [False] * 2, [True, False]], device=device)
    out, statistic = attend(op, tokens(2, device=device), backend, cache, mask)
    assert not out[1].any()
    assert statistic[1].eq(-torch.inf if op == "mssa" else 0.0).all()
    assert cache.lengths.tolist() == [2, 0, 1]


@FUSED
def test_padded_tokens_of_a_step_see_what_is_cached(op, backend, device):
    """Also those of a sequence that gets none of the new tokens: it has earlier ones."""
    cache, mask = new_cache(op, device=device), torch.tensor([[True] * 2, [False] * 2, [True, False]], device=device)
    attend(op, tokens(3, device=device), backend, cache)
    other, w = cache.clone(), tokens(2, device=device, seed=1)
    actual, expected = (attend(op, w, *on, mask) for on in ((backend, cache), ("reference", other)))
    torch.testing.assert_close(actual, expected)


TRUNCATED = {
    "int": (3, (3, 3, 3)),
    "zero": (0, (0, 0, 0)),
    "longer": (20, (6, 6, 6)),
    "tensor": ([2, 5, 0], (2, 5, 0)),
    "tensor-out-of-range": ([2, 2**40, -1], (2, 6, 0)),
}


@SUBSPACE
@pytest.mark.parametrize(("lengths", "kept"), seldom(TRUNCATED, "tensor-out-of-range"))
def test_truncate_forgets_the_end(backend, device, lengths, kept):
    w, cache = tokens(device=device), new_cache("mssa", device=device)
    attend("mssa", w[:, :, :6], backend, cache)
    cache.truncate(torch.tensor(lengths, device=device) if isinstance(lengths, list) else lengths)
    assert cache.lengths.tolist() == list(kept)
    out, lse = attend("mssa", w[:, :, 6:8], backend, cache)
    for b, n in enumerate(kept):
        full = attend("mssa", torch.cat([w[b : b + 1, :, :n], w[b : b + 1, :, 6:8]], 2), backend)
        torch.testing.assert_close((out[b, :, :2], lse[b]), (full[0][0, :, n:], full[1][0, :, n:]))


@SUBSPACE
@pytest.mark.parametrize(
    ("limit", "kept"), seldom({"above-some": (4, (2, 4, 0)), "above-one": (1, (1, 1, 0))}, "above-some")
)
def test_a_limit_above_ragged_lengths_leaves_them_ragged(backend, device, limit, kept):
    w, cache = tokens(device=device), new_cache("mssa", device=device)
    mask = torch.arange(5, device=device) < torch.tensor([2, 5, 0], device=device)[:, None]
    attend("mssa", w[:, :, :5], backend, cache, mask)
    cache.truncate(limit)
    assert cache.lengths.tolist() == list(kept)
    out, _ = attend("mssa", w[:, :, 5:6], backend, cache)
    for b, n in enumerate(kept):
        full, _ = attend("mssa", torch.cat([w[b : b + 1, :, :n], w[b : b + 1, :, 5:6]], 2), backend)
        torch.testing.assert_close(out[b], full[0, :, n:])


@SUBSPACE
def test_writes_beyond_the_capacity_are_dropped(backend, device):
    """The host cannot know what was written to ``lengths``, which is public."""
    w, cache = tokens(device=device), new_cache("mssa", device=device)
    attend("mssa", w[:, :, :10], backend, cache)
    cache.lengths.copy_(torch.tensor([11, 12, 4]))
    before, new = cache.data.clone(), tokens(2, device=device, seed=1)
    out, _ = attend("mssa", new, backend, cache, torch.ones(BATCH, 2, dtype=torch.bool, device=device))
    assert cache.lengths.tolist() == [12, 12, 6]
    before[0, :, 11], before[2, :, 4:6] = new[0, :, 0], new[2]
    for cached, expected, length in zip(cache.data, before, (12, 12, 6), strict=True):
        torch.testing.assert_close(cached[:, :length], expected[:, :length], rtol=0, atol=0)
    assert out.isfinite().all()


DROPPED = {
    "reset": lambda cache: cache.reset(),
    "truncate": lambda cache: cache.truncate(1),
    "truncate-each-and-reorder": lambda cache: (
        cache.truncate(torch.tensor([1, 0, 1], device=cache.lengths.device)),
        cache.reorder(torch.tensor([1, 0, 0], device=cache.lengths.device)),
    ),
}


@TURNS
@SUBSPACE
@INTERPRETED
@pytest.mark.parametrize(
    ("new", "left"), seldom({"nan": (3, torch.nan), "large": (3, 3e38), "infinite": (9, torch.inf)}, "nan", "infinite")
)
@pytest.mark.parametrize("drop", DROPPED.values(), ids=DROPPED)
def test_dropped_tokens_are_never_read(backend, device, drop, new, left):
    """Bit for bit: tokens of a sequence that ended may be anything, also where another's are longer now."""
    first, block, step = (tokens(n, device=device, seed=n) for n in (8, new, 1))
    mask = torch.arange(new, device=device) < torch.tensor([new, 1, 0], device=device)[:, None]
    results = []
    for value in (0.0, left):
        # A GPU's lengths are not read: the cache has space for all tokens, dropped ones too.
        cache = SubspaceCache(BATCH, HEADS, 8 + new + 1, HEAD_DIM, device=device)
        attend("mssa", torch.cat([first[:, :, :1], torch.full_like(first[:, :, 1:], value)], 2), backend, cache)
        drop(cache)
        cache = cache.clone()
        results.append((*attend("mssa", block, backend, cache, mask), *attend("mssa", step, backend, cache)))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
    assert all(r.isfinite().all() for r in results[1][2:])


@TURNS
@EACH
@INTERPRETED
@pytest.mark.parametrize("padded", [torch.nan, torch.inf, 3e38])
def test_padded_tokens_never_enter_a_cache(op, backend, device, padded):
    block, step = tokens(4, device=device), tokens(1, device=device, seed=1)
    mask = torch.arange(4, device=device) < torch.tensor([4, 2, 0], device=device)[:, None]
    results = []
    for value in (1.0, padded):
        cache = new_cache(op, device=device)
        outs = attend(op, torch.where(mask[:, None, :, None], block, value), backend, cache, mask)
        kept = [torch.where(mask[:, None, :].view(*mask.shape[:1], 1, 4, *[1] * (r.dim() - 3)), r, 0.0) for r in outs]
        results.append((*kept, *(t.clone() for t in contents(cache)), *attend(op, step, backend, cache)))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
    assert all(r.isfinite().all() for r in results[1])


@EACH
@INTERPRETED
def test_a_token_that_is_no_number_is_seen_by_those_after_it(op, backend, device):
    """And by no other sequence."""
    cache, w = new_cache(op, device=device), tokens(2, device=device)
    attend(op, torch.where(torch.arange(BATCH, device=device)[:, None, None, None] == 1, torch.nan, w), backend, cache)
    out, _ = attend(op, w, backend, cache)
    assert out.isnan().all(-1).all(-1).all(-1).tolist() == [False, True, False]
    assert out[::2].isfinite().all()


@EACH
def test_reset_forgets_everything(op, backend, device):
    w, cache = tokens(device=device), new_cache(op, device=device)
    first = decode(op, w[:, :, :7], backend, cache, [7])
    cache.reset()
    assert cache.lengths.tolist() == [0] * BATCH
    torch.testing.assert_close(decode(op, w[:, :, :7], backend, cache, [7]), first, rtol=0, atol=0)


@EACH
@pytest.mark.parametrize("dtype", seldom({"int32": torch.int32, "int64": torch.int64}, "int64"))
def test_reorder_gathers_sequences(op, backend, device, dtype):
    w, cache = tokens(device=device), new_cache(op, device=device)
    mask = torch.arange(5, device=device) < torch.tensor([2, 5, 3], device=device)[:, None]
    attend(op, w[:, :, :5], backend, cache, mask)
    index = [2, 0, 2]
    cache.reorder(torch.tensor(index, dtype=dtype, device=device))
    assert cache.lengths.tolist() == [3, 2, 3]
    results = attend(op, w[:, :, 5:6], backend, cache)
    for b, source in enumerate(index):
        n = (2, 5, 3)[source]
        sequence = torch.cat([w[source : source + 1, :, :n], w[b : b + 1, :, 5:6]], 2)
        for actual, full in zip(results, attend(op, sequence, backend), strict=True):
            torch.testing.assert_close(actual[b], full[0, :, n:])


RAGGED = {"longest-is-gone": ([2, 0, 2], 3), "all-are-short": ([0, 0, 0], 2), "longest-stays": ([1, 1, 0], 8)}


@pytest.mark.parametrize("op", ["mssa", "tssa"])
@pytest.mark.parametrize(("index", "bound"), RAGGED.values(), ids=RAGGED)
def test_reordering_forgets_the_longest_sequence_that_is_gone(op, index, bound):
    """What fits is taken: the host's bound is the longest stored length, where lengths are free to read."""
    cache = new_cache(op)
    mask = torch.arange(8) < torch.tensor([2, 8, 3])[:, None]
    attend(op, tokens(8), "reference", cache, mask)
    cache.reorder(torch.tensor(index))
    assert cache._bound == bound
    attend(op, tokens(CAPACITY - bound), "reference", cache)
    with pytest.raises(ValueError, match="cache is full" if op == "mssa" else "must cover the sequence"):
        attend(op, tokens(1), "reference", cache)


@EACH
@pytest.mark.parametrize("ragged", seldom({"uniform": False, "ragged": True}, "ragged"))
def test_a_clone_is_independent(op, backend, device, ragged):
    w, cache = tokens(device=device), new_cache(op, device=device)
    mask = torch.arange(4, device=device) < torch.tensor([2, 4, 0], device=device)[:, None]
    attend(op, w[:, :, :4], backend, cache, mask if ragged else None)
    clone = cache.clone()
    before = [t.clone() for t in contents(cache)]
    expected = attend(op, w[:, :, 4:6], backend, clone)
    torch.testing.assert_close(contents(cache), before, rtol=0, atol=0)
    torch.testing.assert_close(attend(op, w[:, :, 4:6], backend, cache), expected, rtol=0, atol=0)


@TURNS
@EACH
@pytest.mark.parametrize("ragged", [False, True], ids=["even", "ragged"])
@pytest.mark.parametrize("way", seldom(["direct", "dispatched", "compiled"], "direct"))
def test_autograd_sees_that_a_step_overwrote_what_it_saved(op, backend, device, way, ragged, monkeypatch):
    torch._dynamo.reset()
    if way == "dispatched":
        monkeypatch.setattr(operator, "nothing_intercepts", lambda args: False)
    step = torch.compile(attend, backend="aot_eager") if way == "compiled" and backend != "reference" else attend
    w, cache = tokens(device=device), new_cache(op, device=device)
    mask = torch.tensor([[True, True], [True, False], [True, True]], device=device) if ragged else None
    attend(op, w[:, :, :3], backend, cache)
    leaf = torch.ones((), device=device, requires_grad=True)
    read = [(leaf * t.to(torch.float32) if t.dtype == torch.int32 else leaf * t).sum() for t in contents(cache)]
    before = [t._version for t in contents(cache)]
    step(op, w[:, :, 3:5], backend, cache, mask)
    assert all(t._version > v for t, v in zip(contents(cache), before, strict=True))
    for loss, t in zip(read, contents(cache), strict=True):
        if t.dtype != torch.int32:  # autograd saved a copy of these
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


class Elsewhere(torch.Tensor):
    """A tensor whose values are, so it says, not free to read."""

    device = SimpleNamespace(type="cuda")


def test_places_beyond_a_sequence_are_cleared_alike_on_every_device():
    keys, lengths = randn(3, 2, 6, 4), torch.tensor([2, 6, 0], dtype=torch.int32)
    expected = keys.masked_fill(torch.arange(6)[:, None] >= lengths[:, None, None, None], 0.0)
    for where in (lengths, lengths.as_subclass(Elsewhere)):
        cleared = keys.clone()
        composite._clear_beyond(cleared, where)
        assert torch.equal(cleared, expected)


def test_no_row_that_attention_gets_is_without_a_key(monkeypatch):
    """Some of PyTorch's attentions give NaN for one, or a gradient that is NaN; composite clears such rows itself."""
    masks, attention = [], composite.F.scaled_dot_product_attention

    def spy(*args, attn_mask, **options):
        masks.append(attn_mask)
        return attention(*args, attn_mask=attn_mask, **options)

    monkeypatch.setattr(composite.F, "scaled_dot_product_attention", spy)
    kept = torch.tensor([[False] * 4, [True, True, False, False], [False, True, True, True]])
    for causal in (False, True):
        mssa(tokens(4), causal=causal, key_padding_mask=kept, backend="composite")
    cache = new_cache("mssa")
    for step in (kept.sort(1, descending=True).values, None):
        attend("mssa", tokens(4), "composite", cache, step)
    assert [mask.any(-1).all().item() for mask in masks] == [True] * 4


def test_running_sums_can_be_truncated_to_nothing():
    cache = new_cache("tssa")
    attend("tssa", tokens(4), "reference", cache)
    cache.truncate(0)
    torch.testing.assert_close(contents(cache), contents(new_cache("tssa")), rtol=0, atol=0)


def test_max_seqlen_is_the_capacity():
    assert SubspaceCache(2, 3, 12, 8).max_seqlen == 12
