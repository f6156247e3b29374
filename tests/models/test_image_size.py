"""Images of another size than the model was built for: positions, keys, attention and features."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from crate_kernels import models
from crate_kernels.analysis import layerwise
from crate_kernels.models._shared import vision
from tests.models.families import build, drawn, inputs

LEARNED = ("crate", "crate_alpha", "aot_vision")
FAMILIES = (*LEARNED, "crate_mae_encoder", "tost")
EVERY = (*FAMILIES, "crate_mae")
PLACES = {"crate_mae_encoder": "pos_embed"}
GRIDS = {"aot_vision": (2, 2)}


def larger(family):
    """Images of another shape, and their patches (down, across)."""
    rows, columns = (3, 5)
    ph, pw = {"tost": (8, 8), "aot_vision": (4, 4)}.get(family, (2, 4))
    generator = torch.Generator().manual_seed(5)
    return torch.randn(2, 3, rows * ph, columns * pw, generator=generator), (rows, columns)


def interpolated(positions, old, new, antialias):
    """The class token's position, and the others as an image."""
    dim = positions.shape[-1]
    image = positions[:, 1:].reshape(1, *old, dim).permute(0, 3, 1, 2)
    image = F.interpolate(image, size=new, mode="bicubic", align_corners=False, antialias=antialias)
    return torch.cat((positions[:, :1], image.permute(0, 2, 3, 1).reshape(1, -1, dim)), dim=1)


@pytest.mark.parametrize("antialias", [False, True], ids=["plain", "antialias"])
@pytest.mark.parametrize("family", [*LEARNED, "crate_mae_encoder"])
def test_every_way_to_another_size_interpolates_the_positions(family, antialias):
    img, new = larger(family)
    place, old = PLACES.get(family, "pos_embedding"), GRIDS.get(family, (4, 3))
    model = drawn(build(family, antialias=antialias)).eval()
    wanted_positions = interpolated(getattr(model, place), old, new, antialias)
    wanted = model.forward_features(img, interpolate_pos_encoding=True)
    assert_close(model(img, interpolate_pos_encoding=True), model.forward_head(wanted))

    resized = drawn(build(family, antialias=antialias)).eval()
    resized.set_input_size(img.shape[2:])
    assert resized.grid == new
    assert_close(getattr(resized, place), wanted_positions)
    assert_close(resized.forward_features(img), wanted)
    ((name, size),) = {
        n: p.shape for n, p in resized.state_dict().items() if p.shape != model.state_dict()[n].shape
    }.items()
    assert (name, size) == (place, (1, 16, 24))
    # What a model of this size would hold.
    whole = build(family, antialias=antialias, **{model.layout.img_size: tuple(img.shape[2:])}).eval()
    whole.load_state_dict(resized.state_dict())
    assert_close(whole(img), model.forward_head(wanted))

    if family in LEARNED:
        dynamic = drawn(build(family, antialias=antialias, dynamic_img_size=True)).eval()
        assert_close(dynamic.forward_features(img), wanted)
        with pytest.raises(ValueError, match=r"img must have .* dynamic_img_size=True resizes the positions"):
            model(img)
    (own,) = inputs(family)
    assert torch.equal(model(own), model(own, interpolate_pos_encoding=True))


def test_positions_of_the_same_size_are_the_parameter():
    model = build("crate")
    positions = model.pos_embedding
    model.set_input_size((8, 12), (2, 4))
    model.set_input_size()
    assert model.pos_embedding is positions
    model.pos_embedding.requires_grad_(False)
    model.set_input_size(24)
    assert model.config.image_size == 24
    assert not model.pos_embedding.requires_grad
    assert isinstance(model.pos_embedding, torch.nn.Parameter)


