"""What our language models refuse of transformers: inputs, caches and ways to generate."""

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: the extra hf")
from transformers import DynamicCache

from tests.integrations.language import greedy, pair, prompts, wrapped


def test_running_sums_refuse_drafts():
    _, model = pair("tost_lm")
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
        greedy(model, prompts(1), prompt_lookup_num_tokens=3)


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
        "CRATELMForCausalLM: a cache must be passed as cache or past_key_values, got cache_params",
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
