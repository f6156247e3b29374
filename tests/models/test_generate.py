"""Generation: caches against recomputing, prompts of unequal length, sampling."""

import functools
from typing import Any

import pytest
import torch

from crate_kernels.models._shared import generate
from tests.models.families import build, drawn

FAMILIES = ["crate_lm", "crate_lm_overcomplete", "tost_lm", "aot_lm", "aot_mhsa_lm"]
LONG = {"block_size": 20, "vocab_size": 50}


def language(family, **changes) -> Any:
    """A model whose text neither stands still nor forgets its prompt, in double precision: no ties."""
    model: Any = drawn(build(family, **{**LONG, **changes}).double())
    with torch.no_grad():
        # Subspace attention alone moves tokens little: without strong positions its greedy text repeats one token.
        model.transformer["wpe"].weight.mul_(20 if family == "aot_lm" else 3)
    return model


def prompts(*lengths):
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(50, (n,), generator=generator) for n in lengths]


def by_hand(model, prompt, count):
    """The published loop: the likeliest token after the last ``block_size``, again and again."""
    text = prompt[None]
    model.eval()
    with torch.no_grad():
        for _ in range(count):
            logits, _ = model(text[:, -model.config.block_size :])
            text = torch.cat([text, logits[:, -1].argmax(-1, keepdim=True)], 1)
    return text[0]


CASES = {"one": (5,), "batch": (4, 4, 4), "ragged": (3, 1, 8, 8, 5)}
COUNTS = {"within": 9, "full": 12, "beyond": 24}


@functools.cache
def all_by_hand(family, lengths):
    """Greedy text for the largest count; less of it is what a smaller count gives."""
    model = language(family)
    return [by_hand(model, prompt, max(COUNTS.values())) for prompt in prompts(*lengths)]


