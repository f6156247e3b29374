"""Caches of transformers from which our language models continue: continued, moved, offloaded, cropped, full."""

import copy
from contextlib import nullcontext

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: the extra hf")
from transformers import DynamicCache, StaticCache

from crate_kernels.integrations.transformers.caches import StateLayer
from tests.integrations.language import CONFIGS, CROPPABLE, cache_of, greedy, pair, prompts, wrapped

each_family = pytest.mark.parametrize("family", CONFIGS)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@each_family
def test_a_cache_is_continued(family, name):
    """By the name of this version of transformers and by that of others, in ``generate`` and in a call."""
    _, model = pair(family)
    expected = greedy(model, prompts(), 9)
    first = greedy(model, prompts(), 4, return_dict_in_generate=True)
    cache = cache_of(first)
    assert cache.get_seq_length() == 8  # the last token was not run
    deprecated = name == "past_key_values" and "cache" in first  # from 5.24 on, of every model of transformers
    message = "`past_key_values` is deprecated and will be removed in version .*Use `cache` instead"
    with pytest.warns(FutureWarning, match=message) if deprecated else nullcontext():
        with torch.no_grad():
            ahead = model(first.sequences[:, 8:], use_cache=False, **{name: copy.deepcopy(cache)}).logits[:, -1]
        assert torch.equal(ahead.argmax(-1), expected[:, 9])
    with pytest.warns(FutureWarning, match=message) if deprecated else nullcontext():
        assert torch.equal(greedy(model, first.sequences, 5, **{name: cache}), expected)


@each_family
def test_chunks_of_any_size_give_the_same_logits(family):
    """Padding inside, too: a mask that ends the first chunk's rows early."""
    _, model = pair(family)
    tokens, mask = prompts(2, 9), torch.ones(2, 9, dtype=torch.int64)
    mask[0, :2] = mask[1, 3] = 0
    with torch.no_grad():
        whole = model(tokens, attention_mask=mask, use_cache=False).logits
        cache, parts = DynamicCache(config=model.config), []
        for start, stop in ((0, 4), (4, 5), (5, 9)):
            out = model(tokens[:, start:stop], attention_mask=mask[:, :stop], cache=cache)
            parts.append(out.logits)
    kept = mask.bool()
    torch.testing.assert_close(torch.cat(parts, 1)[kept], whole[kept])


@pytest.mark.parametrize("waiting", [False, True], ids=["weights_here", "weights_elsewhere"])
@each_family
def test_caches_move_between_devices_and_rows(family, waiting):
    """Offloading moves a layer to the CPU and back; here both are the CPU, and the layers lose nothing.

    Weights that accelerate moves for each call are on the meta device between calls: no layer may follow them there.
    """
    ours, model = pair(family)
    if waiting:
        accelerate = pytest.importorskip("accelerate", reason="needs accelerate: the extra hf")
        model = accelerate.cpu_offload(wrapped(ours, family), torch.device("cpu"))
    tokens = prompts(3)
    with torch.no_grad():
        cache = cache_of(model(tokens, use_cache=True))
        for layer in cache.layers:
            layer.offload()
            layer.prefetch()
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([5, 0]))
        cache.reorder_cache(torch.tensor([1, 0]))
        rows = torch.tensor([0, 2])
        result = model(tokens[rows, :1], cache=cache).logits
        expected = model(torch.cat([tokens, tokens[:, :1]], 1)[rows], use_cache=False).logits[:, -1:]
    torch.testing.assert_close(result, expected)
    for function in (lambda t: t.to("meta"), lambda t: t):  # moved away twice: the block's device is the first
        layer._change(function)
        assert layer.device == torch.device("cpu")
    cache.reset()
    assert cache.get_seq_length() == 0


class Stream:
    """Stands in for a stream of a GPU."""

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def wait_stream(self, other):
        pass


