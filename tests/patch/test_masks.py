"""``patch`` and a forward's mask argument: what a mask is taken for, and which calls stay published ones."""

# pyright: reportAttributeAccessIssue=false, reportIncompatibleMethodOverride=false

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from crate_kernels._patch import api, forms, masks
from crate_kernels._patch.api import patch
from tests.patch.published import (
    DIM,
    HEADS,
    Attention,
    VisionTSSA,
    assert_close,
    heads_first,
    heads_last,
    outcome,
    tokens,
)


class Masked(nn.Module):
    """Attention that reads its mask with ``read``, and fills what that drops with ``fill``."""

    def __init__(self, read, fill=-torch.inf, causal=False):
        super().__init__()
        self.num_heads = HEADS
        self.qkv = nn.Linear(DIM, DIM, bias=False)
        self.proj = nn.Linear(DIM, DIM)
        self.read, self.fill, self.causal = read, fill, causal

    def forward(self, x, mask=None):
        w = heads_first(self.qkv(x), self.num_heads)
        scores = w @ w.mT * w.shape[-1] ** -0.5
        if self.causal:
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
        if mask is not None:
            scores = scores.masked_fill(self.read(mask), self.fill)
        return self.proj(heads_last(scores.softmax(-1) @ w))


class Required(Masked):
    def forward(self, x, mask):
        return Masked.forward(self, x, mask.logical_not().logical_not())


KEPT = torch.tensor([[True, True, False, True, False], [True, False, True, True, True]])
TRIANGLE = torch.ones(5, 5, dtype=torch.bool).tril()
FUSED = {
    "keys": (lambda m: ~m[:, None, None, :], KEPT),
    "keys-int": (lambda m: m[:, None, None, :] == 0, KEPT.long()),
    "keys-float": (lambda m: m[:, None, None, :] == 0, KEPT.float()),
    "dropped-keys": (lambda m: m[:, None, None, :], ~KEPT),
    "keys-of-rank-3": (lambda m: ~m.unsqueeze(1), KEPT[:, None]),
    "keys-of-rank-4": (lambda m: ~m, KEPT[:, None, None]),
    "causal": (lambda m: ~m, TRIANGLE),
    "causal-int": (lambda m: m == 0, TRIANGLE.long()),
    "causal-dropped": (lambda m: m, ~TRIANGLE),
    "causal-of-rank-3": (lambda m: ~m.unsqueeze(1), TRIANGLE[None]),
    "causal-of-rank-3-batched": (lambda m: ~m.unsqueeze(1), TRIANGLE.expand(2, 5, 5)),
    "causal-of-rank-4": (lambda m: ~m, TRIANGLE[None, None]),
}
PUBLISHED = {
    "other-pairs": (lambda m: ~m, TRIANGLE.flip(0, 1)),
    "one-pair-more": (lambda m: ~m, TRIANGLE | torch.eye(5, dtype=torch.bool).roll(1, 1)),
    "all-pairs": (lambda m: ~m, torch.ones_like(TRIANGLE)),
    "one-row-for-all": (lambda m: ~m[:, None, None, :], KEPT[:1]),
    "a-dtype-never-proven": (lambda m: (~m if m.dtype == torch.bool else m > 1.0)[:, None, None, :], KEPT.float()),
    "above-a-half": (lambda m: (~m if m.dtype == torch.bool else m < 0.5)[:, None, None, :], KEPT.float()),
    "positive": (lambda m: (~m if m.dtype == torch.bool else m <= 0)[:, None, None, :], KEPT.long()),
    "no-tensor": (torch.as_tensor, False),
}


def probed(model, monkeypatch):
    calls, fused = [], forms.mssa
    monkeypatch.setattr(forms, "mssa", lambda w, **options: calls.append(options) or fused(w, **options))
    return calls


