"""Layers of a cache of transformers that hold ours: lengths, capacity, rows, devices; what cannot be taken out."""

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: the extra hf")
from transformers import DynamicCache, StaticCache

from crate_kernels.integrations.transformers import card
from crate_kernels.integrations.transformers.caches import KeyValueLayer, StateLayer, StatsLayer, SubspaceLayer
from tests.integrations import images
from tests.integrations.language import CONFIGS, cache_of, pair, prompts

LAYERS = {"crate_lm": SubspaceLayer, "tost_lm": StatsLayer, "aot_lm": SubspaceLayer, "aot_mhsa_lm": KeyValueLayer}
each_kind = pytest.mark.parametrize("family", LAYERS)


def filled(family, tokens=5, batch=2, cache=None) -> Any:
    """Return the first layer of a cache after a call on tokens."""
    _, model = pair(family)
    cache = DynamicCache(config=model.config) if cache is None else cache
    with torch.no_grad():
        model(prompts(batch, tokens), cache=cache)
    return cache.layers[0]


def tensors(layer):
    return {name: value for name, value in vars(layer.cache).items() if isinstance(value, torch.Tensor)}


@each_kind
def test_a_layer_counts_its_columns(family):
    fresh = LAYERS[family]()
    assert (fresh.is_initialized, fresh.get_seq_length(), fresh.get_max_length()) == (False, 0, -1)
    assert (fresh.get_mask_sizes(3), fresh.keys, fresh.values) == ((3, 0), None, None)
    fresh.lazy_initialization(torch.zeros(1), torch.zeros(1))
    assert not fresh.is_initialized
    layer = filled(family)
    assert type(layer) is LAYERS[family]
    assert (layer.is_initialized, layer.get_seq_length(), layer.get_max_length()) == (True, 5, -1)
    assert (layer.get_mask_sizes(3), layer.rows(), layer.padded) == ((8, 0), 5, 0)
    layer.reset()
    assert (layer.is_initialized, layer.get_seq_length(), layer.padded, layer.device) == (False, 0, 0, None)


@each_kind
def test_a_foreign_model_cannot_use_a_layer(family):
    with pytest.raises(TypeError, match=f"{LAYERS[family].__name__}: only the models of crate_kernels can use this"):
        LAYERS[family]().update(torch.zeros(1, 2, 3), torch.zeros(1, 2, 3))


@pytest.mark.parametrize("family", [each for each in LAYERS if each != "tost_lm"])
def test_a_cache_of_tokens_grows_by_doubling_or_not_at_all(family):
    _, model = pair(family)
    cache, capacities = DynamicCache(config=model.config), []
    for new in (5, 1, 4, 1, 12):
        layer = filled(family, new, cache=cache)
        capacities.append(layer.cache.max_seqlen)
    assert capacities == [5, 10, 10, 20, 40]
    cache = DynamicCache(config=model.config)
    assert [filled(family, new, cache=cache).cache.max_seqlen for new in (2, 12)] == [2, 14]
    assert (layer.columns, layer.keys.shape[2], layer.values.shape[2]) == (23, 23, 23)
    assert (layer.keys.data_ptr() == layer.values.data_ptr()) == (family != "aot_mhsa_lm")
    static = StaticCache(config=model.config, max_cache_len=8)
    layer = filled(family, 6, cache=static)
    assert (layer.cache.max_seqlen, layer.get_max_length(), layer.get_seq_length()) == (8, 8, 6)
    with pytest.raises(ValueError, match="capacity is 8 tokens"):
        filled(family, 3, cache=static)


@each_kind
def test_rows_of_a_layer_are_reordered_selected_and_repeated(family):
    layer = filled(family)
    before = {name: tensor.clone() for name, tensor in tensors(layer).items()}
    assert before
    layer.reorder_cache(torch.tensor([1, 0]))
    for name, tensor in tensors(layer).items():
        torch.testing.assert_close(tensor, before[name].flip(0), rtol=0, atol=0)
    layer.batch_select_indices(torch.tensor([1]))
    layer.batch_repeat_interleave(3)
    for name, tensor in tensors(layer).items():
        torch.testing.assert_close(tensor, before[name][:1].repeat_interleave(3, 0), rtol=0, atol=0)
    empty = LAYERS[family]()
    empty.reorder_cache(torch.tensor([0]))
    assert not empty.is_initialized


