"""generate() of transformers on our language models: its tokens are those of our own generate, and of recomputing."""

import copy

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: the extra hf")
from transformers.generation.streamers import BaseStreamer

from tests.integrations.language import CONFIGS, CROPPABLE, VOCABULARY, cache_of, greedy, pair, prompts, wrapped

each_family = pytest.mark.parametrize("family", CONFIGS)


@each_family
@pytest.mark.parametrize(
    "options",
    [{}, {"use_cache": False}, {"cache_implementation": "static"}],
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
        changes = {"attention_mask": torch.ones(2, 5, dtype=torch.int64), "pad_token_id": 0, "do_sample": False}
        results.append(model.generate(prompts(), max_new_tokens=8, use_cache=use_cache, **{**changes, **options}))
    assert torch.equal(*results)


@each_family
def test_embeddings_may_be_passed_instead_of_tokens(family):
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


def test_sampling_stays_in_the_vocabulary():
    _, model = pair("tost_lm")
    torch.manual_seed(0)
    mask = torch.ones(2, 5, dtype=torch.int64)
    text = model.generate(
        prompts(), attention_mask=mask, max_new_tokens=6, do_sample=True, top_k=4, top_p=0.9, pad_token_id=0
    )
    assert text.shape == (2, 11)
    assert int(text.max()) < VOCABULARY
