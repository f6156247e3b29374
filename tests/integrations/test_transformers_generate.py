"""generate() of transformers on our language models: its tokens are those of our own generate, and of recomputing."""

import copy
from contextlib import nullcontext

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: the extra hf")
from transformers import DynamicCache, StaticCache
from transformers.generation.streamers import BaseStreamer

from crate_kernels.integrations.transformers.caches import StateLayer
from tests.integrations.language import CONFIGS, CROPPABLE, VOCABULARY, cache_of, greedy, pair, prompts, wrapped

each_family = pytest.mark.parametrize("family", CONFIGS)


@each_family
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_cache": False},
        {"cache_implementation": "static"},
    ],
    ids=lambda options: "_".join(map(str, options.values())) or "dynamic",
)
def test_greedy_tokens_are_ours(family, options):
    ours, model = pair(family)
    expected = ours.generate(prompts(), 8, temperature=0)
    assert torch.equal(greedy(model, prompts(), **options), expected)


@each_family
def test_padding_on_the_left_changes_no_token(family):
    ours, model = pair(family)
    rows = [prompts(1, size, seed=size)[0] for size in (2, 6, 4)]
    tokens, mask = torch.full((3, 6), 7), torch.zeros(3, 6, dtype=torch.int64)
    for row, text in enumerate(rows):
        tokens[row, 6 - len(text) :] = text
        mask[row, 6 - len(text) :] = 1
    expected = ours.generate(rows, 8, temperature=0)
    for use_cache in (True, False):
        result = greedy(model, tokens, attention_mask=mask, use_cache=use_cache)
        for row, text in enumerate(expected):
            assert torch.equal(result[row, 6 - len(rows[row]) :], text)


@each_family
@pytest.mark.parametrize(
    "options",
    [{"num_beams": 3}, {"do_sample": True}, {"num_beams": 2, "num_return_sequences": 2, "do_sample": True}],
    ids=["beams", "sampling", "sampled_beams"],
)
def test_a_cache_changes_no_token(family, options):
    _, model = pair(family)
    results = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        given = {"attention_mask": torch.ones(2, 5, dtype=torch.int64), "pad_token_id": 0, "do_sample": False}
        results.append(model.generate(prompts(), max_new_tokens=8, use_cache=use_cache, **{**given, **options}))
    assert torch.equal(*results)


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


@each_family
def test_embeddings_may_be_given_instead_of_tokens(family):
    _, model = pair(family)
    expected = greedy(model, prompts())[:, 5:]
    embeds = model.get_input_embeddings()(prompts())
    mask = torch.ones(2, 5, dtype=torch.int64)
    result = model.generate(
        inputs_embeds=embeds, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0
    )
    assert torch.equal(result, expected)


@pytest.mark.parametrize("family", CROPPABLE)
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_drafts_change_no_token(family, padded):
    """Drafts are refused in part, so that the cache is cropped."""
    _, model = pair(family)
    _, assistant = pair("crate_lm" if family != "crate_lm" else "aot_lm")
    tokens, mask = prompts(1, 6), torch.ones(1, 6, dtype=torch.int64)
    if padded:
        mask[:, :2] = 0
    expected = greedy(model, tokens, attention_mask=mask)
    for draft in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": assistant}):
        assert torch.equal(greedy(model, tokens, attention_mask=mask, **draft), expected)


def test_running_sums_refuse_drafts():
    _, model = pair("tost_lm")
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
        greedy(model, prompts(1), prompt_lookup_num_tokens=3)


class Heard(BaseStreamer):
    def __init__(self):
        self.tokens = []

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.tokens.append(None)


def test_a_streamer_hears_every_token():
    _, model = pair("crate_lm")
    heard = Heard()
    result = greedy(model, prompts(1), streamer=heard)
    assert heard.tokens == [*result[0].tolist(), None]


@pytest.mark.parametrize("family", ["crate_lm", pytest.param("tost_lm", marks=pytest.mark.exhaustive)])
def test_a_compiled_forward_changes_no_token(family):
    _, model = pair(family)
    expected = greedy(model, prompts(), 4)
    compiled = copy.copy(model)
    compiled.forward = torch.compile(model.forward, backend="eager", dynamic=True)
    assert torch.equal(greedy(compiled, prompts(), 4), expected)
    torch._dynamo.reset()


@pytest.mark.parametrize("family", ["crate_lm", "tost_lm", "aot_lm"])
def test_the_forward_compiles_whole(family):
    _, model = pair(family)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        expected = model(prompts(), use_cache=False).logits
        torch.testing.assert_close(compiled(prompts(), use_cache=False).logits, expected)
    torch._dynamo.reset()


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
        held = vars(layer.cache)
        away[layer] = {name: t.clone() for name, t in held.items() if isinstance(t, torch.Tensor)}
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
        model(
            prompts(1, 3),
            attention_mask=torch.ones(1, 8).index_fill_(1, torch.tensor([0, 1]), 0),
            cache=cache,
        )
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
def test_a_cropped_cache_goes_on_as_if_it_had_seen_no_more(family, left):
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


