"""How the probes of ``patch`` tell modules apart, and that finding out leaves no trace."""

# pyright: reportIncompatibleMethodOverride=false, reportAttributeAccessIssue=false

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

from crate_kernels._patch import probe as _patch_probe
from crate_kernels._patch.api import patch
from tests.patch.published import DIM, Attention, CausalAttention, FeedForward, Overcomplete, system


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
    with torch.device("meta"):  # meta tensors have no numbers to compare
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
    probed, probe = [], _patch_probe.find
    monkeypatch.setattr(_patch_probe, "find", lambda *args: probed.append(1) or probe(*args))
    tied = Overcomplete()
    tied.D1 = tied.D
    model = nn.Sequential(Attention(), FeedForward(), FeedForward(lambd=0.5), Attention(), FeedForward(), tied)
    causal = CausalAttention(), CausalAttention(), CausalAttention(block_size=8)  # masks in buffers
    assert len(patch(nn.Sequential(model, Overcomplete(), Overcomplete(), *causal)).replaced) == 11
    assert len(probed) == 7


def test_unrelated_modules_are_not_listed():
    plain = nn.Linear(4, 4), nn.LayerNorm(4), nn.Conv2d(1, 1, 1), nn.Softshrink(0.1), nn.GRU(4, 4)
    model = nn.Sequential(*plain)
    report = patch(model)
    assert (report.replaced, report.left, str(report)) == ({}, {}, "nothing to replace")


def test_probe_leaves_no_trace():
    calls = []

    class Counting(Attention):
        def __init__(self, counting):
            super().__init__(dropout=0.5)
            self.register_buffer("seen", torch.zeros(1))
            self.log, self.count, self.counting = [], 0, counting

        def forward(self, x, return_attention=False):
            if self.counting:
                self.count += 1
                self.log.append(x.shape)
                self.seen += 1
            torch.rand(3)
            return super().forward(x, return_attention)

    def hook(*_):
        calls.append(1)

    model: Any = nn.Sequential(Counting(False), FeedForward(), Counting(True))
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
        assert "changes attributes" in patch(model).left["2"]
    finally:
        handle.remove()
    assert torch.equal(torch.get_rng_state(), random)
    assert calls == []
    assert all((m.count, m.log, m.seen.item()) == (0, [], 0) for m in (model[0], model[2]))
    assert [set(vars(m)) for m in model.modules()] == attributes
    assert [m.training for m in model.modules()] == modes
    assert [p.requires_grad for p in model.parameters()] == flags
    assert all(torch.equal(p, v) for p, v in zip(model.parameters(), values, strict=True))
    assert [p.grad is None for p in model.parameters()] == [True, True, True, False, True, True, True]
    assert torch.equal(model[1].weight.grad, torch.ones(DIM, DIM))


def test_probe_ignores_autocast_grad_mode_and_default_device():
    model = system("crate")
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode(), torch.device("meta"):
        assert len(patch(model).replaced) == 4


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, weight):
        self.calls += 1
        return weight


def test_probes_leave_the_buffers_of_a_parametrization():
    module, counts = Attention(), Counts()
    parametrize.register_parametrization(module.qkv, "weight", counts, unsafe=True)
    assert list(patch(module).replaced) == [""]
    assert counts.calls == 0
