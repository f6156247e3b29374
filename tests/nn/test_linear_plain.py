"""Linear layers where a mode, a tensor subclass or a hook looks: nn.Linear itself."""

import copy

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from crate_kernels._core import products
from crate_kernels.nn import _linear
from tests.nn.linear import IN, needs_onednn, pair

pytestmark = needs_onednn


def test_small_layers_are_plain(monkeypatch):
    monkeypatch.setattr(products, "_library", None)
    ours, plain = pair()
    x = torch.randn(5, IN)
    assert torch.equal(ours(x), plain(x))


def dual(layer, x):
    with torch.autograd.forward_ad.dual_level():
        out = layer(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
        return torch.autograd.forward_ad.unpack_dual(out).tangent


def autocast(layer, x):
    with torch.autocast("cpu", torch.bfloat16):
        return layer(x)


def switched_off(layer, x):
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        return layer(x)
    finally:
        torch._C._set_mkldnn_enabled(before)


CALLS = {
    "vmapped": lambda layer, x: torch.func.vmap(layer)(x),
    "forward-ad": lambda layer, x: torch.func.jvp(layer, (x,), (torch.ones_like(x),))[1],
    "dual": dual,
    "autocast": autocast,
    "switched-off": switched_off,
    "float64": lambda layer, x: copy.deepcopy(layer).double()(x.double()),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_linear_is_plain_where_a_mode_wants_to_see_it(taken, call):
    ours, plain = pair()
    x = torch.randn(2, 5, IN, generator=torch.Generator().manual_seed(1))
    assert torch.equal(call(ours, x), call(plain, x))
    assert not taken


@pytest.mark.parametrize("backend", ["composite", "reference", "triton"])
def test_other_backends_are_plain(taken, backend):
    ours, plain = pair(backend=backend)
    x = torch.randn(5, IN)
    assert torch.equal(ours(x), plain(x))
    assert not taken


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("part", ["weight", "input"])
def test_a_tensor_subclass_comes_to_nn_linear(taken, part, compiled):
    """A DTensor and a quantised weight know nn.Linear's operator, and not ours."""
    ours, plain = pair()
    x = torch.randn(5, IN, generator=torch.Generator().manual_seed(1))
    if part == "weight":
        ours.linear.weight = nn.Parameter(TwoTensor(ours.linear.weight.detach(), ours.linear.weight.detach().clone()))
        argument = x
    else:
        argument = TwoTensor(x, x.clone())
    call = torch.compile(ours, backend="aot_eager", fullgraph=True) if compiled else ours
    torch.testing.assert_close(call(argument).a, plain(x))
    assert not taken


def hooked(linear):
    linear.register_forward_hook(lambda module, args, out: out + 1)


def accelerated(linear):
    original = linear.forward
    linear.forward = lambda x: original(x) + 1


def parametrized(linear):
    nn.utils.parametrize.register_parametrization(linear, "bias", PlusOne())


def pruned(linear):
    linear.register_forward_pre_hook(lambda module, args: setattr(module.bias, "data", module.bias.data + 1))


class PlusOne(nn.Module):
    def forward(self, bias):
        return bias + 1


WATCHED = {"hook": hooked, "forward": accelerated, "parametrized": parametrized, "pre-hook": pruned}


@pytest.mark.parametrize("watch", WATCHED.values(), ids=WATCHED)
@pytest.mark.parametrize("inside", [False, True], ids=["alone", "sequence"])
def test_what_watches_or_changes_a_layer_runs(taken, watch, inside):
    ours, plain = pair()
    x = torch.randn(5, IN)
    expected = plain(x) + 1
    watch(ours.linear)
    found = _linear.sequence(nn.Sequential(ours.linear, nn.Identity()), x, None) if inside else ours(x)
    torch.testing.assert_close(found, expected)
    assert not taken


@pytest.mark.parametrize("kind", ["full_backward", "full_backward_pre"])
def test_backward_hooks_run(taken, kind):
    ours, _ = pair()
    seen = []
    getattr(ours.linear, f"register_{kind}_hook")(lambda *_: seen.append(kind))
    ours(torch.randn(5, IN, requires_grad=True)).sum().backward()
    assert seen == [kind]
    assert not taken


def test_global_hooks_run(taken):
    ours, _ = pair()
    seen = []
    with nn.modules.module.register_module_forward_hook(lambda module, args, out: seen.append(type(module))):
        ours(torch.randn(5, IN))
    assert nn.Linear in seen
    assert not taken


def test_a_sequence_is_its_layers_unless_it_is_watched(taken):
    ours, plain = pair()
    x = torch.randn(5, IN)
    layers = nn.Sequential(ours.linear, nn.ReLU())
    torch.testing.assert_close(_linear.sequence(layers, x, None), plain(x).relu())
    assert len(taken) == 1
    layers.register_forward_hook(lambda module, args, out: out + 1)
    torch.testing.assert_close(_linear.sequence(layers, x, None), plain(x).relu() + 1)
    torch.testing.assert_close(_linear.sequence(nn.Identity(), x, None), x)
    assert len(taken) == 1
