"""Arguments that transformers passes along: documents of one row are kept apart, what nothing reads is refused."""

import copy

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: the extra hf")
from transformers import DataCollatorWithFlattening, DynamicCache

from crate_kernels.integrations.transformers import CRATEConfig, config
from tests.integrations import images
from tests.integrations.language import CONFIGS, VOCABULARY, cache_of, greedy, pair, prompts, wrapped

each_family = pytest.mark.parametrize("family", CONFIGS)
LENGTHS = [3, 1, 15, 9]  # more than the 24 positions together
OFFSETS = torch.tensor([0, 3, 4, 19, 28], dtype=torch.int32)
POSITIONS = torch.cat([torch.arange(n) for n in LENGTHS])[None]
INDEX = torch.arange(4).repeat_interleave(torch.tensor(LENGTHS))[None].int()
ROW = torch.randint(VOCABULARY, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(5))
DESCRIBED = {
    "offsets": {"cu_seq_lens_q": OFFSETS},
    "offsets-of-keys": {"cu_seq_lens_k": OFFSETS.long()},
    "flash": {"cu_seq_lens_q": OFFSETS, "cu_seq_lens_k": OFFSETS, "max_length_q": 15, "max_length_k": 16},
    "indices": {"seq_idx": INDEX + 7},
    "positions": {"position_ids": POSITIONS},
    "a-full-mask": {"cu_seq_lens_q": OFFSETS, "attention_mask": torch.ones_like(ROW), "max_length_q": None},
}


@pytest.mark.parametrize("described", DESCRIBED.values(), ids=DESCRIBED)
@each_family
def test_documents_of_one_row_do_not_see_each_other(family, described):
    _, model = pair(family)
    with torch.no_grad():
        out = model(ROW, **described, output_hidden_states=True)
        alone = [model(part) for part in ROW.split(LENGTHS, 1)]
    torch.testing.assert_close(out.logits, torch.cat([each.logits for each in alone], 1))
    assert cache_of(out) is None
    assert len(out.hidden_states) == 3


@each_family
def test_a_flattened_batch_trains_as_the_padded_one(family):
    """The collator leaves out the prediction of each document's first token."""
    ours, _ = pair(family)
    texts = [part[0] for part in ROW.split(LENGTHS, 1)]
    flat = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    batch = flat([{"input_ids": text} for text in texts])
    padded = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=-100)
    results = []
    for inputs in (
        dict(batch),
        {"input_ids": padded.clamp(min=0), "labels": padded, "attention_mask": (padded >= 0).long()},
    ):
        model = wrapped(ours, family)
        loss = model(**inputs).loss
        loss.backward()
        results.append((loss, {name: p.grad for name, p in model.named_parameters()}))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_the_positions_of_the_model_may_be_passed():
    _, model = pair("crate_lm")
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
    with torch.no_grad():
        plain = model(prompts(), attention_mask=mask, use_cache=True)
        with_positions = model(prompts(), attention_mask=mask, position_ids=positions, use_cache=True)
        torch.testing.assert_close(with_positions.logits, plain.logits, rtol=0, atol=0)
        mask, positions = torch.cat((mask, mask[:, -1:]), 1), positions[:, -1:] + 1
        steps = [
            model(prompts(2, 1), attention_mask=mask, cache=cache_of(out), **more).logits
            for out, more in ((plain, {}), (with_positions, {"position_ids": positions}))
        ]
    torch.testing.assert_close(*steps, rtol=0, atol=0)
    assert torch.equal(greedy(model, prompts(), position_ids=torch.arange(5).expand(2, 5)), greedy(model, prompts()))


