"""Our language models as models of transformers: outputs, gradients, weights, configs."""

import copy
import pickle
from functools import partial

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: the extra hf")
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from crate_kernels import models
from crate_kernels.integrations import transformers as integration
from tests.integrations.language import CONFIGS, cache_of, greedy, pair, prompts, wrapped
from tests.models import families

each_family = pytest.mark.parametrize("family", CONFIGS)


@each_family
def test_logits_and_losses_are_ours(family):
    ours, model = pair(family)
    tokens = prompts()
    logits, loss = ours(tokens[:, :-1], tokens[:, 1:])
    out = model(tokens, labels=tokens)
    torch.testing.assert_close(out.logits[:, :-1], logits, rtol=0, atol=0)
    torch.testing.assert_close(out.loss, loss)
    labels = tokens.masked_fill(torch.arange(5) == 2, -100)
    halves = model(tokens, labels=labels, num_items_in_batch=torch.tensor(12)).loss
    torch.testing.assert_close(halves, model(tokens, labels=labels).loss * 6 / 12)


@each_family
@pytest.mark.parametrize("recompute", ["never", "config", "transformers"])
def test_gradients_are_ours(family, recompute):
    ours, _ = pair(family)
    model, tokens = wrapped(ours, family, grad_checkpointing=recompute == "config").train(), prompts()
    ours = copy.deepcopy(ours)
    ours(tokens[:, :-1], tokens[:, 1:])[1].backward()
    expected = {name: p.grad for name, p in ours.named_parameters()}
    calls = []
    model.transformer.h[0].attn.register_forward_pre_hook(lambda *args: calls.append(1))
    if recompute == "transformers":
        # The public name changes with the version.
        model._set_gradient_checkpointing(gradient_checkpointing_func=partial(checkpoint, use_reentrant=False))
    model(tokens, labels=tokens, use_cache=True).loss.backward()
    for name, parameter in model.named_parameters():
        wanted = expected.get(name, expected.get("lm_head.weight"))
        torch.testing.assert_close(parameter.grad, wanted, msg=lambda text, name=name: f"{name}: {text}")
    assert len(calls) == (1 if recompute == "never" else 2)


@each_family
def test_no_cache_is_made_while_gradients_are_recorded(family):
    _, model = pair(family)
    assert cache_of(model(prompts(), use_cache=True)) is None
    with torch.no_grad():
        assert cache_of(model(prompts())).get_seq_length() == 5
        assert cache_of(model(prompts(), use_cache=False)) is None


@each_family
def test_hidden_states_and_tuples(family):
    ours, model = pair(family)
    seen = []
    hooks = [block.register_forward_hook(lambda m, args, out: seen.append(args[0])) for block in ours.transformer["h"]]
    hidden = ours.hidden(prompts())
    for hook in hooks:
        hook.remove()
    out = model(prompts(), output_hidden_states=True)
    assert len(out.hidden_states) == 3
    torch.testing.assert_close(torch.stack(out.hidden_states), torch.stack([*seen, hidden]), rtol=0, atol=0)
    with torch.no_grad():
        logits, cache, states = model(prompts(), output_hidden_states=True, return_dict=False)
    assert (logits.shape, cache.get_seq_length(), len(states)) == ((2, 5, 11), 5, 3)
    last = model(prompts(), logits_to_keep=1).logits
    torch.testing.assert_close(last, out.logits[:, -1:])
    picked = model(prompts(), logits_to_keep=torch.tensor([0, 3])).logits
    torch.testing.assert_close(picked, out.logits[:, [0, 3]])


@each_family
def test_the_head_and_the_embedding_are_one(family):
    model = wrapped(pair(family)[0], family)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert model.get_output_embeddings() is model.lm_head
    model.resize_token_embeddings(15)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert model(prompts()).logits.shape == (2, 5, 15)
    assert model.config.vocab_size == 15
    assert pickle.loads(pickle.dumps(model)).lm_head.weight.shape == (15, 24)


@each_family
def test_the_head_may_be_untied(family):
    ours = families.build(family, seed=5, tie_word_embeddings=False)
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(CONFIGS[family].of(ours.config))
    assert torch.equal(model.transformer.wte.weight, ours.transformer["wte"].weight)
    assert not torch.equal(model.lm_head.weight, model.transformer.wte.weight)
    assert 0.015 < model.lm_head.weight.std() < 0.025
    assert model.num_parameters() == sum(p.numel() for p in ours.parameters())
    model(prompts(), labels=prompts()).loss.backward()
    assert not torch.equal(model.lm_head.weight.grad, model.transformer.wte.weight.grad)
    model.resize_token_embeddings(15)
    assert model.lm_head.weight is not model.transformer.wte.weight
    assert model(prompts()).logits.shape == (2, 5, 15)
    resized = model.lm_head.weight.clone()
    model.post_init()
    assert torch.equal(model.lm_head.weight, resized)


