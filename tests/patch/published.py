"""Re-statements of the published modules for the tests of ``patch``: same structure and arithmetic, no code of ours."""

# pyright: reportIncompatibleMethodOverride=false, reportAttributeAccessIssue=false

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

DIM, HEADS, HEAD_DIM = 12, 3, 4


def heads_first(x, heads):
    return x.reshape(x.shape[0], x.shape[1], heads, -1).permute(0, 2, 1, 3)


def heads_last(x):
    return x.permute(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1)


class Attention(nn.Module):
    """CRATE, CRATE-MAE (``use_softmax``) and CRATE-alpha (``bias``)."""

    def __init__(self, dim=DIM, heads=HEADS, dim_head=HEAD_DIM, dropout=0.0, use_softmax=True, bias=True):
        super().__init__()
        self.heads = heads
        self.scale = dim_head**-0.5
        self.attend = nn.Softmax(dim=-1) if use_softmax else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.qkv = nn.Linear(dim, heads * dim_head, bias=False)
        projected = heads != 1 or dim_head != dim
        out = nn.Sequential(nn.Linear(heads * dim_head, dim, bias=bias), nn.Dropout(dropout))
        self.to_out = out if projected else nn.Identity()

    def forward(self, x, return_attention=False, return_key=False):
        if return_key:
            return self.qkv(x)
        w = heads_first(self.qkv(x), self.heads)
        weights = self.attend(w @ w.transpose(-1, -2) * self.scale)
        if return_attention:
            return weights
        return self.to_out(heads_last(self.dropout(weights) @ w))


class FeedForward(nn.Module):
    """CRATE and CRATE-MAE's encoder; weights and floats only."""

    def __init__(self, dim=DIM, step_size=0.1, lambd=0.1):
        super().__init__()
        self.weight = nn.Parameter(nn.init.kaiming_uniform_(torch.empty(dim, dim)))
        self.step_size = step_size
        self.lambd = lambd

    def forward(self, x):
        coded = F.linear(x, self.weight)
        descent = F.linear(x, self.weight.t()) - F.linear(coded, self.weight.t())
        return F.relu(x + self.step_size * descent - self.step_size * self.lambd)


class DecoderFeedForward(FeedForward):
    """CRATE-MAE's decoder: the parameters of ISTA, a plain product."""

    def forward(self, x):
        return F.linear(x, self.weight)


class Overcomplete(nn.Module):
    """CRATE-alpha."""

    def __init__(self, dim=DIM, ratio=4, eta=0.1, lmbda=0.1):
        super().__init__()
        self.eta = eta
        self.lmbda = lmbda
        self.D = nn.Parameter(nn.init.kaiming_uniform_(torch.empty(dim, ratio * dim)))
        self.D1 = nn.Parameter(nn.init.kaiming_uniform_(torch.empty(dim, ratio * dim)))

    def forward(self, x):
        z = F.relu(self.eta * (x @ self.D) - self.eta * self.lmbda)
        residual = z @ self.D.t() - x
        z = F.relu(z - self.eta * (residual @ self.D) - self.eta * self.lmbda)
        return z @ self.D1.t()


class VisionTSSA(nn.Module):
    """ToST, vision."""

    def __init__(self, dim=DIM, num_heads=HEADS, qkv_bias=True, attn_drop=0.0, proj_drop=0.0):
        super().__init__()
        self.heads = num_heads
        self.attend = nn.Softmax(dim=1)
        self.attn_drop = nn.Dropout(attn_drop)
        self.qkv = nn.Linear(dim, dim, bias=qkv_bias)
        self.temp = nn.Parameter(torch.ones(num_heads, 1))
        self.to_out = nn.Sequential(nn.Linear(dim, dim), nn.Dropout(proj_drop))

    def forward(self, x):
        w = heads_first(self.qkv(x), self.heads)
        member = self.attend((F.normalize(w, dim=-2) ** 2).sum(-1) * self.temp)
        share = member / (member.sum(-1, keepdim=True) + 1e-8)
        gate = self.attn_drop(1 / (1 + share.unsqueeze(-2) @ w**2))
        return self.to_out(heads_last(-(w * member.unsqueeze(-1)) * gate))


