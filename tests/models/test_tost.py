"""ToST, vision: stem, positions, training form, stochastic depth, start, errors. Its equations are in test_restated."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from crate_kernels import models
from crate_kernels.models.tost import ClassAttention, DropPath, ToST, ToSTConfig
from tests.models.families import build, drawn, inputs


@pytest.mark.parametrize(("patch", "widths"), [(16, [3, 8, 16, 32, 64]), (8, [3, 16, 32, 64])])
def test_the_stem_halves_the_image(patch, widths):
    model = ToST(ToSTConfig(64, 1, 4, img_size=32, patch_size=patch, num_classes=5))
    convolutions = [m for m in model.patch_embed.modules() if isinstance(m, nn.Conv2d)]
    assert [convolutions[0].in_channels, *(m.out_channels for m in convolutions)] == widths
    assert all((m.kernel_size, m.stride, m.padding, m.bias) == ((3, 3), (2, 2), (1, 1), None) for m in convolutions)
    assert sum(isinstance(m, nn.SyncBatchNorm) for m in model.patch_embed.modules()) == len(widths) - 1
    assert sum(isinstance(m, nn.GELU) for m in model.patch_embed.modules()) == len(widths) - 2
    assert model.patch_embed(torch.ones(2, 3, 32, 64)).shape == (2, 64, 32 // patch, 64 // patch)


def test_training_gives_the_logits_twice_where_distillation_asks_for_them():
    assert drawn(build("tost"))(*inputs("tost")).shape == (2, 5)
    model, (img,) = drawn(build("tost", distillation=True)), inputs("tost")
    first, second = model(img)
    assert first is second
    assert first.shape == model.eval()(img).shape == (2, 5)


def test_training_updates_the_statistics_of_the_stem():
    model, (img,) = build("tost"), inputs("tost")
    model(img)
    norm = model.patch_embed.proj[0][1]
    assert norm.num_batches_tracked == 1
    assert norm.running_mean.any()


def test_images_of_any_size_of_whole_patches():
    model = drawn(build("tost")).eval()
    assert model(torch.ones(1, 3, 40, 16)).shape == (1, 5)


def test_drop_path_drops_whole_images_and_keeps_the_mean():
    torch.manual_seed(0)
    x = torch.ones(4000, 2, 3)
    out = DropPath(0.25)(x)
    images = out[:, 0, 0]
    assert torch.equal(out, images[:, None, None].expand_as(out))
    assert set(images.unique().tolist()) == {0.0, (1 / torch.tensor(0.75)).item()}
    assert abs((images == 0).double().mean() - 0.25) < 5 * (0.25 * 0.75 / 4000) ** 0.5  # five standard deviations
    for rate, module in ((0.25, DropPath(0.25).eval()), (0.0, DropPath(0.0))):
        assert module.rate == rate
        assert module(x) is x


def test_class_attention_drops_weights_and_keeps_their_mean():
    tokens = 400
    attention = ClassAttention(ToSTConfig(tokens, 1, 1, qkv_bias=False, attn_drop_rate=0.25))
    with torch.no_grad():  # equal weights, of values that are the unit vectors: the output is the weights
        attention.qkv.weight.zero_()[2 * tokens :] = torch.eye(tokens)
        attention.proj.weight.copy_(torch.eye(tokens))
        attention.proj.bias.zero_()
    for rate in (0.0, 0.25):
        weights = attention.train(rate > 0)(torch.eye(tokens)[None])[0, 0] * tokens
        kept = weights[weights != 0]
        assert_close(kept, torch.full_like(kept, 1 / (1 - rate)))
        assert abs(1 - len(kept) / tokens - rate) <= 5 * (rate * (1 - rate) / tokens) ** 0.5  # standard deviations


def test_drop_path_is_in_every_block_and_no_class_block():
    model = build("tost", drop_path_rate=0.3)
    assert [block.drop_path.rate for block in model.blocks] == [0.3, 0.3]
    assert [block.drop_path.rate for block in model.cls_attn_blocks] == [0.0, 0.0]


def test_start_is_the_published_one():
    torch.manual_seed(0)
    model = ToST(ToSTConfig(192, 1, 4, img_size=32, patch_size=8, eta=1e-5))
    for weight in (model.blocks[0].attn.qkv.weight, model.blocks[0].mlp.fc1.weight, model.head.weight):
        assert abs(weight.std() / 0.02 - 1) < 5 / (2 * weight.numel()) ** 0.5  # five standard deviations
    assert abs(model.cls_token.std() / 0.02 - 1) < 5 / (2 * 192) ** 0.5
    assert not any(m.bias.any() for m in model.modules() if isinstance(m, nn.Linear))
    for block in (*model.blocks, *model.cls_attn_blocks):
        for gamma in (block.gamma1, block.gamma2):
            assert_close(gamma, torch.full((192,), 1e-5))
    assert torch.equal(model.blocks[0].attn.temp, torch.ones(4, 1))


def test_published_sizes_norm_all_tokens_and_deep_ones_start_small():
    with torch.device("meta"):
        shallow, deep = models.create("tost_tiny_12").config, models.create("tost_medium_24_p8").config
    assert (shallow.eta, deep.eta) == (1.0, 1e-5)
    assert shallow.tokens_norm
    assert deep.tokens_norm
    assert (deep.num_heads, deep.patch_size, shallow.patch_size) == (8, 8, 16)


BAD = {
    "patch": (lambda: build("tost", patch_size=4), ValueError, "ToST: patch_size must be 8 or 16, got 4"),
    "img-size": (lambda: build("tost", img_size=20), ValueError, "ToST: img_size must be a multiple of patch_size"),
    "heads": (lambda: build("tost", num_heads=5), ValueError, r"ToST: embed_dim must be a multiple of num_heads = 5"),
    "stem": (lambda: build("tost", embed_dim=18), ValueError, r"multiple of num_heads = 3 and of 4 \(the stem\)"),
    "image": (lambda: build("tost")(torch.ones(1, 3, 16, 20)), ValueError, r"ToST: img must be .* patches of 8x8, got"),
    "channels": (lambda: build("tost")(torch.ones(1, 1, 16, 16)), ValueError, r"ToST: img must be \(batch, channels=3"),
}


@pytest.mark.parametrize(("call", "error", "message"), BAD.values(), ids=BAD)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()
