"""Graphs of torch.export and torch.jit.trace have the ops alone: their calls have the gradients of eager ones."""

import io

import pytest
import torch
from torch import nn

from crate_kernels import ista, ista_overcomplete, mssa, tssa

torch.manual_seed(0)
W, TEMP, BIAS = torch.randn(2, 3, 9, 16), torch.rand(3) + 0.5, torch.rand(3, 9)
X, SQUARE, WIDE = torch.randn(2, 9, 16), torch.randn(16, 16) / 4, torch.randn(16, 32) / 4
OFFSETS = torch.tensor([0, 4, 9], dtype=torch.int32)

CASES = {
    "mssa": (lambda w: mssa(w), (W,)),
    "mssa-causal-lse": (lambda w: sum(t.square().sum() for t in mssa(w, causal=True, return_lse=True)), (W,)),
    "mssa-packed": (lambda w: mssa(w, cu_seqlens=OFFSETS, max_seqlen=5), (W[0].transpose(0, 1).contiguous(),)),
    "mssa-composite": (lambda w: mssa(w, return_lse=True, backend="composite")[0], (W,)),
    "mssa-composite-lse": (lambda w: mssa(w, return_lse=True, backend="composite")[1], (W,)),
    "tssa": (lambda w, temp: tssa(w, temp), (W, TEMP)),
    "tssa-causal": (lambda w, temp, bias: tssa(w, temp, causal=True, denom_bias=bias), (W, TEMP, BIAS)),
    "ista": (lambda x, weight: ista(x, weight, step_size=0.1, lambd=0.1), (X, SQUARE)),
    "ista_overcomplete": (lambda x, weight: ista_overcomplete(x, weight, step_size=0.1, lambd=0.1, steps=2), (X, WIDE)),
    "ista_overcomplete-decoder": (
        lambda x, weight, decoder: ista_overcomplete(x, weight, step_size=0.1, lambd=0.1, decoder=decoder),
        (X, WIDE, WIDE.flip(0).contiguous()),
    ),
}


class Parameters(nn.Module):
    """A call of parameters, whose gradients a graph may lose, times an input."""

    def __init__(self, call, tensors):
        super().__init__()
        self.call, self.tensors = call, nn.ParameterList(t.clone() for t in tensors)

    def forward(self, factor):
        return self.call(*self.tensors) * factor


def exported(model, factor):
    return torch.export.export(model, (factor,)).module()


def traced(model, factor):
    return torch.jit.trace(model, factor)  # with its check: recorded again without a gradient, the graph is the same


def read_again(model, factor):
    file = io.BytesIO()
    torch.jit.save(torch.jit.trace(model, factor), file)
    file.seek(0)
    return torch.jit.load(file)


def gradients(model, factor):
    model.zero_grad()
    out = model(factor)
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(1)))
    assert all(p.grad is not None for p in model.parameters())
    return out, [p.grad.clone() for _, p in sorted(model.named_parameters())]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("record", [exported, traced, read_again])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_eager_calls(name, record, grad):
    model, factor = Parameters(*CASES[name]), torch.full((), 0.5)
    with torch.set_grad_enabled(grad):
        graph = record(model, factor)
    torch.testing.assert_close(gradients(graph, factor), gradients(model, factor))
