"""What a call of a patched module runs: the operator, the children around it, or the published forward."""

# pyright: reportAttributeAccessIssue=false, reportIncompatibleMethodOverride=false

import pytest
import torch
from torch import nn

from crate_kernels._patch import forms
from crate_kernels._patch.api import patch
from tests.patch.published import (
    DIM,
    HEADS,
    Attention,
    CausalAttention,
    CausalTSSA,
    FeedForward,
    Overcomplete,
    PrintedISTA,
    TiedOvercomplete,
    VisionTSSA,
    system,
    tokens,
)


def test_hooks_keep_firing():
    model = system("crate").eval()
    x, seen = tokens(), {}
    expected = model[0].attn.qkv(model[0].norm(x))
    model[0].attn.qkv.register_forward_hook(lambda m, args, out: seen.__setitem__("qkv", out))
    model[0].attn.register_forward_hook(lambda m, args, out: seen.__setitem__("attn", out))
    model[0].code.register_forward_hook(lambda m, args, out: out * 2)
    before = model(x)
    seen.clear()
    patch(model)
    assert torch.allclose(model(x), before, atol=1e-5)
    assert torch.equal(seen["qkv"], expected)
    assert seen["attn"].shape == x.shape


REST = {
    "mssa": (Attention, ["qkv", "to_out"]),
    "tssa": (VisionTSSA, ["qkv", "to_out"]),
    "causal-tssa": (CausalTSSA, ["c_attn", "c_proj", "resid_dropout"]),
    "causal-mssa": (lambda: CausalAttention(flash=True), ["c_attn", "y_hook", "c_proj", "resid_dropout"]),
}


@pytest.mark.parametrize(("make", "children"), REST.values(), ids=REST)
def test_what_the_operator_does_not_replace_still_runs(make, children):
    model, seen = make(), []
    patch(model)
    for child in children:
        getattr(model, child).register_forward_hook(lambda m, args, out, child=child: seen.append(child))
    model(tokens())
    assert seen == children


@pytest.mark.parametrize("child", ["attend", "dropout"])
def test_a_hook_on_a_bypassed_child_brings_the_published_forward(child):
    model = Attention(dropout=0.5).eval()
    patch(model)
    seen = []
    handle = getattr(model, child).register_forward_hook(lambda m, args, out: seen.append(out))
    model(tokens())
    assert seen[0].shape == (2, HEADS, 5, 5)
    handle.remove()
    model(tokens())
    assert len(seen) == 1


HOOKS = ["forward", "forward_pre", "full_backward", "full_backward_pre"]


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("child", ["attend", "dropout"])
def test_every_kind_of_hook_on_a_bypassed_child_fires(child, kind):
    model, seen = Attention(dropout=0.5).eval(), []
    patch(model)
    handle = getattr(getattr(model, child), f"register_{kind}_hook")(lambda *_: seen.append(child))
    for _ in range(2):
        model(tokens().requires_grad_()).sum().backward()
        assert seen == [child]
        handle.remove()


@pytest.mark.parametrize("make", [PrintedISTA, TiedOvercomplete], ids=["ista", "overcomplete"])
def test_a_hook_on_the_code_sees_it(make):
    model, codes = make(), []
    expected = model(tokens())
    patch(model)
    model.relu.register_forward_hook(lambda m, args, out: codes.append(out))
    assert torch.equal(model(tokens()), expected)
    assert codes[0].shape == (2, 5, model.weight.shape[0])


def test_an_enhanced_feature_is_the_published_forwards():
    model, x = CausalAttention(), tokens()
    expected = model(x, [3, 2.0])
    patch(model)
    assert torch.equal(model(x, [3, 2.0]), expected)
    assert not torch.allclose(model(x), expected)


def test_a_rate_of_one_is_the_published_forwards():
    model = Attention(dropout=1.0)
    patch(model)
    assert torch.equal(model(tokens()), torch.zeros(2, 5, DIM))


def test_more_than_the_output_comes_from_the_published_forward():
    model, x = Attention().eval(), tokens()
    weights, key = model(x, return_attention=True), model(x, return_key=True)
    patch(model)
    assert torch.equal(model(x, return_attention=True), weights)
    assert torch.equal(model(x, False, True), key)
    with pytest.raises(TypeError, match="unexpected keyword argument 'mask'"):
        model(x, mask=True)


class Asked(Attention):
    """Answers with what it was asked, beside the default call."""

    def forward(self, x, project=True, names=None, rate=0, *, tag="out"):
        out = super().forward(x) if project else self.qkv(x)
        plain = names is None and type(rate) is int and tag == "out"
        return out if plain else 2.0 * out