@pytest.mark.parametrize("count", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("lengths", CASES.values(), ids=CASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_the_published_loop_token_for_token(family, lengths, count):
    model, prompt_rows = language(family), prompts(*lengths)
    texts = all_by_hand(family, lengths)
    new = [row[len(prompt) :].tolist() for row, prompt in zip(texts, prompt_rows, strict=True)]
    assert len({tuple(row) for row in new}) > len(prompt_rows) / 2
    assert min(len(set(row)) for row in new) >= 3
    expected = [row[: len(prompt) + count] for row, prompt in zip(texts, prompt_rows, strict=True)]
    # Without a cache, less of a text is no other call.
    for use_cache in (True, False) if count == COUNTS["beyond"] else (True,):
        actual = model.generate(prompt_rows, count, temperature=0, use_cache=use_cache)
        assert [row.tolist() for row in actual] == [row.tolist() for row in expected]
    if len(set(lengths)) == 1:
        text = model.generate(torch.stack(prompt_rows), count, temperature=0)
        assert torch.equal(text, torch.stack(expected))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_longer_than_the_positions(family):
    model, (prompt,) = language(family), prompts(23)
    assert torch.equal(model.generate(prompt[None], 4, temperature=0)[0], by_hand(model, prompt, 4))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cached_token_is_run_alone(family):
    model, prompt_rows, seen = language(family), prompts(6, 4), []
    model.transformer["h"][1].register_forward_pre_hook(lambda m, args: seen.append(tuple(args[0].shape[:2])))
    model.generate(prompt_rows, 5, temperature=0)
    assert seen == [(2, 6), *[(2, 1)] * 4]
    seen.clear()
    model.generate(prompt_rows, 5, temperature=0, use_cache=False)
    assert seen == [(2, n) for n in (6, 7, 8, 9, 10)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_precision_generates(family, dtype, autocast):
    model = drawn(build(family, **LONG)).to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        text = model.generate(torch.stack(prompts(4, 4)), 6, temperature=0)
    assert text.shape == (2, 10)
    assert torch.equal(text[:, :4], torch.stack(prompts(4, 4)))


@pytest.mark.parametrize("family", FAMILIES)
def test_modes_come_back_and_dropout_is_off(family):
    model = language(family, dropout=0.5).train()
    model.transformer["drop"].eval()
    modes = [module.training for module in model.modules()]
    first, second = (model.generate(torch.stack(prompts(4)), 8, temperature=0) for _ in range(2))
    assert torch.equal(first, second)
    assert [module.training for module in model.modules()] == modes
    model.transformer["h"][0].register_forward_pre_hook(lambda m, args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.generate(torch.stack(prompts(4)), 1)
    assert [module.training for module in model.modules()] == modes


def test_nothing_to_add():
    model, inputs = language("crate_lm"), prompts(3, 2)
    assert [row.tolist() for row in model.generate(inputs, 0)] == [row.tolist() for row in inputs]


def test_a_generator_repeats_a_text():
    model, tokens = language("tost_lm"), torch.stack(prompts(4, 4))
    first, second, other = (model.generate(tokens, 12, generator=torch.Generator().manual_seed(s)) for s in (1, 1, 2))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


PROBABILITIES = torch.tensor([0.4, 0.05, 0.3, 0.1, 0.15])
ALLOWED = {
    "all": ({}, [0, 1, 2, 3, 4]),
    "top-k": ({"top_k": 2}, [0, 2]),
    "top-k-of-more-than-there-are": ({"top_k": 9}, [0, 1, 2, 3, 4]),
    "top-p": ({"top_p": 0.69}, [0, 2]),
    "top-p-needs-one-more": ({"top_p": 0.71}, [0, 2, 4]),
    "top-p-of-next-to-nothing": ({"top_p": 1e-6}, [0]),
    "top-p-of-all": ({"top_p": 1.0}, [0, 1, 2, 3, 4]),
    "both": ({"top_k": 3, "top_p": 0.5}, [0, 2]),
    "top-p-after-top-k": ({"top_k": 2, "top_p": 0.58}, [0, 2]),
}


@pytest.mark.parametrize(("options", "allowed"), ALLOWED.values(), ids=ALLOWED)
def test_sampling_draws_from_the_allowed_tokens_in_proportion(options, allowed):
    draws = 20_000
    logits = (PROBABILITIES.log() + 3).expand(draws, -1)
    settings = {"temperature": 1.0, "top_k": None, "top_p": None, **options}
    chosen = generate.Sampling(**settings, generator=torch.Generator().manual_seed(0)).choose(logits)
    assert chosen.shape == (draws, 1)
    wanted = torch.zeros(5)
    wanted[allowed] = PROBABILITIES[allowed] / PROBABILITIES[allowed].sum()
    counted = chosen.flatten().bincount(minlength=5) / draws
    assert ((counted - wanted).abs() <= 5 * (wanted * (1 - wanted) / draws).sqrt()).all()  # five standard deviations


def test_top_p_that_is_met_exactly_needs_no_further_token():
    chosen = generate.Sampling(1.0, None, 0.5, torch.Generator().manual_seed(0)).choose(torch.zeros(100, 2))
    assert len(chosen.unique()) == 1


def test_temperature_sharpens():
    draws = 20_000
    logits = PROBABILITIES.log().expand(draws, -1)
    chosen = generate.Sampling(0.5, generator=torch.Generator().manual_seed(0)).choose(logits)
    wanted = PROBABILITIES**2 / (PROBABILITIES**2).sum()
    counted = chosen.flatten().bincount(minlength=5) / draws
    assert ((counted - wanted).abs() <= 5 * (wanted * (1 - wanted) / draws).sqrt()).all()  # five standard deviations
    for temperature in (1e-40, 1e-46, 5e-324, 0):
        assert not generate.Sampling(temperature).choose(logits[:100]).any()


TOKENS = torch.zeros(1, 3).long()
BAD = {
    "float": (lambda m: m.generate(TOKENS.float(), 1), ValueError, r"CRATELM.generate: tokens must be int64 \(batch"),
    "empty": (lambda m: m.generate(TOKENS[:, :0], 1), ValueError, r"got torch.int64 \(1, 0\)"),
    "row": (lambda m: m.generate([TOKENS], 1), ValueError, r"every prompt must be int64 \(seqlen > 0,\), got"),
    "no-rows": (lambda m: m.generate([], 1), ValueError, "tokens must have one prompt or more, got none"),
    "no-tensors": (lambda m: m.generate([1], 1), TypeError, "tokens must be a Tensor or a list of Tensors, got list"),
    "no-text": (lambda m: m.generate("", 1), TypeError, "tokens must be a Tensor or a list of Tensors, got str"),
    "text": (lambda m: m.generate("abc", 1), TypeError, "tokens must be a Tensor or a list of Tensors, got str"),
    "count": (lambda m: m.generate(TOKENS, -1), ValueError, "CRATELM.generate: max_new_tokens must be >= 0, got -1"),
    "temperature": (lambda m: m.generate(TOKENS, 1, -1.0), ValueError, "CRATELM.generate: temperature must be >= 0.0"),
    "top-k": (lambda m: m.generate(TOKENS, 1, top_k=0), ValueError, "CRATELM.generate: top_k must be >= 1, got 0"),
    "top-p": (lambda m: m.generate(TOKENS, 1, top_p=0.0), ValueError, r"top_p must be in \(0, 1\], got 0.0"),
    "top-p-high": (lambda m: m.generate(TOKENS, 1, top_p=1.5), ValueError, r"top_p must be in \(0, 1\], got 1.5"),
}


@pytest.mark.parametrize(("call", "error", "message"), BAD.values(), ids=BAD)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call(build("crate_lm"))
