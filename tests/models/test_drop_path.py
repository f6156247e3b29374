"""Stochastic depth: whole images skip a branch in training, more of them the deeper the layer."""

import pytest
import torch
from torch.testing import assert_close

from crate_kernels import models
from crate_kernels.models._shared.base import DropPath, path_rates
from crate_kernels.models.crate_mae import embed
from tests.models.families import build, drawn, inputs


def crate(layer, x, drop):
    attention, code = layer
    x = x + drop(attention.fn(attention.norm(x)))
    return code.fn(code.norm(x))


def crate_alpha(layer, x, drop):
    attention, code = layer
    x = x + drop(attention.fn(attention.norm(x)))
    return x + drop(code.fn(code.norm(x)))


FORMULAS = {
    "crate": crate,
    "crate_alpha": crate_alpha,
    "crate_mae_encoder": lambda block, x, drop: crate(block.layers[0], x, drop),
    "aot_vision": lambda layer, x, drop: x + drop(layer.attn(layer.norm(x))),
}


@pytest.mark.parametrize("family", FORMULAS)
def test_images_skip_a_branch(family):
    """The draws are repeated from the seed; the rates are those of numpy.linspace(0, rate, depth)."""
    rates = [0.0, 0.25, 0.5]
    model = drawn(build(family, depth=3, drop_path_rate=0.5)).double()
    (img,) = inputs(family, batch=6, dtype=torch.float64)
    x = model._embed(img)
    torch.manual_seed(3)
    for rate, layer in zip(rates, model._blocks(), strict=True):

        def drop(branch, rate=rate):
            if rate == 0:
                return branch
            return branch * torch.empty(6, 1, 1, dtype=branch.dtype).bernoulli_(1 - rate) / (1 - rate)

        x = FORMULAS[family](layer, x, drop)
    torch.manual_seed(3)
    assert_close(model(img), model.forward_head(model._finish(x)))
    whole = drawn(build(family, depth=3)).double().eval()
    assert torch.equal(model.eval()(img), whole(img))


def test_images_skip_attentions_of_an_autoencoder():
    """Rates start anew in the decoder."""
    model = drawn(build("crate_mae", depth=3, decoder_depth=2, drop_path_rate=0.5)).double()
    img, _, mask = inputs("crate_mae", batch=6, dtype=torch.float64)
    x = embed(model, img, model.decoder_pos_embed, mask)

    def drop(branch, rate):
        return branch * torch.empty(6, 1, 1, dtype=branch.dtype).bernoulli_(1 - rate) / (1 - rate) if rate else branch

    torch.manual_seed(3)
    for rate, block in zip([0.0, 0.25, 0.5], model.blocks, strict=True):
        x = crate(block.layers[0], x, lambda branch, rate=rate: drop(branch, rate))
    x = model.norm(x)
    for rate, block in zip([0.0, 0.5], model.decoder_blocks, strict=True):
        decode, attention = block.layers[0]
        y = decode.fn(decode.norm(x))
        x = y - drop(attention.fn(attention.norm(y)), rate)
    torch.manual_seed(3)
    assert_close(model(img, mask=mask)[1], model.decoder_pred(model.decoder_norm(x))[:, 1:])
    whole = drawn(build("crate_mae", depth=3, decoder_depth=2)).double().eval()
    assert torch.equal(model.eval()(img, mask=mask)[1], whole(img, mask=mask)[1])


# MAE's rates of fine-tuning, by size.
@pytest.mark.parametrize(("size", "rate", "depth"), [("base", 0.1, 12), ("large", 0.2, 24)])
def test_published_autoencoders_take_the_rates_of_mae(size, rate, depth):
    with torch.device("meta"):
        model = models.create(f"crate_mae_{size}", drop_path_rate=rate)
    for blocks in (model.blocks, model.decoder_blocks):
        rates = [max(m.rate for m in block.modules() if isinstance(m, DropPath)) for block in blocks]
        assert_close(rates, torch.linspace(0, rate, depth, dtype=torch.float64).tolist())


@pytest.mark.parametrize(("depth", "rates"), [(1, [0.0]), (3, [0.0, 0.1, 0.2])])
def test_rates_grow_evenly(depth, rates):
    assert_close(list(path_rates(0.2, depth)), rates)


def test_maps_and_keys_are_whole_in_training():
    model, (img,) = drawn(build("crate", drop_path_rate=0.9)), inputs("crate")
    assert_close(model.get_last_selfattention(img, 0).sum(-1), torch.ones(2, 3, 13))


@pytest.mark.parametrize("family", [*FORMULAS, "tost", "crate_mae"])
def test_a_rate_of_one_is_refused(family):
    with pytest.raises(ValueError, match=r"drop_path_rate must be < 1.0, got 1.0"):
        build(family, drop_path_rate=1.0)
    assert {m.rate for m in build(family).modules() if isinstance(m, DropPath)} == {0.0}


@pytest.mark.parametrize("what", ["return_attention", "return_key"])
def test_what_is_asked_for_skips_no_branch(what):
    model = drawn(build("crate", depth=3, drop_path_rate=0.5))
    (img,) = inputs("crate", batch=6)
    x, last = model._embed(img), model._blocks()[-1]
    expected = last.eval()(x, **{what: True})
    assert_close(last.train()(x, **{what: True}), expected)
