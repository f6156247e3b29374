"""Our image models as classifiers of transformers."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

pytest.importorskip("transformers", reason="needs transformers: the extra hf")
from transformers import AutoBackbone, AutoModelForImageClassification

from crate_kernels import models
from crate_kernels.integrations import transformers as integration
from crate_kernels.nn import MSSA
from tests.integrations.images import CONFIGS, images, pair, wrapped
from tests.models import families

each_family = pytest.mark.parametrize("family", CONFIGS)


@each_family
def test_logits_and_gradients_are_ours(family):
    ours, _ = pair(family)
    ours, img, labels = copy.deepcopy(ours), images(family), torch.tensor([1, 4])
    logits = ours(img)
    F.cross_entropy(logits, labels).backward()
    expected = {f"model.{name}": p.grad for name, p in ours.named_parameters()}
    for fields in ({}, {"grad_checkpointing": True}):
        model = wrapped(ours, family, **fields)
        out = model(pixel_values=img, labels=labels)
        torch.testing.assert_close(out.logits, logits, rtol=0, atol=0)
        out.loss.backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, expected[name], msg=lambda text, name=name: f"{name}: {text}")


def test_logits_are_one_tensor_where_ours_are_a_pair_for_distillation():
    model = wrapped(pair("tost")[0], "tost", distillation=True).train()
    assert model(images("tost"), labels=torch.tensor([1, 4])).logits.shape == (2, 5)


@each_family
def test_checkpointing_is_switched_after_construction(family):
    model = wrapped(pair(family)[0], family).train()
    blocks = list(model.model._blocks()) + list(getattr(model.model, "cls_attn_blocks", []))
    calls = []
    for block in blocks:
        norm = next(module for module in block.modules() if isinstance(module, (nn.LayerNorm, MSSA)))
        norm.register_forward_pre_hook(lambda *args: calls.append(1))
    for enable, runs in ((True, 2), (False, 1)):
        calls.clear()
        # The public name changes with the version.
        model._set_gradient_checkpointing(enable, partial(checkpoint, use_reentrant=False))
        model(images(family), labels=torch.tensor([0, 1])).loss.backward()
        assert len(calls) == runs * len(blocks)


@each_family
def test_hidden_states_are_the_tokens_between_the_layers(family):
    """As many, and of the shape, as a ViT gives: before the first layer, and after each."""
    ours, _ = pair(family)
    model, img = wrapped(ours, family), images(family)
    prefix = ours.num_prefix_tokens
    taken = ours.forward_intermediates(img, output_fmt="NLC", return_prefix_tokens=True, intermediates_only=True)
    after = [torch.cat(each[::-1], 1) for each in taken] if prefix else taken
    for options in ({}, {"return_dict": False}):
        out = model(img, output_hidden_states=True, **options)
        states = out[1] if options else out.hidden_states
        assert len(states) == model.config.num_hidden_layers + 1 == 3
        torch.testing.assert_close(states[1:], tuple(after), rtol=0, atol=0)
        torch.testing.assert_close(states[0], ours._embed(img), rtol=0, atol=0)
        assert states[0].shape == (2, ours._embed(img).shape[1], model.config.hidden_size)
    states[0].retain_grad()
    out[0].sum().backward()
    assert states[0].grad is not None
    assert model(img).hidden_states is None
    model.config.output_hidden_states = True
    assert len(model(img).hidden_states) == 3


@each_family
def test_weights_are_drawn_as_our_constructor_draws_them(family):
    ours = families.build(family, seed=5)
    torch.manual_seed(5)
    model = AutoModelForImageClassification.from_config(CONFIGS[family].of(ours.config))
    for name, tensor in ours.state_dict().items():
        torch.testing.assert_close(model.state_dict()[f"model.{name}"], tensor, rtol=0, atol=0)


def test_labels_have_names():
    config = integration.config("crate_tiny", num_labels=3)
    assert (config.num_classes, config.ours().num_classes, config.to_dict()["num_classes"]) == (3, 3, 3)
    assert integration.CRATEConfig().num_classes == 2
    names = {0: "no", 1: "yes", 2: "perhaps"}
    config = integration.CRATEConfig(id2label=names, label2id={text: i for i, text in names.items()})
    assert config.ours().num_classes == 3
    assert integration.CRATEConfig.from_dict(config.to_dict()).id2label == names
    assert integration.CRATEConfig.from_dict(integration.config("crate_tiny").to_dict()).num_labels == 1000


def test_regression_and_several_labels():
    ours, _ = pair("crate")
    model = wrapped(ours, "crate", problem_type="multi_label_classification")
    target = torch.tensor([[1.0, 0, 1, 0, 0], [0, 0, 0, 0, 1]])
    out = model(images("crate"), labels=target)
    torch.testing.assert_close(out.loss, F.binary_cross_entropy_with_logits(out.logits, target))


@each_family
def test_attention_probabilities_are_refused(family):
    _, model = pair(family)
    with pytest.raises(NotImplementedError, match="output_attentions cannot be given: the operators never hold the pr"):
        model(images(family), output_attentions=True)


def test_tuples():
    loss, logits = pair("crate")[1](images("crate"), labels=torch.tensor([0, 1]), return_dict=False)
    assert loss.dim() == 0
    assert logits.shape == (2, 5)


@each_family
def test_images_of_another_size(family):
    ours, model = pair(family)
    img = torch.nn.functional.interpolate(images(family), scale_factor=2.0)
    with torch.no_grad():
        logits = model(img, interpolate_pos_encoding=True).logits
        torch.testing.assert_close(logits, ours(img, interpolate_pos_encoding=True), rtol=0, atol=0)
        resized = copy.deepcopy(ours)
        resized.set_input_size(tuple(img.shape[2:]))
        torch.testing.assert_close(logits, resized(img))
        backbone = AutoBackbone.from_config(CONFIGS[family].of(ours.config)).eval()
        backbone.model.load_state_dict(ours.state_dict(), strict=False)
        (found,) = backbone(img, interpolate_pos_encoding=True).feature_maps
        expected = resized.forward_intermediates(img, indices=1, norm=True, intermediates_only=True)
        torch.testing.assert_close([found], expected)
    if ours.layout.fixed_size:
        for refused in (model, backbone):
            with pytest.raises(ValueError, match="img must have"):
                refused(img)


@each_family
@pytest.mark.parametrize("name", ["ForImageClassification", "Model", "Backbone"])
def test_a_folder_is_of_the_sizes_that_were_set(family, name, tmp_path):
    ours, _ = pair(family)
    kind = getattr(integration, f"{type(ours).__name__}{name}")
    model = kind(CONFIGS[family].of(ours.config)).eval()
    img = torch.nn.functional.interpolate(images(family), scale_factor=2.0)
    model.model.set_input_size(tuple(img.shape[2:]))
    if name == "ForImageClassification":
        model.model.reset_classifier(3)
        assert model(img, labels=torch.tensor([0, 2])).loss.isfinite()
    model.save_pretrained(tmp_path)
    again = kind.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(again(img)[0], model(img)[0], rtol=0, atol=0)
    assert models.from_pretrained(tmp_path).num_classes == (3 if name == "ForImageClassification" else 0)
