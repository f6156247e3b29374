"""``patch`` on modules whose parameters are computed, shared out over processes, or of another class."""

# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false

import copy
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune

from crate_kernels._patch.api import patch, unpatch
from tests.patch.published import (
    Attention,
    CausalAttention,
    FeedForward,
    VisionTSSA,
    assert_close,
    outcome,
    system,
    tokens,
)


class LowRank(nn.Module):
    """A linear layer that is not nn.Linear: a frozen weight and a learned product beside it."""

    def __init__(self, base, rank=2):
        super().__init__()
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight = nn.Parameter(base.weight.detach(), requires_grad=False)
        self.down = nn.Parameter(torch.randn(rank, self.in_features) * 0.1)
        self.up = nn.Parameter(torch.randn(self.out_features, rank) * 0.1)

    def forward(self, x):
        return x @ (self.weight + self.up @ self.down).t()


def old_weight_norm(module, name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PyTorch would have us use parametrizations
        nn.utils.weight_norm(module, name)


def adapt(module, name):
    setattr(module, name, LowRank(getattr(module, name)))


COMPUTED = {
    "weight-norm": (parametrizations.weight_norm, "weight"),
    "spectral-norm": (parametrizations.spectral_norm, "weight"),
    "orthogonal": (parametrizations.orthogonal, "weight"),
    "old-weight-norm": (old_weight_norm, "weight"),
    "pruned": (lambda module, name: prune.l1_unstructured(module, name, amount=0.3), "weight"),
    "pruned-away": (lambda module, name: prune.l1_unstructured(module, name, amount=1.0), "weight"),
}
PLACES = {
    "projection": (lambda: Attention(), lambda model: model.qkv, "mssa"),
    "output": (lambda: VisionTSSA(), lambda model: model.to_out[0], "tssa"),
    "ista": (lambda: FeedForward(), lambda model: model, "ista"),
}


@pytest.mark.parametrize(("make", "place", "kind"), PLACES.values(), ids=PLACES)
@pytest.mark.parametrize(("change", "name"), COMPUTED.values(), ids=COMPUTED)
def test_computed_parameters(change, name, make, place, kind):
    model, twin = nn.Sequential(make()), nn.Sequential(make())  # deepcopy refuses computed tensors
    twin.load_state_dict(model.state_dict())
    for each in (model, twin):
        torch.manual_seed(0)
        change(place(each[0]), name)
    report = patch(model)
    if change is parametrizations.spectral_norm and kind == "ista":  # each read of the weight changes it a little
        assert "changes attributes" in report.left["0"]
        return
    assert (report.replaced, report.left) == ({"0": kind}, {})
    for _ in range(2):  # spectral normalisation must change its state at each call as before
        assert_close(outcome(model, tokens()), outcome(twin, tokens()), 512)
    torch.testing.assert_close(dict(model.state_dict()), dict(twin.state_dict()))
    assert unpatch(model) == ("0",)
    assert_close(outcome(model, tokens()), outcome(twin, tokens()), 512)


@pytest.mark.parametrize("make", [Attention, lambda: CausalAttention(flash=True)], ids=["qkv", "c_attn"])
def test_a_projection_of_another_class(make):
    model = make()
    adapt(model, "qkv" if hasattr(model, "qkv") else "c_attn")
    trained = [p for p in model.parameters() if p.requires_grad]
    before = model(tokens())
    expected = torch.autograd.grad(before.sum(), trained)
    assert len(patch(model).replaced) == 1
    after = model(tokens())
    assert_close([after, *torch.autograd.grad(after.sum(), trained)], [before, *expected], 64)


def test_what_computes_the_weight_can_be_wrong_too():
    """The parameter beside a pruned weight is not the weight."""

    class Unmasked(FeedForward):
        def forward(self, x):
            weight = self.get_parameter("weight_orig")
            return F.relu(x + self.step_size * ((x - x @ weight.t()) @ weight - self.lambd))

    model = FeedForward()
    prune.l1_unstructured(model, "weight", amount=0.3)
    model.__class__ = Unmasked
    report = patch(model)
    assert report.replaced == {}
    assert "something else: output differs by" in report.left[""]


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", ["crate-dropout", "lm-overcomplete", "tost"])
def test_training_mode_is_read_at_each_call(name, training):
    """Dropout at rates above 0 changes a call in training, and none in evaluation."""
    model = system(name).train(not training)
    patch(model)
    model.train(training)
    torch.manual_seed(1)
    first, second = model(tokens()), model(tokens())
    assert torch.equal(first, second) != training


@pytest.mark.parametrize("name", ["lm", "lm-overcomplete", "clipa"])
def test_copies(name):
    model = system(name).eval()
    patch(model, backend="reference")
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(tokens()), model(tokens()))
        assert [type(m) for m in other.modules()] == [type(m) for m in model.modules()]
        other.load_state_dict(model.state_dict())