@pytest.mark.parametrize(("read", "mask"), FUSED.values(), ids=FUSED)
def test_a_proven_mask_is_fused(read, mask, monkeypatch):
    model, x = Masked(read), tokens()
    before = [outcome(model, x), outcome(model, x, mask), outcome(model, x, mask=mask)]
    report = patch(model)
    assert (report.replaced, report.left) == ({"": "mssa"}, {})
    calls = probed(model, monkeypatch)
    after = [outcome(model, x), outcome(model, x, mask), outcome(model, x, mask=mask)]
    for new, old in zip(after, before, strict=True):
        assert_close(new, old, 64)
    assert len(calls) == 3


@pytest.mark.parametrize("name", ["keys", "causal"])
def test_a_mask_compiles_in_one_graph(name):
    """A mask of keys is passed on; one of pairs, whose values a graph cannot read, is left to the published forward."""
    read, mask = FUSED[name]
    model, x = Masked(read), tokens()
    expected = model(x, mask)
    patch(model)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x, mask=mask), expected)


@pytest.mark.parametrize(("read", "mask"), PUBLISHED.values(), ids=PUBLISHED)
def test_any_other_mask_runs_the_published_forward(read, mask, monkeypatch):
    runs_published(read, mask, tokens(), monkeypatch)


def runs_published(read, mask, x, monkeypatch):
    model = Masked(read)
    expected = model(x, mask)
    assert patch(model).replaced == {"": "mssa"}
    calls = probed(model, monkeypatch)
    assert torch.equal(model(x, mask), expected)
    assert calls == []


RAISING = {  # shapes that the published forward cannot broadcast: two sequences of five tokens
    "three-batches-of-pairs": ("causal-of-rank-3", TRIANGLE.expand(3, 5, 5)),
    "three-batches-of-rank-4": ("causal-of-rank-4", TRIANGLE.expand(3, 1, 5, 5)),
    "heads-that-are-not-there": ("causal-of-rank-4", TRIANGLE.expand(1, HEADS + 1, 5, 5)),
    "fewer-queries": ("causal", TRIANGLE[:3]),
    "more-tokens": ("causal", torch.ones(6, 6, dtype=torch.bool).tril()),
    "more-keys": ("causal", torch.ones(5, 6, dtype=torch.bool).tril()),
    "three-sequences-of-keys": ("keys", KEPT[:1].expand(3, 5)),
    "more-keys-of-sequences": ("keys", KEPT.repeat(1, 2)[:, :6]),
    "three-rows-of-keys": ("keys-of-rank-3", KEPT[:, None].expand(2, 3, 5)),
    "three-sequences-of-rank-4": ("keys-of-rank-4", KEPT[:1, None, None].expand(3, 1, 1, 5)),
}


@pytest.mark.parametrize(("proven", "mask"), RAISING.values(), ids=RAISING)
def test_a_mask_of_no_such_shape_raises_as_published(proven, mask, monkeypatch):
    read, fits = FUSED[proven]
    model, x = Masked(read), tokens()
    with pytest.raises(RuntimeError) as published:
        model(x, mask)
    patch(model)
    calls = probed(model, monkeypatch)
    with pytest.raises(RuntimeError) as patched:
        model(x, mask)
    assert str(patched.value) == str(published.value)
    assert calls == []
    model(x, fits)
    assert len(calls) == 1


def test_keys_and_pairs_of_one_shape_run_the_published_forward(monkeypatch):
    """Two sequences of two tokens: only the forward knows what a (2, 2) mask is."""
    read, mask = lambda m: ~m[:, None, None, :] if m.shape[0] == 2 else ~m, torch.tensor([[True, False], [True, True]])
    runs_published(read, mask, tokens()[:, :2], monkeypatch)


@pytest.mark.parametrize(("fill", "fused"), [(-torch.inf, True), (-1e9, False)], ids=["inf", "finite"])
def test_a_sequence_without_keys(fill, fused, monkeypatch):
    """A softmax of nothing is NaN, where the operator gives 0; a finite fill averages, and is left to it."""
    model, x = Masked(lambda m: ~m[:, None, None, :], fill), tokens()
    kept = torch.stack([KEPT[0], torch.zeros(5, dtype=torch.bool)])
    expected, some = model(x, kept), model(x, KEPT)
    assert patch(model).left == {}
    calls = probed(model, monkeypatch)
    actual = model(x, kept)
    torch.testing.assert_close(actual[0], expected[0])
    torch.testing.assert_close(actual[1], model.proj.bias.expand(5, DIM) if fused else expected[1])
    assert len(calls) == fused
    torch.testing.assert_close(model(x, KEPT), some)
    assert len(calls) == fused + 1


