"""transformers' wrapper of timm on our models: a loss, hidden states, a folder, recomputed layers."""

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("timm", reason="needs timm: the extra timm")
pytest.importorskip("torchvision", reason="needs torchvision: the extra timm")
pytest.importorskip("transformers", reason="needs transformers: the extra hf")

import timm
from transformers import TimmWrapperConfig, TimmWrapperForImageClassification, TimmWrapperModel, ViTConfig, ViTModel

import crate_kernels.integrations.timm
from crate_kernels import patch
from tests.integrations.test_timm import SMALL, images

NAMES = ["crate_tiny", "tost_tiny_24"]


def config(name):
    options = {**SMALL[name], "depth": 3, "img_size": 32}
    return TimmWrapperConfig(architecture=name, num_labels=5, model_args=options)


@pytest.mark.parametrize("name", NAMES)
def test_a_classifier(name, tmp_path):
    assert name in crate_kernels.integrations.timm.__all__
    torch.manual_seed(0)
    model = TimmWrapperForImageClassification(config(name)).eval()
    out = model(pixel_values=images(), labels=torch.tensor([1, 4]), output_hidden_states=True)
    assert out.logits.shape == (2, 5)
    assert [t.shape for t in out.hidden_states] == [(2, 24, 2, 2)] * 3
    assert_close(out.logits, model.timm_model(images()))
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()  # renamed in 5.23
    assert model.timm_model.config.grad_checkpointing
    out.loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    model.save_pretrained(tmp_path)
    again = TimmWrapperForImageClassification.from_pretrained(tmp_path).eval()
    assert_close(again(pixel_values=images()).logits, out.logits)


@pytest.mark.parametrize("name", NAMES)
def test_a_backbone(name):
    out = TimmWrapperModel(config(name)).eval()(pixel_values=images())
    assert out.last_hidden_state.shape == (2, 5, 24)
    assert out.pooler_output.shape == (2, 24)


def reasons(model):
    report = patch(model)
    assert report.replaced == {}
    return set(report.left.values())


def test_ordinary_vision_transformers_are_left_with_the_reason():
    wanted = {"has projections of its own for query, key and value, where mssa has one: not white-box"}
    assert reasons(timm.create_model("vit_tiny_patch16_224", depth=2, embed_dim=24, num_heads=3, img_size=32)) == wanted
    small = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 32}
    assert reasons(ViTModel(ViTConfig(**small, image_size=32))) == wanted
    ours = timm.create_model("crate_tiny", **SMALL["crate_tiny"], depth=2, img_size=32)
    assert reasons(ours) == {"already fused: a module of crate_kernels.nn"}
