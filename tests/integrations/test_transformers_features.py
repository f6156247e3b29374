"""Our image models as AutoModel and AutoBackbone, and in transformers' pipelines."""

import json

import numpy
import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: the extra hf")
from PIL import Image
from transformers import (
    AutoBackbone,
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoModelForImageClassification,
    pipeline,
)

from crate_kernels import models
from crate_kernels.integrations import transformers as integration
from tests.integrations.images import CONFIGS, images, pair, wrapped

each_family = pytest.mark.parametrize("family", CONFIGS)


@each_family
@pytest.mark.parametrize("writer", ["ours", "theirs"])
def test_a_folder_gives_features_without_its_classifier(family, writer, tmp_path):
    ours, theirs = pair(family)
    (ours if writer == "ours" else theirs).save_pretrained(tmp_path)
    model = AutoModel.from_pretrained(tmp_path).eval()
    img = images(family)
    with torch.no_grad():
        out = model(img, output_hidden_states=True)
        tokens = ours.forward_features(img)
        torch.testing.assert_close(out.last_hidden_state, tokens, rtol=0, atol=0)
        pooled = ours.forward_head(tokens, pre_logits=True)
        torch.testing.assert_close(out.pooler_output, pooled, rtol=0, atol=0)
        torch.testing.assert_close(ours.get_classifier()(out.pooler_output), theirs(img).logits, rtol=0, atol=0)
    assert len(out.hidden_states) == model.config.num_hidden_layers + 1
    assert not any(name.startswith(f"model.{ours.layout.classifier}.") for name in model.state_dict())
    assert type(model).__name__ == f"{type(ours).__name__}Model"
    assert model(img, return_dict=False)[0].shape == tokens.shape
    with pytest.raises(TypeError, match="labels cannot be given"):
        model(img, labels=torch.zeros(2))


@each_family
def test_every_parameter_of_the_features_learns(family):
    model = AutoModel.from_config(CONFIGS[family].of(pair(family)[0].config)).train()
    model(images(family)).pooler_output.sin().sum().backward()
    lacking = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert not lacking


@each_family
def test_what_features_save_both_libraries_read(family, tmp_path):
    ours, theirs = pair(family)
    theirs.save_pretrained(tmp_path / "whole")
    model = AutoModel.from_pretrained(tmp_path / "whole").eval()
    model.save_pretrained(tmp_path / "features")
    again = AutoModel.from_pretrained(tmp_path / "features").eval()
    read = models.from_pretrained(tmp_path / "features").eval()
    img = images(family)
    with torch.no_grad():
        expected = ours.forward_features(img)
        torch.testing.assert_close(again(img).last_hidden_state, expected, rtol=0, atol=0)
        torch.testing.assert_close(read.forward_features(img), expected, rtol=0, atol=0)
    assert read.num_classes == 0
    fresh = AutoModelForImageClassification.from_pretrained(tmp_path / "features", num_labels=3)
    assert fresh(img).logits.shape == (2, 3)
    torch.testing.assert_close(fresh.eval().model.forward_features(img), expected, rtol=0, atol=0)


@each_family
def test_a_backbone_gives_the_maps_of_its_layers(family, tmp_path):
    ours, _ = pair(family)
    ours.save_pretrained(tmp_path)
    img = images(family)
    kind = getattr(integration, f"{type(ours).__name__}Backbone")
    backbone = kind.from_pretrained(tmp_path, out_features=["stem", "stage1", "stage2"]).eval()
    with torch.no_grad():
        stem, *maps = backbone(img).feature_maps
        expected = ours.forward_intermediates(img, norm=True, intermediates_only=True)
        torch.testing.assert_close(maps, expected, rtol=0, atol=0)
        tokens = ours.get_submodule(ours.layout.norm)(ours._embed(img))[:, ours.num_prefix_tokens :]
        torch.testing.assert_close(stem, tokens.mT.reshape(stem.shape), rtol=0, atol=0)
    assert backbone.channels == [24, 24, 24]
    assert backbone.stage_names == ["stem", "stage1", "stage2"]
    assert kind.from_pretrained(tmp_path, out_indices=[1]).out_features == ["stage1"]
    (last,) = kind.from_pretrained(tmp_path).eval()(img).feature_maps
    torch.testing.assert_close(last, maps[-1], rtol=0, atol=0)
    assert len(backbone(img, output_hidden_states=True).hidden_states) == 3
    with pytest.raises(ValueError, match="out_features must be a subset of stage_names"):
        kind.from_pretrained(tmp_path, out_features=["stage9"])


