"""``layerwise`` on a re-statement of the published model: what it measures, and what it leaves as it was."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from crate_kernels import analysis


class PreNorm(nn.Module):
    def __init__(self, dim, fn):
        super().__init__()
        self.norm, self.fn = nn.LayerNorm(dim), fn

    def forward(self, x):
        return self.fn(self.norm(x))


class Attention(nn.Module):
    def __init__(self, dim, heads, dim_head):
        super().__init__()
        self.heads, self.scale = heads, dim_head**-0.5
        self.qkv = nn.Linear(dim, heads * dim_head, bias=False)
        self.to_out = nn.Sequential(nn.Linear(heads * dim_head, dim), nn.Dropout(0.5))

    def forward(self, x):
        w = self.qkv(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        out = (w @ w.mT * self.scale).softmax(-1) @ w
        return self.to_out(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim, dim))
        nn.init.kaiming_uniform_(self.weight)

    def forward(self, x):
        return F.relu(x + 0.1 * (x - x @ self.weight.T) @ self.weight - 0.01)


class Transformer(nn.Module):
    def __init__(self, dim, depth, heads, dim_head):
        super().__init__()
        pairs = [(Attention(dim, heads, dim_head), FeedForward(dim)) for _ in range(depth)]
        self.layers: Any = nn.ModuleList(nn.ModuleList(PreNorm(dim, fn) for fn in pair) for pair in pairs)

    def forward(self, x):
        for attention, ista in self.layers:
            x = ista(attention(x) + x)
        return x


class Crate(nn.Module):
    def __init__(self, head=None):
        super().__init__()
        self.transformer: Any = Transformer(8, 3, 2, 4)
        self.head = head or nn.Identity()

    def forward(self, x):
        return self.head(self.transformer(x))


class Failing(nn.Module):
    def forward(self, x):
        raise OverflowError("in the head")


def randn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=["fp64", "fp16", "bf16"])
def test_layerwise_measures_input_half_step_and_sparsity(dtype):
    torch.manual_seed(0)
    model, x = Crate().to(dtype), randn(4, 9, 8).to(dtype)
    measured = analysis.layerwise(model, x)
    model.eval()

    def rate(tokens):
        w = model.transformer.layers[i][0].fn.qkv(tokens).unflatten(-1, (2, 4)).transpose(1, 2)
        return analysis.projected_coding_rate(F.normalize(w.double(), dim=-1))

    assert len(measured) == 3
    for i, (attention, ista) in enumerate(model.transformer.layers):
        half = attention(x) + x
        torch.testing.assert_close(measured[i].rate_input, rate(attention.norm(x)))
        torch.testing.assert_close(measured[i].rate_half, rate(ista.norm(half)))
        x = ista(half)
        torch.testing.assert_close(measured[i].sparsity, (x > 0).double().mean((1, 2)))
        assert not measured[i].rate_half.requires_grad


def test_layerwise_takes_a_measure_and_layers():
    model, x = Crate(), randn(2, 5, 8).float()
    last = list(model.transformer.layers)[-1:]
    (measured,) = analysis.layerwise(model, x, measure=lambda w: w.new_tensor(w.shape), layers=last)
    assert measured.rate_input.tolist() == measured.rate_half.tolist() == [2, 2, 5, 4]


@pytest.mark.parametrize("head", [nn.Identity(), Failing()], ids=["returns", "raises"])
def test_layerwise_leaves_the_model_as_it_was(head):
    model, calls = Crate(head), []
    model.transformer.layers[1].eval()
    model.transformer.layers[0][0].fn.qkv.register_forward_hook(lambda *_: calls.append(1))
    modes, hooks = [m.training for m in model.modules()], _hooks(model)
    raises = pytest.raises(OverflowError, match="in the head")
    with raises if isinstance(head, Failing) else nullcontext():
        analysis.layerwise(model, torch.ones(1, 4, 8))
    assert ([m.training for m in model.modules()], _hooks(model), calls) == (modes, hooks, [1])


def test_layerwise_says_which_layer_did_not_run():
    model = Crate()
    idle = Crate().transformer.layers[0]
    with pytest.raises(RuntimeError, match="layerwise: layer 1 did not call"):
        analysis.layerwise(model, torch.ones(1, 4, 8), layers=[model.transformer.layers[0], idle])


Z = torch.ones(5, 4)
ERRORS = {
    "not-a-model": ((7, Z), {}, "model must be a Module, got int"),
    "no-layers": ((nn.Linear(4, 4), Z), {}, "Linear must have transformer.layers"),
    "not-a-pair": ((Crate(), Z), {"layers": [Failing()]}, "layer 0 must be"),
}


@pytest.mark.parametrize(("args", "kwargs", "message"), ERRORS.values(), ids=ERRORS)
def test_errors(args, kwargs, message):
    with pytest.raises(TypeError, match=f"^layerwise: {message}"):
        analysis.layerwise(*args, **kwargs)