@pytest.mark.parametrize("kind", ["offloaded", "offloaded_static"])
@each_family
def test_offloaded_caches_give_the_same_tokens(family, kind, monkeypatch):
    """Without a GPU, what is offloaded is hidden until it is fetched again: reading it too early gives NaN."""
    ours, model = pair(family)
    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: Stream())
    away, fetched = {}, []

    def offload(layer):
        attributes = vars(layer.cache)
        away[layer] = {name: t.clone() for name, t in attributes.items() if isinstance(t, torch.Tensor)}
        original[0](layer)
        layer._change(lambda t: torch.full_like(t, torch.nan if t.is_floating_point() else -1))

    def prefetch(layer):
        if layer in away:
            vars(layer.cache).update(away.pop(layer))
            fetched.append(layer)
        original[1](layer)

    original = StateLayer.offload, StateLayer.prefetch
    monkeypatch.setattr(StateLayer, "offload", offload)
    monkeypatch.setattr(StateLayer, "prefetch", prefetch)
    expected = ours.generate(prompts(), 8, temperature=0)
    assert torch.equal(greedy(model, prompts(), cache_implementation=kind), expected)
    assert len(fetched) >= 2 * 7  # both layers, for each token but the first


def test_cropping_keeps_the_padding():
    _, model = pair("crate_lm")
    mask = torch.tensor([[0, 0, 1, 1, 1]])
    with torch.no_grad():
        cache = cache_of(model(prompts(1), attention_mask=mask, use_cache=True))
        model(prompts(1, 3), attention_mask=torch.ones(1, 8).index_fill_(1, torch.tensor([0, 1]), 0), cache=cache)
    cache.crop(-2)
    assert cache.get_seq_length() == 6
    assert cache.layers[0].keys.shape == cache.layers[0].values.shape == (1, 3, 6, 8)
    with pytest.raises(ValueError, match=r"SubspaceLayer: at least the 2 padded tokens must stay, got 1"):
        cache.crop(-5)
    with pytest.raises(ValueError, match=r"SubspaceLayer: tokens_to_remove must be at most 0, got 3"):
        cache.crop(3)


def test_cropping_keeps_the_padding_of_a_later_block():
    _, model = pair("crate_lm")
    with torch.no_grad():
        cache = cache_of(model(prompts(1), use_cache=True))
        model(prompts(1, 3), attention_mask=torch.tensor([[1, 1, 1, 1, 1, 1, 0, 1]]), cache=cache)
    cache.crop(-1)
    assert cache.get_seq_length() == 7
    with pytest.raises(ValueError, match=r"SubspaceLayer: at least the 7 padded tokens must stay, got 6"):
        cache.crop(-1)


@pytest.mark.parametrize("left", [2, 3, 5], ids=["all-but-the-padding", "one-more", "nothing"])
@pytest.mark.parametrize("family", CROPPABLE)
def test_a_cropped_cache_continues_as_if_it_had_seen_no_more(family, left):
    _, model = pair(family)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]])
    rows, new = prompts(2, 5), prompts(2, 2).flip(1)
    with torch.no_grad():
        cache = cache_of(model(rows, attention_mask=mask[:, :5], use_cache=True))
        cache.crop(left - 5)
        assert cache.get_seq_length() == left
        mask = mask[:, : left + 2]
        actual = model(new, attention_mask=mask, cache=cache).logits
        expected = model(torch.cat([rows[:, :left], new], 1), attention_mask=mask).logits[:, left:]
    torch.testing.assert_close(actual, expected)


def test_a_static_cache_has_its_capacity():
    _, model = pair("aot_lm")
    cache = StaticCache(config=model.config, max_cache_len=6)
    assert cache.get_max_length() == 6
    with torch.no_grad():
        model(prompts(), cache=cache)
        model(prompts(2, 1), cache=cache)
        with pytest.raises(ValueError, match="its capacity is 6 tokens a sequence"):
            model(prompts(2, 1), cache=cache)


@pytest.mark.parametrize("family", CROPPABLE)
def test_a_chunk_may_be_longer_than_the_cache(family):
    _, model = pair(family)
    tokens, cache = prompts(2, 14), DynamicCache(config=model.config)
    with torch.no_grad():
        whole = model(tokens).logits
        name = "cache" if "cache" in model(tokens[:, :1], use_cache=True) else "past_key_values"
        model(tokens[:, :2], **{name: cache})
        more = model(tokens[:, 2:], **{name: cache})
    torch.testing.assert_close(more.logits, whole[:, 2:], rtol=1e-4, atol=1e-5)
