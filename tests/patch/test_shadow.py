"""Copies of modules that a probe runs, the dropout masks that it knows, and how it compares."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from crate_kernels._core import philox
from crate_kernels._patch import probe, shadow
from crate_kernels._patch.masks import Argument, MaskMeaning


def doubled(name, tensor):
    return 2 * tensor.detach()


def test_a_shadow_shares_nothing_that_a_forward_changes():
    child = nn.Linear(2, 2)
    module = nn.ModuleDict({"a": child, "b": child, "drop": nn.Dropout(0.5), "drop2": nn.Dropout(0.25)})
    module.entries, module.kept, module.plain = [1], torch.ones(2), "word"
    module.register_buffer("none", None)
    copied = shadow.shadow_of(module, doubled, False, itertools.count(0.125, 0.125))
    assert type(copied) is nn.ModuleDict
    assert copied["a"] is copied["b"]
    assert copied["a"] is not child
    torch.testing.assert_close(copied["a"].weight, 2 * child.weight.detach())
    assert (copied.entries, copied.plain, copied.none) == ([1], "word", None)
    assert copied.entries is not module.entries
    assert torch.equal(copied.kept, 2 * module.kept)
    assert (copied["drop"].p, copied["drop2"].p) == (0.125, 0.25)
    assert (module["drop"].p, module["drop2"].p) == (0.5, 0.25)
    assert not copied.training
    assert not copied["a"].training
    assert shadow.shadow_of(module, doubled, True, itertools.repeat(0.0))["drop"].training
    assert module.training


CHANGES = {
    "nothing": (lambda m: None, True),
    "attribute": (lambda m: setattr(m, "count", 4), False),
    "more": (lambda m: setattr(m, "more", 1), False),
    "type": (lambda m: setattr(m, "count", 3.0), False),
    "buffer": (lambda m: m.running.add_(1), False),
    "in a child": (lambda m: setattr(m.child, "count", 1), False),
    "child gone": (lambda m: m._modules.pop("child"), False),
    "list": (lambda m: m.entries.append(2), False),
    "inside a list": (lambda m: m.entries.__setitem__(0, {"a": torch.zeros(2)}), False),
    "key": (lambda m: m.entries[0].__setitem__("b", 1), False),
    "not a number stays": (lambda m: setattr(m, "number", torch.full((2,), torch.nan)), True),
}


@pytest.mark.parametrize(("change", "same"), CHANGES.values(), ids=CHANGES)
def test_what_a_forward_changed_is_seen(change, same):
    def made():
        module = nn.Module()
        module.register_buffer("running", torch.zeros(2))
        module.count, module.entries, module.number = 3, [{"a": torch.ones(2)}], torch.full((2,), torch.nan)
        module.child = nn.Module()
        module.child.loop = module.child
        return module

    left, right = made(), made()
    change(right)
    assert shadow.same_state(left, right) is same
    assert shadow.same_state(right, left) is same


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (4, 5)], ids=str)
@pytest.mark.parametrize("function", [F.dropout, torch.dropout], ids=["functional", "torch"])
def test_known_masks_are_those_of_the_position(function, shape):
    x = torch.randn(shape, dtype=torch.float64)
    with shadow.KnownMasks() as masks:
        assert function(x, 0.0, True) is x
        assert function(x, 0.5, False) is x
        found = function(x, 0.5, True)
    heads = torch.arange(math.prod(shape[:-2])).reshape(*shape[:-2], 1, 1)
    kept = philox.keep_factor(masks.seed, 0.5, heads, torch.arange(4)[:, None], torch.arange(5), x.dtype)
    torch.testing.assert_close(found, x * kept)
    assert set((found / x).unique().round().tolist()) == {0.0, 2.0}


BOOL = torch.tensor([[True, False, True]]).expand(3, 3)
ATTENTIONS = {
    "plain": ({}, None),
    "scale": ({"scale": 0.3}, None),
    "causal": ({"is_causal": True}, torch.zeros(3, 3).masked_fill(torch.ones(3, 3).triu(1).bool(), -torch.inf)),
    "bool": ({"attn_mask": BOOL}, torch.zeros(3, 3).masked_fill(~BOOL, -torch.inf)),
    "float": ({"attn_mask": torch.arange(9.0).reshape(3, 3)}, torch.arange(9.0).reshape(3, 3)),
}


@pytest.mark.parametrize(("options", "added"), ATTENTIONS.values(), ids=ATTENTIONS)
def test_sdpa_with_a_known_mask(options, added):
    q, k, v = torch.randn(3, 1, 2, 3, 4, dtype=torch.float64)
    options = {
        n: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for n, x in options.items()
    }
    with shadow.KnownMasks() as masks:
        plain = F.scaled_dot_product_attention(q, k, v, **options)
        found = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5, **options)
    scores = q @ k.mT * options.get("scale", 4**-0.5) + (0 if added is None else added.double())
    torch.testing.assert_close(plain, scores.softmax(-1) @ v)
    heads = torch.arange(2).reshape(1, 2, 1, 1)
    kept = philox.keep_factor(masks.seed, 0.5, heads, torch.arange(3)[:, None], torch.arange(3), q.dtype)
    torch.testing.assert_close(found, (scores.softmax(-1) * kept) @ v)


ONE = torch.tensor([1.0, -2.0])
DIFFERENCES = {
    "same": (ONE, ONE, None),
    "within": (ONE, ONE + 0.001, None),
    "beyond": (ONE, ONE + torch.tensor([0.0, 0.5]), "output differs by 2.5e-01 of its size"),
    "of the larger": (ONE, ONE * 10, "output differs by 9.0e-01 of its size"),
    "not a number": (ONE, ONE * torch.nan, "output differs by nan of its size"),
    "shape": (ONE, ONE[None], "output is torch.float32 (2,), not torch.float32 (1, 2)"),
    "dtype": (ONE, ONE.double(), "output is torch.float32 (2,), not torch.float64 (2,)"),
    "no tensor": ((ONE,), ONE, "output is a tuple"),
}


@pytest.mark.parametrize(("expected", "actual", "reason"), DIFFERENCES.values(), ids=DIFFERENCES)
def test_differences_are_of_the_size(expected, actual, reason):
    assert probe._difference(expected, actual, 0.001) == reason
    if reason is not None:
        with pytest.raises(probe._Difference, match=r"^computes something else: gradient "):
            probe._require_same(expected, actual, 0.001, "gradient")


def test_a_failure_is_told_by_its_first_line():
    assert probe._failure(ValueError("first\nsecond")) == "the probe failed: ValueError: first"


@pytest.mark.parametrize(
    ("shape", "fan_in"), [((400, 100), 100), ((9000,), 9000), ((50, 16, 5, 5), 400), ((9000, 0), 1)]
)
def test_drawn_weights_have_products_of_the_size_of_the_tokens(shape, fan_in):
    drawn = probe._draw_weights(torch.Size(shape), torch.Generator().manual_seed(0))
    assert (drawn.shape, drawn.dtype) == (shape, torch.float64)
    if drawn.numel():
        assert drawn.std().item() == pytest.approx(0.5 / fan_in**0.5, rel=0.05)


def test_the_size_of_a_number_is_without_its_sign():
    assert (probe._size(-3.0), probe._size(torch.tensor([1.0, -4.0]))) == (3.0, 4.0)


def test_an_argument_takes_what_was_proven_and_nothing_else():
    x, mask = torch.ones(2, 3, 4), torch.ones(2, 3, dtype=torch.bool)
    keys = MaskMeaning(2, False, "bool", True)
    proven = Argument("mask", masks=(keys,))
    assert proven.options(None, x, False) == {}
    assert Argument("mask", absent=False).options(None, x, False) is None
    assert proven.options([True], x, False) is None
    assert proven.options(mask.float(), x, False) is None
    assert proven.options(mask[:, :2], x, False) is None
    assert torch.equal(proven.options(mask, x, False)["key_padding_mask"], mask)
    square = Argument("mask", masks=(keys, MaskMeaning(2, True, "bool", True)))
    assert square.options(torch.ones(3, 3, dtype=torch.bool), torch.ones(3, 3, 4), False) is None
