"""Layers that stand in the place of a linear one, and apply another matrix than their ``weight``."""

import warnings

import torch
import torch.ao.nn.quantized.dynamic as dynamic
from torch import nn
from torch.ao import quantization


class LowRank(nn.Module):
    """``base_layer(x) + B A x``, with the names that PEFT's have: ``weight`` is that of the base layer."""

    def __init__(self, base_layer, rank=2, bias=False):
        super().__init__()
        self.base_layer = base_layer
        self.in_features, self.out_features = base_layer.in_features, base_layer.out_features
        kind = {"dtype": base_layer.weight.dtype}
        generator = torch.Generator().manual_seed(7)
        self.A = nn.Parameter(0.3 * torch.randn(rank, self.in_features, generator=generator, **kind))
        self.B = nn.Parameter(0.3 * torch.randn(self.out_features, rank, generator=generator, **kind))
        self.shift = nn.Parameter(torch.ones(self.out_features, **kind)) if bias else None

    @property
    def weight(self):
        return self.base_layer.weight

    def forward(self, x):
        out = self.base_layer(x) + x @ self.A.T @ self.B.T
        return out if self.shift is None else out + self.shift

    def merged(self):
        """A linear layer that applies the same matrix."""
        layer = nn.Linear(self.in_features, self.out_features, self.base_layer.bias is not None).to(self.weight.dtype)
        layer.weight = nn.Parameter((self.weight + self.B @ self.A).detach())
        layer.bias = self.base_layer.bias
        return layer


def replaced(model, kinds, function):
    """Put ``function`` of every module of some kinds in its place, but of a head that is the embedding too."""
    for name, module in list(model.named_modules()):
        if isinstance(module, kinds) and name and name != "lm_head":
            model.set_submodule(name, function(module))
    return model


def _quantised(linear):
    plain = nn.Linear(linear.in_features, linear.out_features, linear.bias is not None)
    plain.weight, plain.bias = linear.weight, linear.bias
    plain.qconfig = quantization.default_dynamic_qconfig
    return dynamic.Linear.from_float(plain)


def quantised(model):
    """Quantise the linear layers of a model as ``quantize_dynamic`` does where they are ``nn.Linear`` itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao is deprecated
        return replaced(model, nn.Linear, _quantised)