def test_positions_learn_from_images_of_another_size():
    img, new = larger("crate")
    model, resized = (drawn(build("crate", dynamic_img_size=dynamic)).double() for dynamic in (True, False))
    resized.set_input_size(img.shape[2:])
    for each in (model, resized):
        each(img.double()).sum().backward()
    positions = model.pos_embedding.detach().clone().requires_grad_()
    interpolated(positions, (4, 3), new, False).backward(resized.pos_embedding.grad)
    assert_close(model.pos_embedding.grad, positions.grad)


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_attention_and_layers_of_another_size(family):
    img, (rows, columns) = larger(family)
    changes = {"dynamic_img_size": True} if family in LEARNED else {}
    model = drawn(build(family, **changes)).eval()
    maps = model.forward_intermediates(img, intermediates_only=True)
    assert [each.shape for each in maps] == [(2, 24, rows, columns)] * 2
    keys, tokens = [], rows * columns + model.num_prefix_tokens
    for block in model._blocks():
        projection = next(m for n, m in block.named_modules() if n.endswith("qkv"))
        projection.register_forward_hook(lambda m, args, out: keys.append(out))
    model(img)
    for index, key in enumerate(keys[:2]):
        assert_close(model.get_last_key(img, index), key)
        if family != "tost":
            w = key.unflatten(-1, (3, 8)).transpose(1, 2)
            weights = model.get_last_selfattention(img, index)
            assert weights.shape == (2, 3, tokens, tokens)
            assert_close(weights, (8**-0.5 * w @ w.mT).softmax(-1))
    assert_close(model.get_last_key(img, None), keys[1])


def test_the_layers_of_another_size_are_measured():
    img, _ = larger("crate")
    model = drawn(build("crate", dynamic_img_size=True))
    resized = drawn(build("crate"))
    resized.set_input_size(img.shape[2:])
    for found, wanted in zip(layerwise(model, img), layerwise(resized, img), strict=True):
        assert_close(vars(found), vars(wanted))


def test_layers_without_weights_between_tokens_say_so():
    with pytest.raises(NotImplementedError, match="ToST: get_last_selfattention must be of a model with weights"):
        build("tost").get_last_selfattention(*inputs("tost"))
    for way in ("get_last_selfattention", "get_last_key"):
        with pytest.raises(NotImplementedError, match="attention must be 'mssa' for its weights or projection"):
            getattr(build("aot_vision", attention="mhsa"), way)(*inputs("aot_vision"))


@pytest.mark.parametrize("family", LEARNED)
def test_a_saved_model_is_of_the_size_that_was_set(family, tmp_path):
    img, _ = larger(family)
    model = drawn(build(family)).eval()
    model.set_input_size(tuple(img.shape[2:]))
    model.save_pretrained(tmp_path)
    again = models.from_pretrained(tmp_path).eval()
    assert torch.equal(again(img), model(img))
    assert again.grid == model.grid


@pytest.mark.parametrize("family", EVERY)
def test_bad_sizes(family):
    model = build(family)
    with pytest.raises(NotImplementedError, match=r"patch_size must be unchanged, .*, got 6"):
        model.set_input_size(48, 6)
    with pytest.raises(ValueError, match="must be a multiple of patch_size, got 7x7"):
        model.set_input_size(7)
    assert model.config == build(family).config


def sized(family, size, patch):
    """A model of images and patches of these sizes, and its function from images."""
    field = "image_size" if family in LEARNED else "img_size"
    model = drawn(build(family, **{field: size, "patch_size": patch})).eval()
    return model, (lambda img: model(img, mask_ratio=0)[1]) if family == "crate_mae" else model


