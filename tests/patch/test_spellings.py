"""Other people's spellings of the published modules: what ``patch`` takes each for."""

# pyright: reportIncompatibleMethodOverride=false, reportAttributeAccessIssue=false

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from crate_kernels._patch.api import patch
from tests.patch.published import (
    DIM,
    HEAD_DIM,
    HEADS,
    Attention,
    FeedForward,
    VisionTSSA,
    assert_close,
    heads_first,
    heads_last,
    outcome,
    tokens,
)


class Flash(nn.Module):
    """The names of timm, and PyTorch's own attention."""

    def __init__(self, rate=0.0, bias=False):
        super().__init__()
        self.num_heads = HEADS
        self.qkv = nn.Linear(DIM, DIM, bias=bias)
        self.attn_drop = nn.Dropout(rate)
        self.proj = nn.Linear(DIM, DIM)
        self.proj_drop = nn.Dropout(rate)

    def forward(self, x):
        w = heads_first(self.qkv(x), self.num_heads)
        rate = self.attn_drop.p if self.training else 0.0
        return self.proj_drop(self.proj(heads_last(F.scaled_dot_product_attention(w, w, w, dropout_p=rate))))


class Plain(nn.Module):
    """A scale that is computed, the softmax as a function, a triangle for the mask, and no output projection."""

    def __init__(self, causal=False):
        super().__init__()
        self.n_heads = HEADS
        self.scaling = 0.3
        self.to_qkv = nn.Linear(DIM, HEADS * HEAD_DIM, bias=False)
        self.causal = causal

    def forward(self, x):
        w = heads_first(self.to_qkv(x), self.n_heads)
        scores = self.scaling * (w @ w.mT)
        if self.causal:
            scores = scores + torch.full_like(scores, -torch.inf).triu(1)
        return heads_last(F.softmax(scores, -1) @ w)


class OneDropout(Attention):
    """Drops weights and output with one child."""

    def __init__(self):
        super().__init__(dropout=0.3)
        self.to_out = nn.Linear(DIM, DIM)

    def forward(self, x):
        return self.dropout(super().forward(x))


class OutputDropout(OneDropout):
    """Drops the output only, with the child that others drop the weights with."""

    def forward(self, x):
        w = heads_first(self.qkv(x), self.heads)
        return self.dropout(self.to_out(heads_last(self.attend(w @ w.mT * self.scale) @ w)))


class Unscaled(Attention):
    """Has a scale and never reads it."""

    def forward(self, x):
        w = heads_first(self.qkv(x), self.heads)
        return self.to_out(heads_last(self.dropout(self.attend(w @ w.transpose(-1, -2))) @ w))


class Rectified(Attention):
    def __init__(self):
        super().__init__()
        self.attend = nn.ReLU()


class ScaledTSSA(VisionTSSA):
    """With the scale of the attention that it was made from."""

    def __init__(self, scale=0.5):
        super().__init__(qkv_bias=False)
        self.scale = scale
        self.num_heads = self.heads


