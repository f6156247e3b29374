"""What ``patch`` leaves as it is and why, and that finding out leaves no trace."""

# pyright: reportIncompatibleMethodOverride=false, reportAttributeAccessIssue=false

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import crate_kernels.nn
from crate_kernels import _patch_probe
from crate_kernels._patch import patch
from tests.published import (
    DIM,
    HEAD_DIM,
    HEADS,
    Attention,
    CausalTSSA,
    DecoderFeedForward,
    FeedForward,
    Overcomplete,
    VisionTSSA,
    heads_first,
    heads_last,
    system,
)


class NoScale(Attention):
    def forward(self, x):
        w = heads_first(self.qkv(x), self.heads)
        return self.to_out(heads_last(self.attend(w @ w.transpose(-1, -2)) @ w))


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


class TemperatureUnused(VisionTSSA):
    def forward(self, x):
        held, self.temp = self.temp, nn.Parameter(torch.ones_like(self.temp))
        try:
            return super().forward(x)
        finally:
            self.temp = held


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


class Final(FeedForward):
    def __init_subclass__(cls):
        raise TypeError("Final is final")


def instance_forward():
    module = FeedForward()
    module.forward = lambda x: x
    return module


def attention_with(attend):
    module = Attention()
    module.attend = attend
    return module


LEFT = {
    "scale-unused": (NoScale, "something else: output differs by"),
    "stop-gradient": (StopGradient, "something else: gradient differs by"),
    "training-noise": (TrainingNoise, "something else: output differs by"),
    "more-parameters": (ExtraBias, "has more: offset"),
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
    "other-attend": (lambda: attention_with(nn.Sigmoid()), "has another attend"),
    "other-softmax": (lambda: attention_with(nn.Softmax(dim=-2)), "has another attend"),
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


class Switch(FeedForward):
    """One class, two functions, by an attribute of each type."""

    def __init__(self, plain, via=lambda value: value):
        super().__init__()
        self.plain = via(plain)

    def forward(self, x):
        plain = self.plain[0] if isinstance(self.plain, list) else self.plain
        return F.linear(x, self.weight) if plain else super().forward(x)


@pytest.mark.parametrize("via", [bool, str, lambda v: [v], torch.tensor], ids=["bool", "str", "list", "tensor"])
def test_layers_of_one_class_are_told_apart(via):
    values = ("", "plain") if via is str else (False, True)
    model = nn.Sequential(*(Switch(value, via) for value in (*values, *values)))
    assert list(patch(model).replaced) == ["0", "2"]


class PlainIfNarrow(FeedForward):
    def forward(self, x):
        return super().forward(x) if self.weight.shape[0] == DIM else F.linear(x, self.weight)


def test_layers_of_other_widths_are_told_apart():
    with torch.device("meta"):  # where there are no numbers to compare with the backend's
        model = nn.ModuleList([PlainIfNarrow(), PlainIfNarrow(DIM - 4), PlainIfNarrow()])
    assert list(patch(model).replaced) == ["0", "2"]


class TiedByName(Overcomplete):
    """Decodes with D, of which D1 is another name."""

    def __init__(self):
        super().__init__()
        self.D1 = self.D

    def forward(self, x):
        untied = copy.copy(self)
        untied._parameters = {**self._parameters, "D1": self.D}
        return Overcomplete.forward(untied, x)


def test_tied_parameters_stay_tied_in_the_probe():
    assert patch(TiedByName()).replaced == {"": "ista_overcomplete"}


def test_layers_of_one_signature_share_a_probe(monkeypatch):
    probed, probe = [], _patch_probe.same_function
    monkeypatch.setattr(_patch_probe, "same_function", lambda *args: probed.append(1) or probe(*args))
    tied = Overcomplete()
    tied.D1 = tied.D
    model = nn.Sequential(Attention(), FeedForward(), FeedForward(lambd=0.5), Attention(), FeedForward(), tied)
    assert len(patch(nn.Sequential(model, Overcomplete(), Overcomplete())).replaced) == 8
    assert len(probed) == 5


def test_unrelated_modules_are_not_listed():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.MultiheadAttention(4, 2), nn.Conv2d(1, 1, 1))
    report = patch(model)
    assert (report.replaced, report.left, str(report)) == ({}, {}, "nothing to replace")


def test_probe_leaves_no_trace():
    calls = []

    class Counting(Attention):
        def __init__(self):
            super().__init__(dropout=0.5)
            self.register_buffer("seen", torch.zeros(1))
            self.log, self.count = [], 0

        def forward(self, x, return_attention=False):
            self.count += 1
            self.log.append(x.shape)
            self.seen += 1
            torch.rand(3)
            return super().forward(x, return_attention)

    def hook(*_):
        calls.append(1)

    model: Any = nn.Sequential(Counting(), FeedForward())
    model[0].qkv.eval()
    model[0].to_out[0].weight.requires_grad_(False)
    model[1].weight.grad = torch.ones(DIM, DIM)
    for module in model.modules():
        module.register_forward_hook(hook)
        module.register_forward_pre_hook(hook)
        module.register_full_backward_hook(hook)
    handle = nn.modules.module.register_module_forward_hook(hook)
    attributes = [set(vars(m)) for m in model.modules()]
    modes = [m.training for m in model.modules()]
    flags = [p.requires_grad for p in model.parameters()]
    values = [p.clone() for p in model.parameters()]
    random = torch.get_rng_state()
    try:
        assert patch(model).replaced == {"0": "mssa", "1": "ista"}
    finally:
        handle.remove()
    assert torch.equal(torch.get_rng_state(), random)
    assert calls == []
    assert (model[0].count, model[0].log, model[0].seen.item()) == (0, [], 0)
    assert [set(vars(m)) for m in model.modules()] == attributes
    assert [m.training for m in model.modules()] == modes
    assert [p.requires_grad for p in model.parameters()] == flags
    assert all(torch.equal(p, v) for p, v in zip(model.parameters(), values, strict=True))
    assert [p.grad is None for p in model.parameters()] == [True, True, True, False]
    assert torch.equal(model[1].weight.grad, torch.ones(DIM, DIM))


def test_probe_ignores_autocast_grad_mode_and_default_device():
    model = system("crate")
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode(), torch.device("meta"):
        assert len(patch(model).replaced) == 4
