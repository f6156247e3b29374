"""``patch`` on ISTA whose step size or threshold is learned."""

# pyright: reportAttributeAccessIssue=false

import copy

import pytest
import torch
from torch import nn

from crate_kernels._core import backends
from crate_kernels._patch.api import patch
from tests.patch.published import DIM, FeedForward, Overcomplete, assert_close, outcome, tokens


def learn(module, name, shape, buffer=False):
    """Make a number of a module a parameter or a buffer of some shape."""
    value = getattr(module, name) + 0.05 * torch.randn(shape, generator=torch.Generator().manual_seed(3))
    delattr(module, name)
    module.register_buffer(name, value) if buffer else module.register_parameter(name, nn.Parameter(value))
    return module


LEARNED = {
    "step": lambda: learn(FeedForward(), "step_size", ()),
    "step-per-channel": lambda: learn(FeedForward(), "step_size", (DIM,)),
    "threshold": lambda: learn(FeedForward(), "lambd", (1,)),
    "both": lambda: learn(learn(FeedForward(), "lambd", (DIM,)), "step_size", (DIM,)),
    "buffer": lambda: learn(FeedForward(), "lambd", (DIM,), buffer=True),
    "overcomplete": lambda: learn(learn(Overcomplete(), "lmbda", ()), "eta", ()),
}


@pytest.mark.parametrize("make", LEARNED.values(), ids=LEARNED)
def test_learned_terms_stay_parameters_of_the_module(make):
    torch.manual_seed(0)
    model = make()
    published = copy.deepcopy(model)
    report = patch(model)
    assert (list(report.replaced), report.left) == ([""], {})
    assert_close(outcome(model, tokens()), outcome(published, tokens()), 256)
    with torch.no_grad():
        for each in (model, published):
            for tensor in (*each.parameters(), *each.buffers()):
                tensor.mul_(1.5)
    assert_close(outcome(model, tokens()), outcome(published, tokens()), 256)


@pytest.mark.parametrize("backend", ["composite", "reference"])
def test_backends_that_compose_the_step(backend):
    assert patch(learn(FeedForward(), "lambd", (DIM,)), backend=backend).replaced == {"": "ista"}


def test_a_kernel_is_refused_with_the_reason():
    if backends.unavailable_reason("ista", "cpp", torch.device("cpu")):
        pytest.skip("needs the C++ extension: python -m crate_kernels build")
    report = patch(learn(FeedForward(), "lambd", (DIM,)), backend="cpp")
    assert report.replaced == {}
    assert "backend='cpp' takes numbers for step_size and lambd, and no bias" in report.left[""]