@pytest.mark.parametrize("row", [0, 1], ids=["padded", "whole"])
@pytest.mark.parametrize("new", [[[1], [1]], [[0, 1], [1, 1]]], ids=["a-step", "more-padding"])
def test_other_positions_than_the_models_own_are_refused_after_a_cache(new, row):
    _, model = pair("crate_lm")
    mask, more = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]), torch.tensor(new)
    every, tokens = torch.cat((mask, more), 1), prompts(2, more.shape[1])
    positions = every.cumsum(1)[:, 5:] - 1
    with torch.no_grad():
        cache = cache_of(model(prompts(), attention_mask=mask, use_cache=True))
        positions[row, -1] += 1
        with pytest.raises(NotImplementedError, match="position_ids must be those of attention_mask and the cache"):
            model(tokens, attention_mask=every, cache=cache, position_ids=positions)
        positions[row, -1] -= 1
        model(tokens, attention_mask=every, cache=cache, position_ids=positions)


def test_labels_may_be_shifted_already():
    _, model = pair("crate_lm")
    shifted = torch.nn.functional.pad(prompts()[:, 1:], (0, 1), value=-100)
    torch.testing.assert_close(model(prompts(), shift_labels=shifted).loss, model(prompts(), labels=prompts()).loss)


def described(**arguments):
    return lambda model: model(ROW, **arguments)


