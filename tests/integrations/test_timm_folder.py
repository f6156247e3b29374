"""Folders of timm's own save_for_hf: what create_model reads back computes the same."""

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("timm", reason="needs timm: the extra timm")
pytest.importorskip("torchvision", reason="needs torchvision: the extra timm")
pytest.importorskip("huggingface_hub", reason="needs huggingface_hub: the extra timm")

import timm
from timm.models import save_for_hf

from tests.integrations.test_timm import SMALL, small
from tests.models.families import drawn
from tests.models.test_crate_alpha import clipa, tower

# The size that a model was built for, and the size that its images are prepared to, which may be another.
SIZES = {
    "square": (32, None),
    "wide": ((32, 128), None),
    "tall": ((96, 16), None),
    "other": (32, (3, 64, 64)),
    "as-many": ((32, 128), (3, 64, 64)),
    "published": (None, None),
    "published-as-many": (None, (3, 112, 448)),
}
ANY_SIZE = ("crate_mae_base", "tost_tiny_24")  # timm prepares images for another size of these alone
SQUARE = ("aot_vision_mssa",)


def image(size, channels=3):
    sides = size if isinstance(size, tuple) else (size or 224,) * 2
    return torch.randn(1, channels, *sides, generator=torch.Generator().manual_seed(1))


def saved(model, folder, data_config=None):
    save_for_hf(model, folder, safe_serialization=True, data_config=data_config)
    return f"local-dir:{folder}"


CASES = [
    pytest.param(name, *case, id=f"{name}-{key}")
    for name in SMALL
    for key, case in SIZES.items()
    if (case[1] is None or name in ANY_SIZE) and not (isinstance(case[0], tuple) and name in SQUARE)
]


@pytest.mark.parametrize(("name", "size", "prepared"), CASES)
def test_a_folder_computes_the_same(name, size, prepared, tmp_path):
    model = drawn(small(name, depth=1, num_classes=5, img_size=size)).eval()
    folder = saved(model, tmp_path, prepared and {"input_size": prepared})
    again = timm.create_model(folder, pretrained=True).eval()
    assert_close(dict(again.state_dict()), dict(model.state_dict()), rtol=0, atol=0)
    assert torch.equal(again(image(size)), model(image(size)))


@pytest.mark.parametrize("channels", [1, 4, 6])
@pytest.mark.parametrize("name", SMALL)
def test_a_folder_of_other_channels(name, channels, tmp_path):
    model = drawn(small(name, depth=1, num_classes=5, in_chans=channels)).eval()
    folder = saved(model, tmp_path)
    images = image(32, channels)
    assert torch.equal(timm.create_model(folder, pretrained=True).eval()(images), model(images))
    # The file alone does not say how many channels it has; its weights do.
    overlay = {"file": str(tmp_path / "model.safetensors"), "input_size": (3, 32, 32), "num_classes": 5}
    options = {"num_classes": 5, "in_chans": channels, "pretrained_cfg_overlay": overlay}
    again = small(name, 9, depth=1, pretrained=True, **options).eval()
    assert torch.equal(again(images), model(images))


@pytest.mark.parametrize("name", SMALL)
def test_a_folder_read_for_another_size_and_head(name, tmp_path):
    """As the same weights from a file whose size is stated."""
    model = drawn(small(name, depth=1, num_classes=5)).eval()
    folder = saved(model, tmp_path, {"input_size": (3, 64, 64)} if name in ANY_SIZE else None)
    again = timm.create_model(folder, pretrained=True, img_size=48, num_classes=3).eval()
    overlay = {"file": str(tmp_path / "model.safetensors"), "input_size": (3, 32, 32), "num_classes": 5}
    options = {"img_size": 48, "num_classes": 5, "pretrained": True, "pretrained_cfg_overlay": overlay}
    wanted = small(name, depth=1, **options).eval()
    assert again(image(48)).shape == (1, 3)
    assert torch.equal(again.forward_features(image(48)), wanted.forward_features(image(48)))


@pytest.mark.parametrize("name", ["crate_tiny", "crate_alpha_b32", "crate_mae_base"])
def test_a_grid_of_as_many_patches_is_another_grid(name, tmp_path):
    """A folder says which; of a file without a size, positions that fit are taken as they are."""
    model = drawn(small(name, depth=1, num_classes=5, img_size=(16, 64)))
    folder = saved(model, tmp_path)
    again = timm.create_model(folder, pretrained=True, img_size=32)
    where = "pos_embed" if name == "crate_mae_base" else "pos_embedding"
    assert not again.state_dict()[where].allclose(model.state_dict()[where])
    overlay = {"file": str(tmp_path / "model.safetensors"), "num_classes": 5}
    options = {"num_classes": 5, "pretrained": True, "pretrained_cfg_overlay": overlay}
    assert torch.equal(
        small(name, depth=1, img_size=(16, 64), **options).state_dict()[where], model.state_dict()[where]
    )
    with pytest.raises(ValueError, match="of the weights, 4 patches of 16x16, got 224x224"):
        small(name, depth=1, img_size=48, **options)


def test_a_folder_keeps_the_eps_that_a_clipa_checkpoint_implied(tmp_path):
    torch.save({"state_dict": clipa(tower())}, tmp_path / "checkpoint.pth")
    overlay = {"file": str(tmp_path / "checkpoint.pth"), "input_size": (3, 8, 8), "num_classes": 5}
    options = {"depth": 2, "img_size": 8, "patch_size": 4, "num_classes": 5}
    model = small("crate_alpha_b32", pretrained=True, pretrained_cfg_overlay=overlay, **options).eval()
    again = timm.create_model(saved(model, tmp_path / "folder"), pretrained=True).eval()
    assert again.config.head_eps == 1e-6
    assert torch.equal(again(image(8)), model(image(8)))


def test_a_folder_after_another_head(tmp_path):
    model = drawn(small("crate_tiny", depth=1, num_classes=5)).eval()
    model.reset_classifier(3, "avg")
    again = timm.create_model(saved(model, tmp_path), pretrained=True).eval()
    assert torch.equal(again(image(32)), model(image(32)))