@pytest.mark.parametrize("first", [True, False], ids=["right-padded", "left-padded"])
def test_causal_attention_takes_keys_too(first, monkeypatch):
    """With a finite fill, a first token that is dropped leaves a query without keys."""
    model, x = Masked(lambda m: ~m[:, None, None, :], -1e9, causal=True), tokens()
    kept = KEPT if first else KEPT.flip(1)
    expected = model(x, kept)
    assert patch(model).replaced == {"": "causal mssa"}
    calls = probed(model, monkeypatch)
    torch.testing.assert_close(model(x, kept), expected)
    assert len(calls) == first


class MaskedTSSA(VisionTSSA):
    """Leaves padded tokens out of the sums over tokens."""

    def forward(self, x, mask=None):
        if mask is None:
            return super().forward(x)
        w, kept = heads_first(self.qkv(x), self.heads), mask[:, None, :].to(x.dtype)
        share = w**2 / (w**2 * kept[..., None]).sum(-2, keepdim=True).clamp_min(1e-24)
        member = self.attend(share.sum(-1) * self.temp)
        counted = member * kept
        gate = 1 / (1 + (counted / (counted.sum(-1, keepdim=True) + 1e-8)).unsqueeze(-2) @ w**2)
        return self.to_out(heads_last(-w * member.unsqueeze(-1) * self.attn_drop(gate)))


def test_token_statistics_take_keys():
    model, x = MaskedTSSA(), tokens()
    before = [outcome(model, x), outcome(model, x, KEPT)]
    assert (patch(model).replaced, patch(model).left) == (
        {"": "tssa"},
        {"": "already patched; unpatch first to change the backend"},
    )
    masks = type(model)._crate_kernels.form.mask.masks
    assert {(mask.rank, mask.pairs, mask.dtype, mask.keep) for mask in masks} >= {(2, False, "bool", True)}
    for new, old in zip([outcome(model, x), outcome(model, x, KEPT)], before, strict=True):
        assert_close(new, old, 64)


def test_a_required_mask(monkeypatch):
    model, x = Required(lambda m: ~m[:, None, None, :]), tokens()
    expected = model(x, KEPT)
    assert patch(model).replaced == {"": "mssa"}
    calls = probed(model, monkeypatch)
    torch.testing.assert_close(model(x, KEPT), expected)
    assert len(calls) == 1
    for wrong, message in (((), "missing 1 required positional argument"), ((None,), "NoneType")):
        with pytest.raises((TypeError, AttributeError), match=message):
            model(x, *wrong)


class Gated(Attention):
    """Multiplies by its mask, as no operator does."""

    def forward(self, x, attn_mask=None):
        out = super().forward(x)
        return out if attn_mask is None else out * attn_mask[..., None]


def test_a_mask_of_no_known_meaning_is_named():
    model, x = Gated(), tokens()
    expected = model(x, KEPT)
    report = patch(model)
    assert report.replaced == {"": "mssa"}
    assert report.left == {"": "runs its published forward with a attn_mask, which is none that the operator has"}
    assert torch.equal(model(x, KEPT), expected)


class IgnoresMask(Attention):
    def forward(self, x, mask=None):
        return super().forward(x)


def test_a_mask_that_is_ignored_stays_ignored():
    model, x = IgnoresMask(), tokens()
    expected = model(x)
    patch(model)
    torch.testing.assert_close(model(x, mask=KEPT), expected)


class Builtin(nn.Module):
    forward = torch.relu  # has no signature


def test_a_forward_without_a_signature_has_no_argument_to_read():
    assert masks.argument(Builtin()) is None
    form = SimpleNamespace(mask=None)
    read, x = api._argument_reader(Builtin.forward, form), tokens()
    assert read((x,), {})[0] is x
    assert read((x, x), {}) == (None, None)
    assert read((), {"input": x}) == (None, None)
