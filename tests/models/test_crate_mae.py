"""CRATE-MAE: masks, loss, patches, positions, getters, start. Its equations are in test_restated."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from crate_kernels import models
from crate_kernels.models.crate_mae import CRATEMAE, CRATEMAEConfig
from tests.models.families import build, drawn, inputs


def mae(**changes):
    return drawn(build("crate_mae", **changes)).eval()


@pytest.mark.parametrize(("ratio", "kept"), [(None, 3), (0.5, 6), (0.2, 9), (0.0, 12), (0.99, 0)])
def test_as_many_patches_stay_as_published(ratio, kept):
    model, (img, *_) = mae(), inputs("crate_mae", batch=50)
    torch.manual_seed(0)
    _, _, mask = model(img, ratio)
    assert mask.shape == (50, 12)
    assert set(mask.unique().tolist()) <= {0.0, 1.0}
    assert torch.equal(mask.sum(1), torch.full((50,), 12.0 - kept))
    if 0 < kept < 12:
        assert len({tuple(row.tolist()) for row in mask}) > 10
        assert 0 < mask.mean(0).min() <= mask.mean(0).max() < 1  # every place is removed now and then


def test_a_seed_gives_the_published_mask():
    """The patches of the smallest noise stay."""
    model = mae()
    torch.manual_seed(3)
    mask = model.random_mask(2, 12)
    torch.manual_seed(3)
    noise = torch.rand(2, 12)
    assert torch.equal(mask, (noise > noise.sort(1).values[:, 2:3]).float())


def test_a_generator_repeats_a_mask():
    model = mae()
    first, second, other = (
        model.random_mask(4, 12, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def test_what_is_removed_does_not_reach_the_prediction():
    model, (img, _, mask) = mae(), inputs("crate_mae")
    noise = torch.randn(*img.shape, generator=torch.Generator().manual_seed(5))
    removed = model.unpatchify(mask[..., None].expand(-1, -1, 24))
    assert torch.equal(model(img + noise * removed, mask=mask)[1], model(img, mask=mask)[1])
    assert not torch.equal(model(img + noise * (1 - removed), mask=mask)[1], model(img, mask=mask)[1])
    assert torch.equal(model(img, 0.5, mask.bool())[2], mask)


@pytest.mark.parametrize("norm_pix_loss", [False, True])
def test_loss_is_that_of_removed_patches(norm_pix_loss):
    model, (img, _, mask) = mae(norm_pix_loss=norm_pix_loss).double(), inputs("crate_mae", dtype=torch.float64)
    loss, pred, _ = model(img, mask=mask)
    total, count = 0.0, 0
    for b in range(2):
        for n in range(12):
            if mask[b, n]:
                patch = img[b, :, 2 * (n // 3) : 2 * (n // 3) + 2, 4 * (n % 3) : 4 * (n % 3) + 4].permute(1, 2, 0)
                patch = patch.flatten()
                if norm_pix_loss:
                    patch = (patch - patch.mean()) / (patch.var(unbiased=True) + 1e-6).sqrt()
                total, count = total + (pred[b, n] - patch).square().mean(), count + 1
    assert_close(loss, total / count)


def test_loss_without_a_removed_patch_is_zero():
    model, (img, *_) = mae(), inputs("crate_mae")
    assert model(img, mask=torch.zeros(2, 12))[0] == 0


def test_the_loss_of_half_precision_is_summed_in_float32():
    model, (img, _, mask) = build("crate_mae").bfloat16(), inputs("crate_mae", dtype=torch.bfloat16)
    pred = torch.randn(2, 12, 24, generator=torch.Generator().manual_seed(5)).bfloat16()
    loss = model.forward_loss(img, pred, mask)
    assert loss.dtype == torch.float32
    assert_close(loss.double(), model.forward_loss(img.double(), pred.double(), mask.double()), rtol=1e-6, atol=0)


def test_patches_come_back_together():
    model, (img, *_) = mae(), inputs("crate_mae")
    patches = model.patchify(img)
    assert patches.shape == (2, 12, 24)
    assert torch.equal(patches[0, 4], img[0, :, 2:4, 4:8].permute(1, 2, 0).flatten())
    assert torch.equal(model.unpatchify(patches), img)
    wide = torch.randn(1, 3, 4, 24)
    assert torch.equal(model.unpatchify(model.patchify(wide), (2, 6)), wide)


def test_positions_are_the_published_sines():
    """Column in the first half of the channels, row in the second, each sines, then cosines."""
    model = build("crate_mae")
    assert not model.decoder_pos_embed[0, 0].any()
    for n in range(12):
        row, column = divmod(n, 3)
        angles = [[place * 10000 ** (-k / 6) for k in range(6)] for place in (column, row)]
        wanted = torch.cat([f(torch.tensor(half)) for half in angles for f in (torch.sin, torch.cos)])
        assert_close(model.decoder_pos_embed[0, 1 + n], wanted)
    assert torch.equal(model.pos_embed, model.decoder_pos_embed)
    assert not model.pos_embed.requires_grad
    assert not model.decoder_pos_embed.requires_grad


def test_positions_of_another_size_are_interpolated():
    model, img = mae(), torch.randn(2, 3, 16, 12)
    seen = []
    model.blocks[0].register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    loss, pred, mask = model(img)
    assert pred.shape == (2, 24, 24)
    assert mask.shape == (2, 24)
    assert loss.isfinite()
    model.forward_features(img)
    positions = model.decoder_pos_embed
    grid = positions[0, 1:].reshape(4, 3, 24).permute(2, 0, 1)[None]
    resized = torch.nn.functional.interpolate(grid, (8, 3), mode="bicubic", align_corners=False)
    wanted = torch.cat([positions[:, :1], resized.flatten(2).mT], 1)
    stem = torch.cat([model.cls_token.expand(2, -1, -1), model.patch_embed["proj"](img).flatten(2).mT], 1)
    assert_close(seen[1] - stem, wanted.expand(2, -1, -1))


def test_getters_and_features():
    model, (img, *_) = mae(), inputs("crate_mae")
    keys = []
    for block in model.blocks:
        block.layers[0][0].fn.qkv.register_forward_hook(lambda m, args, out: keys.append(out))
    features = model.forward_features(img)
    assert_close(features, model.norm(model.forward_encoder(img, layers=2)))
    assert features.shape == (2, 13, 24)
    keys = keys[:2]
    for index in (0, 1):
        assert_close(model.get_last_key_enc(img, index), keys[index])
        w = keys[index].unflatten(-1, (3, 8)).transpose(1, 2)
        assert_close(model.get_selfattention_enc(img, index), (8**-0.5 * w @ w.mT).softmax(-1))
    assert_close(model.get_last_key_enc(img), keys[1])
    assert model.get_selfattention_enc(img).shape == (2, 3, 13, 13)


PUBLISHED = {
    **{"embed_dim": 24, "depth": 2, "num_heads": 3, "decoder_embed_dim": 24, "decoder_depth": 2},
    **{"decoder_num_heads": 2, "img_size": (8, 12), "patch_size": (2, 4)},
}
NORMS = {
    "published-sizes": ({}, 1e-6),
    "default-of-the-class": ({"norm_layer": nn.LayerNorm}, 1e-5),
    "partial": ({"norm_layer": partial(nn.LayerNorm, eps=1e-3)}, 1e-3),
    "by-number": ({"norm_eps": 1e-4}, 1e-4),
    "twice-the-same": ({"norm_eps": 1e-5, "norm_layer": nn.LayerNorm}, 1e-5),
}


@pytest.mark.parametrize(("options", "eps"), NORMS.values(), ids=NORMS)
def test_the_published_norm_layer_decides_the_eps(options, eps):
    model: Any = models.from_official("crate_mae", build("crate_mae").state_dict(), {**PUBLISHED, **options})
    assert (model.norm.eps, model.decoder_norm.eps) == (eps, eps)
    assert {m.eps for name, m in model.named_modules() if name.endswith("0.norm")} == {1e-5}


BAD_NORMS = {
    "other": ({"norm_layer": nn.RMSNorm}, "norm_layer must make an nn.LayerNorm, got <class"),
    "name": ({"norm_layer": "LayerNorm"}, "norm_layer must make an nn.LayerNorm, got 'LayerNorm'"),
    "both": ({"norm_layer": nn.LayerNorm, "norm_eps": 1e-6}, "norm_eps must be that of norm_layer, 1e-05, got 1e-06"),
}


@pytest.mark.parametrize(("options", "message"), BAD_NORMS.values(), ids=BAD_NORMS)
def test_a_norm_layer_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=f"from_official: {message}"):
        models.from_official("crate_mae", build("crate_mae").state_dict(), {**PUBLISHED, **options})


def test_start_is_the_published_one():
    torch.manual_seed(0)
    model = CRATEMAE(CRATEMAEConfig(64, 1, 2, 64, 1, 2, img_size=32, patch_size=8))
    attention, code = model.blocks[0].layers[0]
    dictionary, _ = model.decoder_blocks[0].layers[0]
    bounds = {
        (6 / 128) ** 0.5: (attention.fn.qkv.weight, attention.fn.to_out[0].weight, model.decoder_embed.weight),
        (6 / (64 + 192)) ** 0.5: (model.patch_embed["proj"].weight, model.decoder_pred.weight),
        (6 / 64) ** 0.5: (code.fn.weight, dictionary.fn.weight),
    }
    for bound, weights in bounds.items():
        for weight in weights:
            assert 0.95 * bound < weight.abs().max() <= bound
    assert not attention.fn.to_out[0].bias.any()
    for token in (model.cls_token, model.mask_token):
        assert abs(token.std() / 0.02 - 1) < 5 / 128**0.5


def test_numbers_that_no_checkpoint_holds_reach_the_layers():
    model = build("crate_mae", lambd=5.0, ista=0.2)
    codes = [block.layers[0][1].fn for block in model.blocks]
    assert [(code.lambd, code.step_size) for code in codes] == [(5.0, 0.2)] * 2
    assert models.create("crate_mae_tiny", depth=1, decoder_depth=1).blocks[0].layers[0][1].fn.lambd == 0.5


def image(*size):
    return torch.ones(1, 3, *size)


BAD = {
    "width": (lambda: build("crate_mae", decoder_embed_dim=12), "decoder_embed_dim must be embed_dim, .* got 12 and"),
    "heads": (lambda: build("crate_mae", decoder_num_heads=5), "embed_dim must be a multiple of decoder_num_heads = 5"),
    "img-size": (lambda: build("crate_mae", img_size=9), "CRATEMAE: img_size must be a multiple of patch_size, got"),
    "ratio-of-a-call": (lambda: mae()(image(8, 12), -0.1), "CRATEMAE: mask_ratio must be >= 0.0, got -0.1"),
    "mask": (lambda: mae()(image(8, 12), mask=torch.ones(1, 11)), r"mask must be \(batch, patches\) = \(1, 12\), got"),
    "image": (lambda: mae()(image(8, 13)), r"img must be \(batch, channels=3, .* patches of 2x4, got \(1, 3, 8, 13\)"),
    "rank": (lambda: mae()(torch.ones(3, 8, 12)), r"CRATEMAE: img must be .*, got \(3, 8, 12\)"),
    "patches": (
        lambda: mae().unpatchify(torch.ones(1, 11, 24)),
        r"\(batch, 12, 24\) for a grid of 4 x 3, got \(1, 11, 24\); grid=",
    ),
    "layer": (
        lambda: mae().get_selfattention_enc(image(8, 12), 2),
        "CRATEMAE: layer must be < 2 layers, got 2; layer=None is the last",
    ),
    "depth": (lambda: mae().get_last_key_enc(image(8, 12), -1), "CRATEMAE: depth must be >= 0, got -1"),
}


@pytest.mark.parametrize(("call", "message"), BAD.values(), ids=BAD)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