ASKED = {
    "false-for-true": ((False,), {}, True),
    "none-for-true": ((None,), {}, True),
    "false-by-name": ((), {"project": False}, True),
    "false-for-none": ((True, False), {}, True),
    "false-for-zero": ((), {"rate": False}, True),
    "none-for-zero": ((True, None, None), {}, True),
    "none-for-text": ((), {"tag": None}, True),
    "tensor": ((), {"names": torch.ones(1)}, True),
    "defaults": ((True, None), {"rate": 0, "tag": "out"}, False),
    "nothing": ((), {}, False),
}


@pytest.mark.parametrize(("args", "kwargs", "published"), ASKED.values(), ids=ASKED)
def test_an_argument_that_is_not_its_default_runs_the_published_forward(args, kwargs, published, monkeypatch):
    calls, model, x = [], Asked().eval(), tokens()
    expected = model(x, *args, **kwargs)
    assert patch(model).replaced == {"": "mssa"}
    fused = forms.mssa
    monkeypatch.setattr(forms, "mssa", lambda w, **options: calls.append(1) or fused(w, **options))
    torch.testing.assert_close(model(x, *args, **kwargs), expected)
    if not args:
        torch.testing.assert_close(model(x=x, **kwargs), expected)
    assert bool(calls) != published


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {}, "missing 1 required positional argument: 'x'"),
        ((None,), {}, "NoneType"),
        ((1, 2, 3, 4, 5, 6, 7), {}, "takes from"),
        ((torch.ones(1, 1, DIM),), {"x": torch.ones(1, 1, DIM)}, "multiple values"),
    ],
    ids=["none", "no-tensor", "too-many", "twice"],
)
def test_a_call_that_the_published_forward_refuses_is_refused_by_it(args, kwargs, message):
    model = Attention()
    patch(model)
    with pytest.raises((TypeError, AttributeError), match=message):
        model(*args, **kwargs)


class Annealed(Attention):
    """Divides its scores by an attribute that has no effect when the module is patched."""

    def __init__(self):
        super().__init__()
        self.tau, self.sign, self.name = 1.0, True, None

    def forward(self, x):
        out = super().forward(x / self.tau)
        return (out if self.sign is True else -out) + (0.0 if self.name is None else 1.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [("tau", 0.5), ("sign", False), ("sign", 1), ("name", "one")],
    ids=["tau", "sign", "type", "name"],
)
def test_an_attribute_that_changed_brings_the_published_forward(name, value):
    model, x = Annealed(), tokens()
    assert patch(model).replaced == {"": "mssa"}
    before, fused = getattr(model, name), model(x)
    setattr(model, name, value)
    assert torch.equal(model(x), Annealed.forward(model, x))
    setattr(model, name, before)
    assert torch.equal(model(x), fused)


def test_a_number_that_became_a_tensor_brings_the_published_forward():
    model, x = Attention(), tokens()
    patch(model)
    model.scale = torch.tensor(0.25)
    assert torch.equal(model(x), Attention.forward(model, x))


class AnyRank(Attention):
    def forward(self, x):
        return super().forward(x) if x.dim() == 3 else super().forward(x[None])[0]


def test_tokens_of_another_rank_come_to_the_published_forward():
    model, x = AnyRank().eval(), tokens()
    patch(model)
    torch.testing.assert_close(model(x[0]), model(x)[0])


def test_nested_tokens_come_to_the_published_forward():
    model, parts = FeedForward(), [torch.randn(3, DIM), torch.randn(5, DIM)]
    patch(model)
    out = model(torch.nested.nested_tensor(parts, layout=torch.jagged))
    for actual, x in zip(out.unbind(), parts, strict=True):
        torch.testing.assert_close(actual, model(x))


def test_calls_reach_the_operator(monkeypatch):
    calls = []

    def spy(w, **options):
        calls.append(options)
        return w

    model = Attention(dropout=0.25)
    patch(model, backend="reference")
    monkeypatch.setattr(forms, "mssa", spy)
    x = tokens()
    model(x)
    model(x=x)
    model(x, return_attention=False)
    model(x, False, return_key=False)
    model.scale = 2.0
    model.dropout.eval()
    model(x)
    same = {"causal": False, "scale": 0.5, "dropout_p": 0.25, "phi": "softmax", "backend": "reference"}
    assert calls == [same] * 4 + [{**same, "scale": 2.0, "dropout_p": 0.0}]
    model.attend = nn.Sigmoid()
    model(x)
    assert len(calls) == 5


@pytest.mark.parametrize("make", [FeedForward, Overcomplete], ids=["ista", "overcomplete"])
def test_a_half_module_under_autocast_takes_float32_tokens(make):
    """CUDA's autocast runs norms in float32, so that a half model hands these on."""
    model, x = make().bfloat16(), tokens(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x)
        assert patch(model).replaced
        torch.testing.assert_close(model(x).float(), expected.float(), rtol=2**-6, atol=2**-6)