class Temperature(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads = HEADS
        self.qkv = nn.Linear(DIM, DIM)
        self.temperature = nn.Parameter(torch.ones(HEADS))
        self.proj = nn.Linear(DIM, DIM)

    def forward(self, x):
        w = heads_first(self.qkv(x), self.num_heads)
        member = ((F.normalize(w, dim=-2) ** 2).sum(-1) * self.temperature[:, None]).softmax(1)
        moment = (member / (member.sum(-1, keepdim=True) + 1e-8)).unsqueeze(-2) @ w**2
        return self.proj(heads_last(-w * member.unsqueeze(-1) / (1 + moment)))


class SquareD(nn.Module):
    """ISTA under the names of CRATE-alpha; ``transposed`` keeps the dictionary the other way."""

    def __init__(self, transposed=False):
        super().__init__()
        self.eta, self.lmbda, self.transposed = 0.1, 0.2, transposed
        self.D = nn.Parameter(nn.init.kaiming_uniform_(torch.empty(DIM, DIM)))

    def forward(self, x):
        d = self.D.t() if self.transposed else self.D
        return F.relu(x + self.eta * ((x - x @ d.t()) @ d - self.lmbda))


class Tied(nn.Module):
    """The overcomplete form without D1, or square, with as many steps as it says."""

    def __init__(self, hidden=4 * DIM, steps=None, transposed=False):
        super().__init__()
        self.eta, self.lmbda, self.transposed = 0.1, 0.1, transposed
        if steps is not None:
            self.steps = steps
        shape = (hidden, DIM) if transposed else (DIM, hidden)
        self.D = nn.Parameter(nn.init.kaiming_uniform_(torch.empty(shape)))
        self.register_parameter("D1", None)

    def forward(self, x):
        d = self.D.t() if self.transposed else self.D
        z = x.new_zeros(*x.shape[:-1], d.shape[1])
        for _ in range(getattr(self, "steps", 2)):
            z = F.relu(z + self.eta * ((x - z @ d.t()) @ d - self.lmbda))
        return z @ d.t()


class FrozenDictionary(FeedForward):
    """The dictionary is a buffer."""

    def __init__(self):
        super().__init__()
        weight = self.weight.detach()
        del self.weight
        self.register_buffer("weight", weight)


SPELLINGS = {
    "num-heads": (lambda: Flash(0.25), "mssa"),
    "input-bias": (lambda: Flash(bias=True), "mssa"),
    "functional": (Plain, "mssa"),
    "functional-causal": (lambda: Plain(causal=True), "causal mssa"),
    "one-dropout": (OneDropout, "mssa"),
    "output-dropout": (OutputDropout, "mssa"),
    "unscaled": (Unscaled, "mssa"),
    "relu-attention": (Rectified, "mssa"),
    "tssa-with-a-scale": (ScaledTSSA, "tssa"),
    "temperature": (Temperature, "tssa"),
    "D-eta-lmbda": (SquareD, "ista"),
    "D-transposed": (lambda: SquareD(transposed=True), "ista"),
    "tied": (Tied, "ista_overcomplete"),
    "tied-transposed": (lambda: Tied(transposed=True), "ista_overcomplete"),
    "tied-square": (lambda: Tied(hidden=DIM), "ista_overcomplete"),
    "steps": (lambda: Tied(steps=3), "ista_overcomplete"),
    "frozen": (FrozenDictionary, "ista"),
}


@pytest.mark.parametrize(("make", "kind"), SPELLINGS.values(), ids=SPELLINGS)
def test_same_numbers(make, kind):
    torch.manual_seed(0)
    model = nn.Sequential(make()).eval()
    before = outcome(model, tokens())
    report = patch(model)
    assert (report.replaced, report.left) == ({"0": kind}, {})
    assert_close(outcome(model, tokens()), before, 64)


@pytest.mark.parametrize(
    ("make", "after", "rate"),
    [
        (lambda: Flash(0.25), ("proj", "proj_drop"), 0.25),
        (OneDropout, ("to_out", "dropout"), 0.3),
        (OutputDropout, ("to_out", "dropout"), 0.0),
        (lambda: Attention(dropout=0.4), ("to_out",), 0.4),
    ],
    ids=["num-heads", "one", "output", "published"],
)
def test_dropout_is_where_it_was(make, after, rate):
    model = make()
    patch(model)
    form = type(model)._crate_kernels.form
    assert (form.after, form.rate(model), form.rate(model.eval())) == (after, rate, 0.0)


def test_numbers_are_read_at_each_call():
    model, x = Tied(steps=3), tokens()
    patch(model)
    before = model(x)
    model.steps, model.eta = 2, 0.2
    assert not torch.allclose(model(x), before)
    torch.testing.assert_close(model(x), Tied.forward(model, x))
