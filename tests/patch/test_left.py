"""What ``patch`` leaves as it is, and the reason that it names."""

# pyright: reportIncompatibleMethodOverride=false, reportAttributeAccessIssue=false

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import crate_kernels.nn
from crate_kernels._patch.api import patch
from tests.patch.published import (
    DIM,
    HEAD_DIM,
    HEADS,
    Attention,
    CausalAttention,
    CausalTSSA,
    DecoderFeedForward,
    FeedForward,
    Overcomplete,
    PrintedISTA,
    Thirds,
    VisionTSSA,
    heads_first,
    heads_last,
)


class ConstantScale(Attention):
    """Has a scale and computes with another number, equal when it was made."""

    def forward(self, x):
        w = heads_first(self.qkv(x), self.heads)
        return self.to_out(heads_last(self.attend(w @ w.transpose(-1, -2) * 0.25) @ w))


class StopGradient(Attention):
    def forward(self, x):
        w = heads_first(self.qkv(x), self.heads)
        weights = self.attend(w @ w.detach().transpose(-1, -2) * self.scale)
        return self.to_out(heads_last(weights @ w))


class TrainingNoise(Attention):
    def forward(self, x):
        return super().forward(x) + (torch.randn_like(x) if self.training else 0.0)


class ExtraBias(Attention):
    def __init__(self):
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(DIM))

    def forward(self, x):
        return super().forward(x) + self.offset


class TwoInputs(Attention):
    def forward(self, x, mask):
        return super().forward(x) * mask


class ChannelsLast(Attention):
    def forward(self, x):
        batch, height, width, channels = x.shape
        return super().forward(x.flatten(1, 2)).view(batch, height, width, channels)


class ChannelsLastTSSA(VisionTSSA):
    def forward(self, x):
        batch, height, width, channels = x.shape
        return super().forward(x.flatten(1, 2)).view(batch, height, width, channels)


class TemperatureUnused(VisionTSSA):
    def forward(self, x):
        original, self.temp = self.temp, nn.Parameter(torch.ones_like(self.temp))
        try:
            return super().forward(x)
        finally:
            self.temp = original


class BiasUnused(CausalTSSA):
    def forward(self, x):
        unbiased = copy.copy(self)
        unbiased._parameters = {**self._parameters, "denom_bias": torch.zeros_like(self.denom_bias)}
        return CausalTSSA.forward(unbiased, x)


class ThreeSteps(Overcomplete):
    def forward(self, x):
        z = x.new_zeros(*x.shape[:-1], self.D.shape[1])
        for _ in range(3):
            z = F.relu(z + self.eta * ((x - z @ self.D.t()) @ self.D) - self.eta * self.lmbda)
        return z @ self.D1.t()


class DoubleThreshold(FeedForward):
    def forward(self, x):
        return F.relu(super().forward(x) - self.step_size * self.lambd)


class Silent(FeedForward):
    def forward(self, x):
        return 0.0 * x + 0.0 * self.weight.sum()


class Window(Attention):
    """Sees the nearest keys only; ``window`` is longer than a short probe."""

    def __init__(self, window, named=True, dim=DIM):
        super().__init__(dim)
        self.reach = lambda: window
        if named:
            self.window = window

    def forward(self, x):
        w = heads_first(self.qkv(x), self.heads)
        position = torch.arange(x.shape[1])
        far = (position[:, None] - position).abs() >= self.reach()
        scores = (w @ w.mT * self.scale).masked_fill(far, -torch.inf)
        return self.to_out(heads_last(self.attend(scores) @ w))


class StrictlyCausal(Attention):
    """Never attends to the token itself, the first excepted."""

    def forward(self, x):
        w = heads_first(self.qkv(x), self.heads)
        earlier = torch.ones(x.shape[1], x.shape[1]).tril(-1).bool()
        earlier[0, 0] = True
        return self.to_out(heads_last(self.attend((w @ w.mT * self.scale).masked_fill(~earlier, -torch.inf)) @ w))


class Capped(Attention):
    """Caps its scores, which small tokens never reach."""

    def forward(self, x):
        w = heads_first(self.qkv(x), self.heads)
        return self.to_out(heads_last(self.attend((w @ w.mT * self.scale).clamp(-20.0, 20.0)) @ w))


class OtherElsewhere(FeedForward):
    """Another function in the dtypes that a probe in float64 does not run."""

    def forward(self, x):
        return super().forward(x) * (1.0 if x.dtype == torch.float64 else 1.5)