@each_kind
def test_an_offloaded_layer_comes_back_to_its_device(family, monkeypatch):
    layer, moves = filled(family), []
    stored = tensors(layer)
    to = torch.Tensor.to
    monkeypatch.setattr(
        torch.Tensor, "to", lambda t, device, **options: moves.append((str(device), options)) or to(t, device)
    )
    layer.offload()
    assert layer.device == torch.device("cpu")
    layer.device = torch.device("cpu", 0)
    layer.prefetch()
    assert {device for device, _ in moves} == {"cpu", "cpu:0"}
    assert len(moves) == 2 * len(stored)
    assert all(options == {"non_blocking": True} for _, options in moves)


def test_running_sums_are_not_shortened():
    layer = filled("tost_lm")
    layer.crop(0)
    with pytest.raises(NotImplementedError, match="StatsLayer: tokens cannot be taken out of running sums"):
        layer.crop(-1)
    assert layer.columns == 5


@pytest.mark.parametrize("family", ["crate_lm", "aot_mhsa_lm"])
def test_a_cache_of_tokens_is_shortened(family):
    layer = filled(family)
    kept = layer.keys[:, :, :3].clone()
    with pytest.raises(ValueError, match=f"{LAYERS[family].__name__}: tokens_to_remove must be at most 0, got 1"):
        layer.crop(1)
    layer.crop(0)
    assert layer.columns == 5
    layer.crop(torch.tensor(-2))
    assert (layer.columns, layer.get_seq_length()) == (3, 3)
    assert torch.equal(layer.keys, kept)
    LAYERS[family]().crop(-2)  # nothing is there yet


def test_padded_columns_stay():
    _, model = pair("crate_lm")
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    with torch.no_grad():
        layer = cache_of(model(prompts(), attention_mask=mask, use_cache=True)).layers[0]
    assert layer.padded == 2
    assert layer.rows().tolist() == [3, 5]
    with pytest.raises(ValueError, match="at least the 2 padded tokens must stay, got 1"):
        layer.crop(-4)
    layer.crop(-2)
    assert (layer.columns, layer.rows().tolist()) == (3, [1, 3])


def test_each_family_has_its_kind_of_layer():
    kinds = {family: type(filled(family)) for family in CONFIGS}
    assert kinds == {**LAYERS, "crate_lm_overcomplete": SubspaceLayer}
    assert all(issubclass(kind, StateLayer) for kind in kinds.values())
    assert {family: pair(family)[1].config.layer_types[0] for family in LAYERS} == {
        "crate_lm": "subspace", "tost_lm": "token_stats", "aot_lm": "subspace", "aot_mhsa_lm": "key_value"
    }  # fmt: skip


@pytest.mark.parametrize("family", images.CONFIGS)
def test_the_stem_is_what_images_enter(family):
    _, model = images.pair(family)
    stem = model.get_input_embeddings()
    assert stem is model.model.get_submodule(model.model.layout.stem)
    assert isinstance(stem, (torch.nn.Conv2d, torch.nn.Linear))
    again = images.wrapped(images.pair(family)[0], family)
    other = torch.nn.Identity()
    again.set_input_embeddings(other)
    assert again.get_input_embeddings() is other


def test_attention_is_ours_alone():
    _, model = pair("crate_lm")
    model.set_attn_implementation("eager")
    assert model.config._attn_implementation == "eager"
    with pytest.raises(
        ValueError, match=r'attn_implementation must be "eager", which is our own operators, got .sdpa.'
    ):
        model.set_attn_implementation("sdpa")


@pytest.mark.parametrize("shape", [(3, 5), (2, 4), (5,), (2, 5, 1)], ids=str)
def test_positions_of_another_shape_are_refused(shape):
    _, model = pair("crate_lm")
    with pytest.raises(NotImplementedError, match="position_ids must be those of attention_mask and the cache"):
        model(prompts(), position_ids=torch.zeros(shape, dtype=torch.long))
    model(prompts(), position_ids=torch.arange(5)[None])  # one row for all


def test_a_card_is_of_a_model_with_a_task(tmp_path):
    _, model = pair("crate_lm")
    model.transformer.save_pretrained(tmp_path / "base")
    with pytest.raises(ValueError, match=r"must be of a model for one of CausalLM, ImageClassification, got .*Model"):
        card(tmp_path / "base", license="mit")
    for name, made, task in (("text", model, "text-generation"), ("image", images.pair("crate")[1], "image-class")):
        made.save_pretrained(tmp_path / name)
        text = card(tmp_path / name, license="mit").read_text()
        assert f"pipeline_tag: {task}" in text
        assert "license: mit" in text
        assert f"# {type(made).__name__}" in text
        with pytest.raises(FileExistsError, match=r"card: README\.md must not exist"):
            card(tmp_path / name, license="mit")
