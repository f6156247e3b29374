"""``patch`` on modules that flatten feature maps themselves."""

# pyright: reportIncompatibleMethodOverride=false, reportAttributeAccessIssue=false

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from crate_kernels._patch import forms
from crate_kernels._patch.api import patch, unpatch
from tests.patch.published import DIM, HEADS, FeedForward, Overcomplete, VisionTSSA, assert_close, outcome


def feature_map(height=3, width=5):
    return torch.randn(2, DIM, height, width, generator=torch.Generator().manual_seed(1))


class Flattened(VisionTSSA):
    """A published module with the reshaping of a block in it."""

    def forward(self, x):
        b, c, h, w = x.shape
        out = super().forward(x.flatten(2).transpose(1, 2))
        return out.transpose(1, 2).reshape(b, c, h, w)


class Down(nn.Module):
    """Subspace attention that flattens column by column, with dropout."""

    def __init__(self, rate=0.0):
        super().__init__()
        self.num_heads, self.scale = HEADS, 0.5
        self.qkv = nn.Linear(DIM, DIM, bias=False)
        self.attn_drop = nn.Dropout(rate)
        self.proj = nn.Linear(DIM, DIM)

    def forward(self, x):
        b, c, h, w = x.shape
        t = self.qkv(x.permute(0, 3, 2, 1).reshape(b, w * h, c)).view(b, w * h, self.num_heads, -1).transpose(1, 2)
        out = self.attn_drop((self.scale * t @ t.mT).softmax(-1)) @ t
        return self.proj(out.transpose(1, 2).reshape(b, w * h, c)).view(b, w, h, c).permute(0, 3, 2, 1)


class Convolved(nn.Module):
    """Token statistics, projected by convolutions of single pixels."""

    def __init__(self, rate=0.0):
        super().__init__()
        self.heads = HEADS
        self.attend, self.attn_drop = nn.Softmax(dim=1), nn.Dropout(rate)
        self.qkv = nn.Conv2d(DIM, DIM, 1, bias=False)
        self.temp = nn.Parameter(torch.rand(HEADS, 1))
        self.proj = nn.Conv2d(DIM, DIM, kernel_size=1)
        self.proj_drop = nn.Dropout(rate)

    def forward(self, x):
        b, c, h, w = x.shape
        t = self.qkv(x).reshape(b, self.heads, c // self.heads, h * w).transpose(2, 3)
        pi = self.attend(F.normalize(t, dim=-2).square().sum(-1) * self.temp)
        dots = (pi / (pi.sum(-1, keepdim=True) + 1e-8)).unsqueeze(-2) @ t**2
        out = -(t * pi.unsqueeze(-1)) * self.attn_drop(1.0 / (1 + dots))
        return self.proj_drop(self.proj(out.transpose(2, 3).reshape(b, c, h, w)))


class Sparse(FeedForward):
    def forward(self, x):
        return super().forward(x.flatten(2).mT).mT.reshape(x.shape)


class SparseOvercomplete(Overcomplete):
    def forward(self, x):
        return super().forward(x.flatten(2).mT).mT.reshape(x.shape)


TAKEN = {
    "tssa": (Flattened, "tssa"),
    "tssa-dropout": (lambda: Flattened(attn_drop=0.2, proj_drop=0.2), "tssa"),
    "mssa": (Down, "mssa"),
    "mssa-dropout": (lambda: Down(0.2), "mssa"),
    "convolved": (Convolved, "tssa"),
    "convolved-dropout": (lambda: Convolved(0.2), "tssa"),
    "ista": (Sparse, "ista"),
    "overcomplete": (SparseOvercomplete, "ista_overcomplete"),
}


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"])
@pytest.mark.parametrize(("make", "kind"), TAKEN.values(), ids=TAKEN)
def test_modules_that_flatten_a_map(make, kind, memory, monkeypatch):
    torch.manual_seed(0)
    model = make().eval()
    published, x = copy.deepcopy(model), feature_map().contiguous(memory_format=memory)
    report = patch(model)
    assert (report.replaced, report.left) == ({"": kind}, {})
    calls, fused = [], getattr(forms, kind)
    monkeypatch.setattr(forms, kind, lambda *args, **options: calls.append(1) or fused(*args, **options))
    assert_close(outcome(model, x), outcome(published, x), 256)
    assert calls
    assert unpatch(model) == ("",)
    assert torch.equal(model(x), published(x))


def test_other_ranks_run_the_published_forward():
    class Either(FeedForward):
        """Tokens, or maps by the number of axes: the last axis of a map may be as wide as a token."""

        def forward(self, x):
            if x.dim() == 4:
                return super().forward(x.flatten(2).mT).mT.reshape(x.shape)
            return super().forward(x)

    model = Either()
    published = copy.deepcopy(model)
    assert patch(model).replaced == {"": "ista"}
    square = feature_map(3, DIM)
    assert torch.equal(model(square), published(square))
    assert_close([model(square[0])], [published(square[0])], 64)


def test_tokens_of_four_axes_stay_tokens():
    model, x = FeedForward(), torch.randn(2, 3, 5, DIM)
    expected = model(x)
    patch(model)
    assert type(model)._crate_kernels.form.deep
    assert_close([model(x)], [expected], 64)


class Rows(Down):
    """Attention along the rows alone."""

    def forward(self, x):
        b, c, h, w = x.shape
        rows = x.permute(0, 2, 1, 3).reshape(b * h, c, 1, w)
        return super().forward(rows).reshape(b, h, c, w).permute(0, 2, 1, 3)


class Placed(Flattened):
    """With a ramp added over the columns."""

    def forward(self, x):
        return super().forward(x + torch.linspace(0, 1, x.shape[3], dtype=x.dtype))


class Wide(Convolved):
    """A convolution of more than single pixels."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Conv2d(DIM, DIM, 3, padding=1, bias=False)


class Turned(Flattened):
    def forward(self, x):
        return super().forward(x).flip(3)


LEFT = {
    "rows": (Rows, "computes something else: output"),
    "placed": (Placed, "computes something else: output"),
    "turned": (Turned, "computes something else: output"),
    "wide": (Wide, None),
}


@pytest.mark.parametrize(("make", "reason"), LEFT.values(), ids=LEFT)
def test_what_computes_something_else_is_left(make, reason):
    report = patch(make())
    assert report.replaced == {}
    assert report.left == {} if reason is None else reason in report.left[""]


def test_attention_of_its_own_projections_by_convolutions_says_so():
    class Vit(nn.Module):
        def __init__(self):
            super().__init__()
            self.num_heads = HEADS
            self.qkv, self.proj = nn.Conv2d(DIM, 3 * DIM, 1), nn.Conv2d(DIM, DIM, 1)

    assert "projections of its own for query, key and value" in patch(Vit()).left[""]
