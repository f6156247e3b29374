"""Our image models as classifiers of transformers."""

import copy

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers", reason="needs transformers: the extra hf")
from transformers import AutoModelForImageClassification

from crate_kernels.integrations import transformers as integration
from tests.integrations.images import CONFIGS, MAE, images, pair, wrapped
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


@pytest.mark.parametrize("family", [*CONFIGS, *MAE])
def test_checkpointing_is_switched_after_construction(family):
    model = wrapped(pair(family)[0], family)
    assert model.supports_gradient_checkpointing
    layer = next(m for m in model.modules() if type(m).__name__ in ("Layer", "Block", "EncoderBlock"))
    calls = []
    layer.register_forward_pre_hook(lambda *args: calls.append(1))
    for enable, runs in ((True, 2), (False, 1)):
        calls.clear()
        model._set_gradient_checkpointing(enable)
        model(images(family), labels=torch.tensor([0, 1])).loss.backward()
        assert len(calls) == runs


def test_the_encoder_of_an_autoencoder_classifies():
    ours, _ = pair("crate_mae")
    model = wrapped(ours, "crate_mae", num_labels=3)
    assert model(images("crate_mae")).logits.shape == (2, 3)
    names = {name.removeprefix("model.") for name, _ in model.named_parameters()}
    assert names - {name for name, _ in ours.named_parameters()} == {"head.weight", "head.bias"}
    assert not {name for name in names if "decoder" in name} - {"decoder_pos_embed"}
    model(images("crate_mae"), labels=torch.tensor([0, 2])).loss.backward()
    assert [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None] == []


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


def test_what_the_models_do_not_keep_is_refused():
    _, model = pair("crate")
    with pytest.raises(NotImplementedError, match="output_attentions cannot be given: the model does not keep them"):
        model(images("crate"), output_attentions=True)
    loss = model(images("crate"), labels=torch.tensor([0, 1]), return_dict=False)[0]
    assert loss.dim() == 0
