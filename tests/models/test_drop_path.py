"""Stochastic depth: whole images skip a branch in training, more of them the deeper the layer."""

import pytest
import torch
from torch.testing import assert_close

from crate_kernels.models._shared.base import DropPath, path_rates
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


@pytest.mark.parametrize(("depth", "rates"), [(1, [0.0]), (3, [0.0, 0.1, 0.2])])
def test_rates_grow_evenly(depth, rates):
    assert_close(list(path_rates(0.2, depth)), rates)


def test_maps_and_keys_are_whole_in_training():
    model, (img,) = drawn(build("crate", drop_path_rate=0.9)), inputs("crate")
    assert_close(model.get_last_selfattention(img, 0).sum(-1), torch.ones(2, 3, 13))


@pytest.mark.parametrize("family", [*FORMULAS, "tost"])
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