def test_a_backbones_config_is_kept(tmp_path):
    ours, _ = pair("crate")
    ours.save_pretrained(tmp_path / "ours")
    backbone = integration.CRATEBackbone.from_pretrained(tmp_path / "ours", out_indices=[0, 2])
    backbone.save_pretrained(tmp_path / "backbone")
    config = AutoConfig.from_pretrained(tmp_path / "backbone")
    assert (config.out_indices, config.out_features) == ([0, 2], ["stem", "stage2"])
    assert config.num_labels == 5
    assert models.from_pretrained(tmp_path / "backbone").num_classes == 0
    # AutoBackbone.from_pretrained asks the Hub, of folders too.
    fresh = AutoBackbone.from_config(config)
    assert type(fresh) is integration.CRATEBackbone
    assert [m.shape for m in fresh(images("crate")).feature_maps] == [(2, 24, 4, 3)] * 2


def picture(size):
    return Image.fromarray(numpy.random.default_rng(0).integers(0, 256, (*size, 3), dtype=numpy.uint8))


@pytest.mark.parametrize("writer", ["ours", "theirs"])
def test_a_pipeline_classifies_pictures_from_the_folder_alone(writer, tmp_path):
    config = models.CRATEConfig(24, 2, 3, 8, image_size=(8, 12), patch_size=4, num_classes=5)
    ours = models.CRATE(config).eval()
    model = ours if writer == "ours" else wrapped(ours, "crate")
    model.save_pretrained(tmp_path)
    classify = pipeline("image-classification", model=str(tmp_path))
    found = {row["label"]: row["score"] for row in classify(picture((40, 30)), top_k=5)}
    # Shorter edge to 12 / 0.875, bicubic; the middle 8 x 12 pixels; the scale of ImageNet.
    processor = AutoImageProcessor.from_pretrained(tmp_path)
    pixels = processor(picture((40, 30)), return_tensors="pt").pixel_values
    resized = picture((40, 30)).resize((14, 18), Image.Resampling.BICUBIC)
    array = torch.from_numpy(numpy.array(resized)).permute(2, 0, 1)[:, 5:13, 1:13] / 255
    mean, std = (torch.tensor(each)[:, None, None] for each in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    assert pixels.shape == (1, 3, 8, 12)
    assert ((array - mean) / std - pixels[0]).abs().mean() < 0.1  # the resizing of torchvision or Pillow
    scores = ours(pixels).softmax(-1)[0]
    torch.testing.assert_close(torch.tensor([found[f"LABEL_{i}"] for i in range(5)]), scores.detach())


def test_how_images_are_prepared_is_written_once(tmp_path):
    own = {"image_processor_type": "ViTImageProcessor", "size": {"height": 8, "width": 8}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(own))
    ours, theirs = pair("crate")
    ours.save_pretrained(tmp_path)
    theirs.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "preprocessor_config.json").read_text()) == own


def test_nothing_is_written_for_gray_images(tmp_path):
    models.CRATE(models.CRATEConfig(24, 1, 3, 8, image_size=8, patch_size=4, channels=1)).save_pretrained(tmp_path)
    assert not (tmp_path / "preprocessor_config.json").exists()
    models.create("crate_lm_base", n_layer=1, n_embd=12, vocab_size=8, block_size=4).save_pretrained(tmp_path)
    assert not (tmp_path / "preprocessor_config.json").exists()


def test_every_class_is_public():
    for kind in ("Model", "Backbone", "ForImageClassification"):
        for name in ("CRATE", "CRATEAlpha", "ToST", "AoTVision", "CRATEMAEEncoder"):
            assert f"{name}{kind}" in integration.__all__
            assert getattr(integration, f"{name}{kind}").__name__ == f"{name}{kind}"