class CausalTSSA(nn.Module):
    """ToST, language."""

    def __init__(self, dim=DIM, n_head=HEADS, block_size=9, bias=False, dropout=0.0):
        super().__init__()
        self.c_attn = nn.Linear(dim, dim, bias=bias)
        self.c_proj = nn.Linear(dim, dim, bias=bias)
        self.attn_dropout = nn.Dropout(dropout)
        self.resid_dropout = nn.Dropout(dropout)
        self.n_head = n_head
        self.temp = nn.Parameter(torch.ones(n_head, 1))
        self.denom_bias = nn.Parameter(torch.zeros(n_head, block_size, 1))

    def forward(self, x):
        w = heads_first(self.c_attn(x), self.n_head)
        energy = w**2
        normed = energy / energy.cumsum(-2).clamp_min(1e-12) + self.denom_bias[:, : x.shape[1]]
        member = F.softmax(normed.sum(-1) * self.temp, dim=1)
        moment = (energy * member.unsqueeze(-1)).cumsum(-2) / (member.cumsum(-1) + 1e-8).unsqueeze(-1)
        gate = self.attn_dropout(1 / (1 + moment))
        return self.resid_dropout(self.c_proj(heads_last(-(w * member.unsqueeze(-1)) * gate)))


class CausalAttention(nn.Module):
    """Causal CRATE, with its mask as a buffer or, in the overcomplete variant, ``flash``."""

    def __init__(self, dim=DIM, n_head=HEADS, block_size=9, dropout=0.0, flash=False):
        super().__init__()
        self.c_attn = nn.Linear(dim, dim, bias=False)
        self.c_proj = nn.Linear(dim, dim)
        self.attn_dropout = nn.Dropout(dropout)
        self.resid_dropout = nn.Dropout(dropout)
        self.n_head = n_head
        self.dropout = dropout
        self.flash = flash
        if flash:
            self.y_hook = nn.Identity()
        else:
            self.register_buffer("bias", torch.ones(1, 1, block_size, block_size).tril())

    def forward(self, x, enhanced_feature_id=None):
        w = self.c_attn(x)
        if enhanced_feature_id is not None:
            w[:, :, enhanced_feature_id[0]] = enhanced_feature_id[1]
        w = heads_first(w, self.n_head)
        if self.flash:
            rate = self.dropout if self.training else 0.0
            out = self.y_hook(heads_last(F.scaled_dot_product_attention(w, w, w, dropout_p=rate, is_causal=True)))
        else:
            scores = w @ w.transpose(-2, -1) * w.shape[-1] ** -0.5
            seen = self.get_buffer("bias")[:, :, : x.shape[1], : x.shape[1]] != 0
            out = heads_last(self.attn_dropout(scores.masked_fill(~seen, -torch.inf).softmax(-1)) @ w)
        return self.resid_dropout(self.c_proj(out))


class PrintedISTA(FeedForward):
    """Causal CRATE: ISTA with a ReLU that analyses hook, and a print that was left in."""

    def __init__(self, dim=DIM):
        super().__init__(dim)
        self.relu = nn.ReLU()

    def forward(self, x, enhanced_feature_id=None):
        descent = F.linear(x, self.weight.t()) - F.linear(F.linear(x, self.weight), self.weight.t())
        out = self.relu(x + self.step_size * descent - self.step_size * self.lambd)
        print("output shape: ", out.shape)
        return out


class TiedOvercomplete(nn.Module):
    """Causal CRATE, overcomplete: the dictionary transposed, and a separate decoder."""

    def __init__(self, dim=DIM, ratio=4):
        super().__init__()
        self.weight = nn.Parameter(nn.init.kaiming_uniform_(torch.empty(ratio * dim, dim)))
        self.relu = nn.ReLU()
        self.step_size = 0.1
        self.lambd = 0.1

    def forward(self, x, enhanced_feature_id=None):
        z = F.relu(self.step_size * F.linear(x, self.weight) - self.step_size * self.lambd)
        descent = F.linear(x, self.weight) - F.linear(F.linear(z, self.weight.t()), self.weight)
        z = self.relu(z + self.step_size * descent - self.step_size * self.lambd)
        return F.linear(z, self.weight.t())