REFUSED = {
    "positions": (
        lambda model: greedy(model, prompts(), 30),
        ValueError,
        r"CRATELMModel: tokens must be at most block_size = 24, the number of positions, got 25",
    ),
    "cache": (
        lambda model: model(prompts(), cache=DynamicCache()),
        ValueError,
        r"CRATELMModel: cache must be a cache of this model",
    ),
    "two_caches": (
        lambda model: model(prompts(), cache=DynamicCache(), past_key_values=DynamicCache()),
        TypeError,
        "CRATELMForCausalLM: give either cache or past_key_values, which are the same",
    ),
    "a_cache_by_another_name": (
        lambda model: model(prompts(), cache_params=DynamicCache()),
        TypeError,
        "CRATELMForCausalLM: a cache must be given as cache or past_key_values, got cache_params",
    ),
    "mask": (
        lambda model: model(prompts(), attention_mask=torch.ones(2, 1, 5, 5)),
        ValueError,
        r"CRATELMModel: attention_mask must be \(batch, past \+ new\) = \(2, 5\), got \(2, 1, 5, 5\)",
    ),
    "position_ids": (
        lambda model: model(prompts(), position_ids=torch.arange(1, 6)[None]),
        NotImplementedError,
        "position_ids must be those of attention_mask and the cache, which the model counts by itself",
    ),
    "attentions": (
        lambda model: model(prompts(), output_attentions=True),
        NotImplementedError,
        "output_attentions cannot be given: the operators never hold the probabilities",
    ),
    "both_inputs": (
        lambda model: model(prompts(), inputs_embeds=torch.zeros(2, 5, 24)),
        ValueError,
        "give either input_ids or inputs_embeds",
    ),
    "foreign_states": (
        lambda model: DynamicCache(config=model.config).update(torch.ones(2, 3, 1, 8), torch.ones(2, 3, 1, 8), 0),
        TypeError,
        "SubspaceLayer: only the models of crate_kernels can use this cache",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_refusals(call, error, message):
    with torch.no_grad(), pytest.raises(error, match=message):
        call(pair("crate_lm")[1])


@each_family
def test_a_model_in_training_generates(family):
    """With dropout, which our operators refuse with a cache, tokens are recomputed; ordinary attention has a cache."""
    ours, _ = pair(family)
    model = wrapped(ours, family, dropout=0.3).train()
    kept = family == "aot_mhsa_lm"
    with torch.no_grad():
        assert (cache_of(model(prompts())) is not None) == kept
    results = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        results.append(greedy(model, prompts(), use_cache=use_cache))
    assert results[0].shape == (2, 13)
    assert torch.equal(*results) or kept
    assert (cache_of(greedy(model, prompts(), return_dict_in_generate=True)) is not None) == kept
    assert torch.equal(greedy(model.eval(), prompts()), ours.generate(prompts(), 8, temperature=0))


CACHED = {
    "forward": lambda model, cache: model(prompts(), cache=cache),
    "generate": lambda model, cache: greedy(model, prompts(), cache=cache),
    "embeddings": lambda model, cache: model.generate(
        inputs_embeds=model.get_input_embeddings()(prompts()), max_new_tokens=2, pad_token_id=0
    ),
}


@pytest.mark.parametrize("family", ["crate_lm", "tost_lm", "aot_lm"])
@pytest.mark.parametrize("call", CACHED.values(), ids=CACHED)
def test_a_cache_is_refused_in_training_with_dropout(call, family):
    model = wrapped(pair(family)[0], family, dropout=0.3).train()
    message = r"LMModel: dropout must be 0 with a cache, got 0.3 in training mode: call model.eval\(\)"
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        call(model, DynamicCache(config=model.config))


def test_sampling_stays_in_the_vocabulary():
    _, model = pair("tost_lm")
    torch.manual_seed(0)
    mask = torch.ones(2, 5, dtype=torch.int64)
    text = model.generate(
        prompts(), attention_mask=mask, max_new_tokens=6, do_sample=True, top_k=4, top_p=0.9, pad_token_id=0
    )
    assert text.shape == (2, 11)
    assert int(text.max()) < VOCABULARY


@pytest.mark.parametrize("family", CROPPABLE)
def test_a_chunk_may_be_longer_than_what_is_held(family):
    _, model = pair(family)
    tokens, cache = prompts(2, 14), DynamicCache(config=model.config)
    with torch.no_grad():
        whole = model(tokens).logits
        name = "cache" if "cache" in model(tokens[:, :1], use_cache=True) else "past_key_values"
        model(tokens[:, :2], **{name: cache})
        more = model(tokens[:, 2:], **{name: cache})
    torch.testing.assert_close(more.logits, whole[:, 2:], rtol=1e-4, atol=1e-5)
