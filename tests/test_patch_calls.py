"""What a call of a patched module runs: the operator, the children around it, or the published forward."""

# pyright: reportAttributeAccessIssue=false

import pytest
import torch
from torch import nn

from crate_kernels import _patch_kinds
from crate_kernels._patch import patch
from tests.published import HEADS, Attention, CausalTSSA, VisionTSSA, system, tokens


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


def test_more_than_the_output_comes_from_the_published_forward():
    model, x = Attention().eval(), tokens()
    weights, key = model(x, return_attention=True), model(x, return_key=True)
    patch(model)
    assert torch.equal(model(x, return_attention=True), weights)
    assert torch.equal(model(x, False, True), key)
    with pytest.raises(TypeError, match="unexpected keyword argument 'mask'"):
        model(x, mask=True)


class AnyRank(Attention):
    def forward(self, x):
        return super().forward(x) if x.dim() == 3 else super().forward(x[None])[0]


def test_tokens_of_another_rank_come_to_the_published_forward():
    model, x = AnyRank().eval(), tokens()
    patch(model)
    torch.testing.assert_close(model(x[0]), model(x)[0])


def test_calls_reach_the_operator(monkeypatch):
    calls = []

    def spy(w, **options):
        calls.append(options)
        return w

    model = Attention(dropout=0.25)
    patch(model, backend="reference")
    monkeypatch.setattr(_patch_kinds, "mssa", spy)
    x = tokens()
    model(x)
    model(x=x)
    model(x, return_attention=False)
    model(x, None)
    model.scale = 2.0
    model.dropout.eval()
    model(x)
    same = {"scale": 0.5, "dropout_p": 0.25, "phi": "softmax", "backend": "reference"}
    assert calls == [same] * 4 + [{**same, "scale": 2.0, "dropout_p": 0.0}]
    model.attend = nn.Sigmoid()
    model(x)
    assert len(calls) == 5