class ClipaOvercomplete(nn.Module):
    """CRATE-alpha's CLIPA tower: the dictionaries under the names of an MLP's layers."""

    def __init__(self, dim=DIM, ratio=4, eta=0.1, lmbda=0.1):
        super().__init__()
        self.eta = eta
        self.lmbda = lmbda
        self.c_fc = nn.Parameter(nn.init.kaiming_uniform_(torch.empty(dim, ratio * dim)))
        self.c_proj = nn.Parameter(nn.init.kaiming_uniform_(torch.empty(dim, ratio * dim)))

    def forward(self, x):
        z = F.relu(self.eta * (x @ self.c_fc) - self.eta * self.lmbda)
        z = F.relu(z - self.eta * ((z @ self.c_fc.t() - x) @ self.c_fc) - self.eta * self.lmbda)
        return z @ self.c_proj.t()


class Thirds(nn.Module):
    """Query, key and value apart; ``equal`` so many of them, by value only, as in a published checkpoint."""

    def __init__(self, equal):
        super().__init__()
        self.num_heads, self.scale = HEADS, HEAD_DIM**-0.5
        self.qkv = nn.Linear(DIM, 3 * DIM, bias=False)
        self.proj = nn.Linear(DIM, DIM)
        self.qkv.weight.data[: equal * DIM] = self.qkv.weight.data[:DIM].repeat(equal, 1)

    def forward(self, x):
        query, key, value = (heads_first(part, self.num_heads) for part in self.qkv(x).chunk(3, -1))
        return self.proj(heads_last((query @ key.mT * self.scale).softmax(-1) @ value))


class Block(nn.Module):
    """Normalised attention and coding with residuals, as each system arranges them (close enough for a swap)."""

    def __init__(self, attention, code):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.attn = attention
        self.code = code

    def forward(self, x):
        return self.code(x + self.attn(self.norm(x)))


ENCODER = {"attn": "mssa", "code": "ista"}
SYSTEMS = {
    "crate": (lambda: Block(Attention(), FeedForward()), ENCODER),
    "crate-one-head": (lambda: Block(Attention(DIM, 1, DIM), FeedForward()), ENCODER),
    "crate-dropout": (lambda: Block(Attention(dropout=0.3), FeedForward()), ENCODER),
    "mae-encoder": (lambda: Block(Attention(), FeedForward(lambd=5.0)), ENCODER),
    "mae-decoder": (lambda: Block(Attention(), DecoderFeedForward()), {"attn": "mssa"}),
    "mae-decoder-identity": (lambda: Block(Attention(use_softmax=False), DecoderFeedForward()), {"attn": "mssa"}),
    "alpha": (lambda: Block(Attention(bias=False), Overcomplete()), {"attn": "mssa", "code": "ista_overcomplete"}),
    "clipa": (lambda: Block(nn.Identity(), ClipaOvercomplete()), {"code": "ista_overcomplete"}),
    "lm": (lambda: Block(CausalAttention(), PrintedISTA()), {"attn": "causal mssa", "code": "ista"}),
    "lm-overcomplete": (
        lambda: Block(CausalAttention(flash=True, dropout=0.2), TiedOvercomplete()),
        {"attn": "causal mssa", "code": "ista_overcomplete"},
    ),
    "tost": (lambda: Block(VisionTSSA(attn_drop=0.2), nn.GELU()), {"attn": "tssa"}),
    "tost-no-bias": (lambda: Block(VisionTSSA(qkv_bias=False), nn.GELU()), {"attn": "tssa"}),
    "tost-causal": (lambda: Block(CausalTSSA(), nn.GELU()), {"attn": "causal tssa"}),
    "tost-causal-short": (lambda: Block(CausalTSSA(block_size=5, bias=True), nn.GELU()), {"attn": "causal tssa"}),
}


def system(name) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(*(SYSTEMS[name][0]() for _ in range(2)))


def tokens(dtype=torch.float32):
    return torch.randn(2, 5, DIM, generator=torch.Generator().manual_seed(1)).to(dtype)


def outcome(model, x, *args, **kwargs):
    """Output and every gradient, for the same upstream gradient."""
    x = x.clone().requires_grad_()
    out = model(x, *args, **kwargs)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, [x, *model.parameters()], dout)]


def assert_close(actual, expected, ulps):
    for a, e in zip(actual, expected, strict=True):
        assert (a - e).abs().max() <= ulps * torch.finfo(e.dtype).eps * e.abs().max()
