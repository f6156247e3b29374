"""Models whose layers or weights something else replaced first: patched where a probe can run, else left with why."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.ao import quantization

from crate_kernels import patch
from tests.patch.published import DIM, Attention, FeedForward, VisionTSSA

QUANTISED = "its qkv is quantised, which no probe can draw weights for: patch the model first, then quantise it"
HOOKED = (
    "accelerate runs it through a hook, which moves its weights: patch the model first, then dispatch or offload it"
)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.attention, self.code, self.statistics = Attention(), FeedForward(), VisionTSSA()

    def forward(self, x):
        return self.statistics(self.code(self.attention(x) + x))


@pytest.fixture
def x():
    return torch.randn(2, 7, DIM, generator=torch.Generator().manual_seed(1))


def quantised(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao is deprecated
        return quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


def test_a_quantised_model_is_left_with_the_reason():
    report = patch(quantised(Net()))
    assert report.left == {"attention": QUANTISED, "statistics": QUANTISED}
    assert report.replaced == {"code": "ista"}  # whose dictionary is in no linear layer


def test_a_patched_model_can_be_quantised(x):
    published, model = Net().eval(), Net().eval()
    assert len(patch(model).replaced) == 3
    torch.testing.assert_close(quantised(model)(x), quantised(published)(x))


class Integers(nn.Module):
    """A linear layer of 8-bit weights that computes in any dtype."""

    def __init__(self, linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_buffer("weight", (127 * linear.weight.detach()).round().char())

    def forward(self, x):
        return x @ (self.weight.to(x.dtype) / 127).t()


def test_quantised_layers_that_a_probe_can_run_are_no_reason(x):
    model = Net().eval()
    for module in (model.attention, model.statistics):
        module.qkv = Integers(module.qkv)
    published = copy.deepcopy(model)
    assert len(patch(model).replaced) == 3
    torch.testing.assert_close(model(x), published(x))


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_an_offloaded_model_is_left_with_the_reason(where, x, tmp_path):
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate: the extra hf")
    wanted, device = Net().eval()(x), torch.device("cpu")

    def offloaded(model):
        if where == "cpu":
            return accelerate.cpu_offload(model, execution_device=device)
        return accelerate.disk_offload(model, tmp_path, execution_device=device)

    model = offloaded(Net().eval())
    report = patch(model)
    assert report.replaced == {}
    assert report.left == dict.fromkeys(("attention", "code", "statistics"), HOOKED)
    assert torch.equal(model(x), wanted)
    first = Net().eval()
    assert len(patch(first).replaced) == 3
    torch.testing.assert_close(offloaded(first)(x), wanted)