@pytest.mark.parametrize("family", EVERY)
def test_images_and_patches_that_are_not_square(family, tmp_path):
    ph, pw = (16, 8) if family == "tost" else (3, 5)
    for patch in ((ph, pw), (pw, ph)):
        size, grid = (2 * patch[0], 4 * patch[1]), (2, 4)
        model, call = sized(family, size, patch)
        assert model.grid == grid
        img = torch.randn(2, 3, *size)
        out = call(img)
        assert out.shape == ((2, 8, 3 * ph * pw) if family == "crate_mae" else (2, 5))
        if family != "crate_mae":
            assert model.forward_intermediates(img, intermediates_only=True)[0].shape == (2, 24, *grid)
        with pytest.raises(ValueError, match=rf"img must be .* in patches of {patch[0]}x{patch[1]}, got"):
            call(img[..., 1:])
        model.save_pretrained(tmp_path)
        again = models.from_pretrained(tmp_path).eval()
        assert torch.equal(again.state_dict()["cls_token"], model.state_dict()["cls_token"])
        assert again.grid == grid
        model.set_input_size((3 * patch[0], 2 * patch[1]), patch)
        assert model.grid == (3, 2)
        assert call(torch.randn(2, 3, 3 * patch[0], 2 * patch[1])).isfinite().all()


@pytest.mark.parametrize("family", EVERY)
def test_a_pair_of_equal_sides_is_an_int(family):
    side = 16 if family == "tost" else 4
    (square, call), (pairs, other) = (sized(family, *s) for s in ((2 * side, side), ([2 * side] * 2, (side, side))))
    img = torch.randn(2, 3, 2 * side, 2 * side)
    assert pairs.grid == square.grid == (2, 2)
    assert torch.equal(other(img), call(img))


def test_an_autoencoder_keeps_the_size_that_was_set(tmp_path):
    """Both positions are resized; the call resized them for itself before."""
    (img, (rows, columns)), (model, call) = larger("crate_mae"), sized("crate_mae", (8, 12), (2, 4))
    before, old = model.forward_encoder(img), (model.pos_embed, model.decoder_pos_embed)
    model.set_input_size(tuple(img.shape[2:]))
    assert model.grid == (rows, columns)
    for found, each in zip((model.pos_embed, model.decoder_pos_embed), old, strict=True):
        assert_close(found, interpolated(each, (4, 3), (rows, columns), False))
        assert not found.requires_grad
    assert_close(model.forward_encoder(img), before)
    assert model.unpatchify(call(img)).shape == img.shape
    model.save_pretrained(tmp_path)
    assert torch.equal(models.from_pretrained(tmp_path).eval().forward_encoder(img), model.forward_encoder(img))
    whole = models.from_official("crate_mae_encoder", model.state_dict(), vars(model.config))
    assert_close(whole.eval().forward_features(img), model.forward_features(img))


def test_a_compiled_model_takes_other_sizes():
    model, (img, _) = drawn(build("crate", depth=1, dynamic_img_size=True)).eval(), larger("crate")
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for images in (img, inputs("crate")[0]):
        assert_close(compiled(images), model(images))


def test_an_exported_model_takes_its_own_size_and_others():
    model, (img, _) = drawn(build("crate", depth=1, dynamic_img_size=True)).eval(), larger("crate")
    auto = torch.export.Dim.AUTO
    exported = torch.export.export(model, (img,), dynamic_shapes={"img": {0: auto, 2: auto, 3: auto}}).module()
    for images in (img, *inputs("crate", batch=3), img[:, :, :4, :8]):
        assert_close(exported(images), model(images))


def test_positions_of_the_same_grid_are_not_interpolated():
    positions = torch.randn(1, 7, 4)
    assert vision.resize_positions(positions, (2, 3), (2, 3)) is positions
    assert vision.resize_positions(positions, (2, 3), (3, 2)).shape == (1, 7, 4)
    assert not torch.equal(vision.resize_positions(positions, (2, 3), (3, 2)), positions)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["fp64", "bf16"])
def test_positions_are_resized_in_their_dtype_or_better(dtype):
    positions = torch.randn(1, 13, 8, dtype=torch.float64).to(dtype)
    wide = positions.to(torch.promote_types(dtype, torch.float32))
    wanted = interpolated(wide, (4, 3), (5, 7), False).to(dtype)
    assert torch.equal(vision.resize_positions(positions, (4, 3), (5, 7)), wanted)