class Remembers(Attention):
    """Keeps its weights for a picture."""

    def forward(self, x):
        w = heads_first(self.qkv(x), self.heads)
        self.seen = self.attend(w @ w.mT * self.scale)
        return self.to_out(heads_last(self.dropout(self.seen) @ w))


class Counts(FeedForward):
    """Counts its calls, in a buffer or not."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        if kind == "buffer":
            self.register_buffer("count", torch.zeros(1))
        else:
            self.count = {"list": [], "number": 0}[kind]

    def forward(self, x):
        if self.kind == "list":
            self.count.append(1)
        else:
            self.count += 1
        return super().forward(x)


class DropsScores(Attention):
    def __init__(self):
        super().__init__(dropout=0.1)

    def forward(self, x):
        w = heads_first(self.qkv(x), self.heads)
        return self.to_out(heads_last(self.attend(self.dropout(w @ w.mT * self.scale)) @ w))


class DropsHalfAsOften(Attention):
    def __init__(self):
        super().__init__(dropout=0.1)

    def forward(self, x):
        w = heads_first(self.qkv(x), self.heads)
        weights = self.attend(w @ w.mT * self.scale)
        return self.to_out(heads_last(F.dropout(weights, self.dropout.p / 2, self.training) @ w))


class Learned(Attention):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))


class Bounded(FeedForward):
    """Its threshold is learned, and never negative."""

    def __init__(self):
        super().__init__()
        del self.lambd
        self.lambd = nn.Parameter(torch.tensor(0.1))

    def forward(self, x):
        residual = x - F.linear(x, self.weight)
        return F.relu(x + self.step_size * (F.linear(residual, self.weight.t()) - self.lambd.relu()))


class TwoSteps(FeedForward):
    def __init__(self):
        super().__init__()
        self.eta = nn.Parameter(torch.tensor(0.1))


class Nameless(FeedForward):
    """Its step is no attribute."""

    def __init__(self):
        super().__init__()
        del self.step_size

    def forward(self, x):
        return F.relu(x + 0.1 * (x - x @ self.weight.t()) @ self.weight - 0.1 * self.lambd)


class Headless(Attention):
    def __init__(self):
        super().__init__()
        del self.heads

    def forward(self, x):
        w = heads_first(self.qkv(x), HEADS)
        return self.to_out(heads_last(self.attend(w @ w.mT * self.scale) @ w))


class Clamped(FeedForward):
    """ReLU6, whose ceiling small tokens never reach."""

    def forward(self, x):
        return super().forward(x).clamp_max(6.0)


class Constant(FeedForward):
    """Was made with the threshold that it computes with, and never reads it."""

    def forward(self, x):
        original, self.lambd = self.lambd, 0.1
        try:
            return super().forward(x)
        finally:
            self.lambd = original


class Residual(Overcomplete):
    def forward(self, x):
        return x + super().forward(x)


def clipa(equal):
    module = nn.MultiheadAttention(DIM, HEADS, bias=False)
    module.in_proj_weight.data = module.in_proj_weight.data[:DIM].repeat(3, 1) if equal else module.in_proj_weight.data
    return module


class Final(FeedForward):
    def __init_subclass__(cls):
        raise TypeError("Final is final")


def instance_forward():
    module = FeedForward()
    module.forward = lambda x: x
    return module


def changed(module, **parts):
    for name, part in parts.items():
        setattr(module, name, part)
    return module


class Apart(Attention):
    """Ordinary attention, as in transformers' and other people's models: three projections under these names."""

    def __init__(self, *names):
        super().__init__()
        del self.qkv
        self.names = names
        for name in names:
            setattr(self, name, nn.Linear(DIM, DIM))

    def forward(self, x):
        query, key, value = (heads_first(getattr(self, name)(x), self.heads) for name in self.names)
        return self.to_out(heads_last(self.attend(query @ key.mT * self.scale) @ value))


LEFT = {
    "scale-unread": (ConstantScale, "something else: output differs by"),
    "window": (lambda: Window(200), "something else: output of a long sequence differs by"),
    "window-of-the-width": (lambda: Window(200, dim=200), "something else: output of a long sequence differs by"),
    "window-of-a-constant": (lambda: Window(128, named=False), "something else: output of a long sequence differs"),
    "strictly-causal": (StrictlyCausal, "something else: output differs by"),
    "capped-scores": (Capped, "something else: output of large tokens differs by"),
    "other-in-float32": (OtherElsewhere, "looks like ista, but its numbers differ: output differs by"),
    "other-in-bfloat16": (
        lambda: OtherElsewhere().bfloat16(),
        "looks like ista, but its numbers differ: output differs by",
    ),
    "remembers": (Remembers, "changes attributes of the module"),
    "counts": (lambda: Counts("number"), "changes attributes of the module"),
    "counts-in-a-buffer": (lambda: Counts("buffer"), "changes attributes of the module"),
    "counts-in-a-list": (lambda: Counts("list"), "changes attributes of the module"),
    "drops-scores": (DropsScores, "its dropout is not the operator's"),
    "drops-at-another-rate": (DropsHalfAsOften, "its dropout is not the operator's"),
    "learned-scale": (Learned, "its scale is a tensor, and the operator takes a number"),
    "learned-and-bounded": (Bounded, "something else: output differs by"),
    "learned-twice": (TwoSteps, "but its eta is a tensor, and the operator takes a number"),
    "no-step": (Nameless, "looks like ista, but has no number step_size or eta"),
    "no-heads": (Headless, "looks like mssa, but has no number of heads (heads, num_heads"),
    "heads-that-do-not-divide": (lambda: changed(Attention(), heads=5), "has no number of heads"),
    "relu6": (Clamped, "something else: output of large tokens differs by"),
    "threshold-unread": (Constant, "something else: output differs by"),
    "residual": (Residual, "something else: output differs by"),
    "equal-thirds": (lambda: Thirds(3), "as long as its three projections are equal"),
    "clipa": (lambda: clipa(True), "as long as its three projections are equal"),
    "ordinary": (lambda: nn.MultiheadAttention(DIM, HEADS), "has projections of its own for query, key and value"),
    "ordinary-in-one": (lambda: Thirds(1), "of its own for query, key and value, where mssa has one: not white-box"),
    "ordinary-with-two-equal": (lambda: Thirds(2), "has projections of its own for query, key and value"),
    "ordinary-proj": (lambda: Apart("q_proj", "k_proj", "v_proj"), "has projections of its own for query, key and va"),
    "ordinary-names": (lambda: Apart("query", "key", "value"), "has projections of its own for query, key and value"),
    "ordinary-to": (lambda: Apart("to_q", "to_k", "to_v"), "has projections of its own for query, key and value"),
    "clipa-untrained": (lambda: clipa(False), "has projections of its own for query, key and value"),
    "meta-buffer": (lambda: CausalAttention().to("meta"), "its bias has no values on the meta device"),
    "other-relu": (lambda: changed(PrintedISTA(), relu=nn.GELU()), "has another relu"),
    "other-dropout": (lambda: changed(Attention(), dropout=nn.AlphaDropout(0.1)), "has another dropout"),
    "dropout-that-is-none": (lambda: changed(Attention(), dropout=nn.ReLU()), "has another dropout"),
    "lazy": (lambda: changed(Attention(), qkv=nn.LazyLinear(DIM, bias=False)), "its qkv has no width yet"),
    "stop-gradient": (StopGradient, "something else: gradient differs by"),
    "training-noise": (TrainingNoise, "something else: output differs by"),
    "more-parameters": (ExtraBias, "has more: offset"),
    "channels-last": (ChannelsLast, "takes (batch, height, width, channels), where patch knows tokens"),
    "channels-last-statistics": (ChannelsLastTSSA, "takes (batch, height, width, channels), where patch knows token"),
    "two-inputs": (TwoInputs, "the probe failed: TypeError"),
    "temp-unused": (TemperatureUnused, "something else"),
    "denom-bias-unused": (BiasUnused, "something else"),
    "plain-product": (DecoderFeedForward, "something else: output differs by"),
    "double-threshold": (DoubleThreshold, "something else: output differs by"),
    "small-threshold": (lambda: DoubleThreshold(lambd=0.01), "something else: output differs by"),
    "always-zero": (Silent, "something else: output differs by"),
    "three-steps": (ThreeSteps, "something else: output differs by"),
    "instance-forward": (instance_forward, "set on the instance"),
    "final": (Final, "cannot be derived from: Final is final"),
    "other-attend": (lambda: changed(Attention(), attend=nn.Sigmoid()), "has another attend"),
    "other-softmax": (lambda: changed(Attention(), attend=nn.Softmax(dim=-2)), "has another attend"),
    "our-ista": (lambda: crate_kernels.nn.ISTA(DIM), "already fused"),
    "our-mssa": (lambda: crate_kernels.nn.MSSA(DIM, HEADS, HEAD_DIM), "already fused"),
}


@pytest.mark.parametrize(("make", "reason"), LEFT.values(), ids=LEFT)
def test_left_with_the_reason(make, reason):
    module = make()
    report = patch(nn.Sequential(module))
    assert report.replaced == {}
    assert reason in report.left["0"]
    assert reason in str(report)
