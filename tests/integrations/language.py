"""The language models of the tests: ours, and the same weights as a model of transformers."""

from functools import cache

import torch
from transformers import AutoModelForCausalLM

from crate_kernels.integrations import transformers as integration
from tests.models import families

CONFIGS = {
    "crate_lm": integration.CRATELMConfig,
    "crate_lm_overcomplete": integration.CRATELMConfig,
    "tost_lm": integration.ToSTLMConfig,
    "aot_lm": integration.AoTLMConfig,
    "aot_mhsa_lm": integration.AoTLMConfig,
}
CROPPABLE = [family for family in CONFIGS if family != "tost_lm"]
VOCABULARY = families.TEXT["vocab_size"]


@cache
def pair(family):
    """Return our model with drawn weights, and transformers' with the same; nobody changes them."""
    ours = families.drawn(families.build(family, block_size=24)).eval()
    return ours, wrapped(ours, family)


def wrapped(ours, family, **fields):
    model = AutoModelForCausalLM.from_config(CONFIGS[family].of(ours.config, **fields)).eval()
    model.load_state_dict(ours.state_dict())
    return model


def prompts(batch=2, seqlen=5, seed=3):
    return torch.randint(VOCABULARY, (batch, seqlen), generator=torch.Generator().manual_seed(seed))


def greedy(model, tokens, new=8, **options):
    options.setdefault("attention_mask", torch.ones_like(tokens))
    return model.generate(tokens, max_new_tokens=new, do_sample=False, pad_token_id=0, **options)


def cache_of(result):
    """Return the cache in a result, by the name of this version of transformers: the new one is from 5.24."""
    return result["cache"] if "cache" in result else result.get("past_key_values")