REFUSED = {
    "rows": (
        lambda m: m(prompts(), cu_seq_lens_q=OFFSETS),
        ValueError,
        "tokens must be one row, got 2, beside cu_seq_lens_q",
    ),
    "padding": (
        described(cu_seq_lens_q=OFFSETS, attention_mask=torch.zeros_like(ROW).index_fill_(1, torch.tensor([5]), 1)),
        ValueError,
        "attention_mask must be None or ones, got padding, beside cu_seq_lens_q, which describes the documents of one",
    ),
    "cache": (
        lambda m: m(ROW, seq_idx=INDEX, cache=DynamicCache(config=m.config)),
        ValueError,
        "use_cache must be False, and no cache given, beside seq_idx, which describes",
    ),
    "asked-for-cache": (
        torch.no_grad()(described(cu_seq_lens_k=OFFSETS, use_cache=True)),
        ValueError,
        "use_cache must be False, and no cache given, beside cu_seq_lens_k",
    ),
    "generating": (lambda m: greedy(m, ROW[:, :3], cu_seq_lens_q=OFFSETS[:2]), ValueError, "use_cache must be False"),
    "beyond": (
        described(cu_seq_lens_q=OFFSETS[:-1]),
        ValueError,
        r"cu_seq_lens_q must grow from 0 to the number of tokens = 28, got \[0, 3, 4, 19\]",
    ),
    "empty": (described(cu_seq_lens_k=OFFSETS[[0, 1, 1, 4]]), ValueError, "cu_seq_lens_k must grow from 0"),
    "a-list": (described(cu_seq_lens_q=[0, 3, 28]), TypeError, "cu_seq_lens_q must be a tensor, got list"),
    "a-list-of-positions": (described(position_ids=[list(range(28))]), TypeError, "position_ids must be a tensor, got"),
    "numbers": (
        described(cu_seq_lens_q=OFFSETS + 0.5),
        ValueError,
        "cu_seq_lens_q must have an integer dtype, got torch.float32",
    ),
    "lengths-alone": (described(max_length_q=15), ValueError, "max_length_q needs cu_seq_lens_q"),
    "too-short": (
        described(cu_seq_lens_q=OFFSETS, max_length_k=14),
        ValueError,
        "max_length_k must be at least the longest document = 15, got 14",
    ),
    "other-keys": (
        described(cu_seq_lens_q=OFFSETS, cu_seq_lens_k=OFFSETS[[0, 2, 4]]),
        ValueError,
        "cu_seq_lens_k must describe the documents of cu_seq_lens_q, got others",
    ),
    "other-indices": (
        described(cu_seq_lens_q=OFFSETS, seq_idx=INDEX // 2),
        ValueError,
        "seq_idx must describe the documents of cu_seq_lens_q, got others",
    ),
    "index-shape": (described(seq_idx=INDEX[0]), ValueError, r"seq_idx must be \(1, tokens\) = \(1, 28\), got \(28,\)"),
    "positions": (described(position_ids=POSITIONS + 1), NotImplementedError, "must count the tokens of each document"),
    "gaps": (described(position_ids=2 * POSITIONS), NotImplementedError, "must count the tokens of each document from"),
    "long": (
        described(cu_seq_lens_q=OFFSETS[[0, 4]]),
        ValueError,
        "tokens must be at most block_size = 24, the number of positions, got 28",
    ),
    "bidirectional": (lambda m: m(prompts(), is_causal=False), TypeError, "CRATELMForCausalLM: is_causal cannot"),
    "types": (
        lambda m: m(prompts(), token_type_ids=torch.ones(2, 5)),
        TypeError,
        "CRATELMForCausalLM: token_type_ids cannot be given: it is no argument of this model",
    ),
    "misspelt": (lambda m: m(prompts(), atention_mask=torch.ones(2, 5)), TypeError, "atention_mask cannot be given"),
    "base": (lambda m: m.transformer(prompts(), head_mask=torch.ones(2)), TypeError, "CRATELMModel: head_mask cannot"),
}


@pytest.mark.parametrize(("call", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_refusals(call, error, message):
    with torch.no_grad(), pytest.raises(error, match=message):
        call(pair("crate_lm")[1])


def test_what_says_nothing_is_no_concern():
    _, model = pair("crate_lm")
    said = {"is_causal": True, "head_mask": None, "output_router_logits": False, "cache_position": torch.arange(5)}
    out = model(prompts(), token_type_ids=torch.zeros(2, 5, dtype=torch.long), **said)
    torch.testing.assert_close(out.logits, model(prompts()).logits, rtol=0, atol=0)


@pytest.mark.parametrize("family", images.CONFIGS)
def test_image_models_refuse_what_they_do_not_read(family):
    _, model = images.pair(family)
    img, labels = images.images(family), torch.tensor([1, 4])
    for name, value in (("bool_masked_pos", torch.ones(2, 4)), ("label", labels)):
        with pytest.raises(TypeError, match=f"{type(model).__name__}: {name} cannot be given"):
            model(img, **{name: value})
    plain = model(img, labels=labels, interpolate_pos_encoding=False, head_mask=None)
    halves = model(img, labels=labels, num_items_in_batch=4)
    torch.testing.assert_close(halves.loss, plain.loss / 2)


OWN_LOSS = {
    "language": lambda: (pair("crate_lm")[1], prompts(), prompts()),
    "images": lambda: (images.pair("crate")[1], images.images("crate"), torch.tensor([1, 4])),
}


@pytest.mark.parametrize("kind", OWN_LOSS)
def test_a_loss_of_the_users_own_takes_any_argument(kind):
    model, inputs, labels = OWN_LOSS[kind]()
    model = copy.deepcopy(model)
    model.loss_function = lambda *args, smoothing, **kwargs: torch.tensor(smoothing)
    assert model(inputs, labels=labels, smoothing=0.5).loss == 0.5


@pytest.mark.parametrize(
    ("name", "meant"), {"dephts": "depth", "num_heads": "heads", "gradient_checkpointing": "grad_checkpointing"}.items()
)
def test_a_config_says_which_field_was_meant(name, meant, tmp_path):
    said = rf"CRATEConfig.__init__\(\) got an unexpected keyword argument '{name}'; did you mean {meant}\?"
    for make in (CRATEConfig, lambda **options: config("crate_tiny", **options)):
        with pytest.raises(TypeError, match=said):
            make(**{name: 1})
    # What transformers, or a user, has beside the fields stays as it is; so does a folder of another version.
    CRATEConfig(torch_dtype="float32", num_labels=3, hidden_size=64, notes="mine").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"notes"', f'"{name}"'))
    found = CRATEConfig.from_pretrained(tmp_path)
    assert (found.dim, found.num_labels, getattr(found, name)) == (64, 3, "mine")