@each_family
def test_hidden_states_carry_gradients_through_padding(family):
    _, model = pair(family)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    out = model(prompts(), attention_mask=mask, output_hidden_states=True)
    plain = model(prompts(), attention_mask=mask)
    torch.testing.assert_close(out.logits[mask.bool()], plain.logits[mask.bool()], rtol=0, atol=0)
    first = torch.autograd.grad(out.logits[0, -1].sum(), out.hidden_states[0])[0]
    assert (first.abs().sum(-1) > 0).tolist() == [[False, False, True, True, True], [False] * 5]


@each_family
def test_weights_are_drawn_as_our_constructor_draws_them(family):
    ours = families.build(family, seed=5)
    config = CONFIGS[family].of(ours.config)
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config)
    for name, tensor in ours.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor, rtol=0, atol=0)


@each_family
def test_what_a_checkpoint_lacks_is_drawn(family):
    """From the meta device, where a constructor draws nothing."""
    ours = families.build(family, seed=6)
    config = CONFIGS[family].of(ours.config)
    state = {k: v for k, v in families.drawn(families.build(family)).state_dict().items() if "h.0" in k}
    torch.manual_seed(6)
    model = type(pair(family)[1]).from_pretrained(None, config=config, state_dict=state)
    for name, tensor in ours.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], state.get(name, tensor), rtol=0, atol=0)
    assert model.lm_head.weight is model.transformer.wte.weight


def test_the_base_has_no_head():
    _, model = pair("crate_lm")
    base = AutoModel.from_config(model.config).eval()
    assert isinstance(base, integration.CRATELMModel)
    base.load_state_dict(model.transformer.state_dict())
    hidden = base(prompts()).last_hidden_state
    torch.testing.assert_close(model.lm_head(hidden), model(prompts()).logits)


def test_configs_name_the_fields_of_transformers():
    config = integration.config("tost_lm_base", backend="reference")
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (768, 12, 12)
    assert (config.max_position_embeddings, config.bias, config.backend) == (1024, False, "reference")
    assert config.ours() == models.ToSTLMConfig(bias=False, backend="reference")
    assert config.layer_types == ["token_stats"] * 12
    assert isinstance(AutoConfig.for_model("CRATELM", n_layer=2), integration.CRATELMConfig)
    assert "backend" not in config.to_dict()
    with pytest.raises(ValueError, match=r"config: name must be one of crate_tiny, .*, got 'redunet'"):
        integration.config("redunet")
    with pytest.raises(ValueError, match="got 'crate_lm_bse'; did you mean crate_lm_base"):
        integration.config("crate_lm_bse")
    with pytest.raises(Exception, match="n_embd must be a multiple of n_head = 5, got 24"):
        integration.CRATELMConfig(n_embd=24, n_head=5)


def test_the_backend_is_the_configs():
    ours, model = pair("crate_lm")
    other = wrapped(ours, "crate_lm", backend="reference")
    assert {block.attn.backend for block in other.transformer.h} == {"reference"}
    assert {block.attn.backend for block in model.transformer.h} == {None}
    assert torch.equal(greedy(other, prompts()), greedy(model, prompts()))


@pytest.mark.parametrize("name", ["sdpa", "flash_attention_2", "flex_attention", "some/kernel"])
def test_other_attention_is_refused(name):
    ours, model = pair("crate_lm")
    config = CONFIGS["crate_lm"].of(ours.config)
    reason = r'CRATELMForCausalLM: attn_implementation must be "eager", which is our own operators, got'
    with pytest.raises(ValueError, match=reason):
        AutoModelForCausalLM.from_config(config, attn_implementation=name)
    with pytest.raises(ValueError, match=reason):
        model.set_attn_implementation(name)
    assert AutoModelForCausalLM.from_config(config, attn_implementation="eager").config._attn_implementation == "eager"


@each_family
def test_a_token_outside_the_vocabulary(family):
    _, model = pair(family)
    with pytest.raises(ValueError, match="Model: input_ids must be 0 to 10, got 11"):
        model(torch.tensor([[0, 11]]))
    with pytest.raises(ValueError, match="Model: input_ids must be 0 to 10, got 50256"):
        greedy(model, torch.tensor([[0, 50256]]))
