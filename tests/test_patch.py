"""``patch`` on re-statements of the published modules: same structure and arithmetic, no code of ours."""

# pyright: reportIncompatibleMethodOverride=false, reportAttributeAccessIssue=false

import copy
import inspect
import io
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import crate_kernels.nn
from crate_kernels import _backend, _patch_kinds, _patch_probe
from crate_kernels._patch import patch, unpatch

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


def outcome(model, x):
    """Output and every gradient, for the same upstream gradient."""
    x = x.clone().requires_grad_()
    out = model(x)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, [x, *model.parameters()], dout)]


def assert_close(actual, expected, ulps):
    for a, e in zip(actual, expected, strict=True):
        assert (a - e).abs().max() <= ulps * torch.finfo(e.dtype).eps * e.abs().max()


def available(op):
    def runs(name):
        try:
            return _backend.resolve(op, name, torch.device("cpu"), torch.float32) == name
        except RuntimeError:
            return False

    return [None, *filter(runs, _backend.names())]


@pytest.mark.parametrize("backend", available("mssa"))
@pytest.mark.parametrize("name", SYSTEMS)
def test_same_numbers_and_report(name, backend, capsys):
    model = system(name).eval()
    parameters = dict(model.named_parameters())
    keys, types = list(model.state_dict()), [type(m) for m in model.modules()]
    before = outcome(model, tokens())

    report = patch(model, backend=backend)
    wanted = SYSTEMS[name][1]
    assert report.replaced == {f"{i}.{part}": op for i in range(2) for part, op in wanted.items()}
    assert list(report.left) == (["0.code", "1.code"] if name.startswith("mae-decoder") else [])
    assert all("computes something else" in reason for reason in report.left.values())
    # Float32 sums of a dozen terms in another order, through two layers.
    assert_close(outcome(model, tokens()), before, 64)
    assert all(p is parameters[n] for n, p in model.named_parameters())
    assert list(model.state_dict()) == keys

    assert unpatch(model) == tuple(report.replaced)
    assert [type(m) for m in model.modules()] == types
    assert all(torch.equal(a, b) for a, b in zip(outcome(model, tokens()), before, strict=True))
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["crate", "alpha", "tost", "tost-causal"])
def test_dtypes(name, dtype):
    model = system(name).to(dtype).eval()
    before = model(tokens(dtype))
    assert len(patch(model).replaced) == 2 * len(SYSTEMS[name][1])
    assert_close([model(tokens(dtype))], [before], 64 if dtype == torch.float64 else 16)


def test_meta_device():
    with torch.device("meta"):
        model = nn.Sequential(Attention(), FeedForward(), DecoderFeedForward())
    assert patch(model).replaced == {"0": "mssa", "1": "ista"}
    model.to_empty(device="cpu")
    assert model(tokens()).shape == (2, 5, DIM)


def test_root_and_shared_modules():
    attention = Attention()
    assert patch(attention).replaced == {"": "mssa"}
    unpatch(attention)
    model = nn.ModuleDict({"a": attention, "b": nn.Sequential(attention)})
    assert patch(model).replaced == {"a": "mssa", "b.0": "mssa"}
    assert unpatch(model) == ("a",)
    assert type(attention) is Attention


def test_twice_is_once_and_unpatch_without_patch_is_nothing():
    model = system("crate")
    assert unpatch(model) == ()
    patch(model, backend="reference")
    types = [type(m) for m in model.modules()]
    report = patch(model, backend="composite")
    assert report.replaced == {}
    assert set(report.left.values()) == {"already patched; unpatch first to change the backend"}
    assert [type(m) for m in model.modules()] == types


class NoScale(Attention):
    def forward(self, x):
        w = heads_first(self.qkv(x), self.heads)
        return self.to_out(heads_last(self.attend(w @ w.transpose(-1, -2)) @ w))


class StopGradient(Attention):
    def forward(self, x):
        w = heads_first(self.qkv(x), self.heads)
        weights = self.attend(w @ w.detach().transpose(-1, -2) * self.scale)
        return self.to_out(heads_last(weights @ w))


class TrainingNoise(Attention):
    def forward(self, x):
        return super().forward(x) + (torch.randn_like(x) if self.training else 0.0)


class ExtraBias(Attention):
    def __init__(self):
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(DIM))

    def forward(self, x):
        return super().forward(x) + self.offset


class TwoInputs(Attention):
    def forward(self, x, mask):
        return super().forward(x) * mask


class TemperatureUnused(VisionTSSA):
    def forward(self, x):
        held, self.temp = self.temp, nn.Parameter(torch.ones_like(self.temp))
        try:
            return super().forward(x)
        finally:
            self.temp = held


class BiasUnused(CausalTSSA):
    def forward(self, x):
        unbiased = copy.copy(self)
        unbiased._parameters = {**self._parameters, "denom_bias": torch.zeros_like(self.denom_bias)}
        return CausalTSSA.forward(unbiased, x)


class ThreeSteps(Overcomplete):
    def forward(self, x):
        z = x.new_zeros(*x.shape[:-1], self.D.shape[1])
        for _ in range(3):
            z = F.relu(z + self.eta * ((x - z @ self.D.t()) @ self.D) - self.eta * self.lmbda)
        return z @ self.D1.t()


class DoubleThreshold(FeedForward):
    def forward(self, x):
        return F.relu(super().forward(x) - self.step_size * self.lambd)


class Silent(FeedForward):
    def forward(self, x):
        return 0.0 * x + 0.0 * self.weight.sum()


class Final(FeedForward):
    def __init_subclass__(cls):
        raise TypeError("Final is final")


def instance_forward():
    module = FeedForward()
    module.forward = lambda x: x
    return module


def other_attend():
    module = Attention()
    module.attend = nn.Sigmoid()
    return module


LEFT = {
    "scale-unused": (NoScale, "something else: output differs by"),
    "stop-gradient": (StopGradient, "something else: gradient differs by"),
    "training-noise": (TrainingNoise, "something else: output differs by"),
    "more-parameters": (ExtraBias, "has more: offset"),
    "two-inputs": (TwoInputs, "the probe failed: TypeError"),
    "temp-unused": (TemperatureUnused, "something else"),
    "denom-bias-unused": (BiasUnused, "something else"),
    "plain-product": (DecoderFeedForward, "something else: output differs by"),
    "double-threshold": (DoubleThreshold, "something else: output differs by"),
    "always-zero": (Silent, "something else: output differs by"),
    "three-steps": (ThreeSteps, "something else: output differs by"),
    "instance-forward": (instance_forward, "set on the instance"),
    "final": (Final, "cannot be derived from: Final is final"),
    "other-attend": (other_attend, "has another attend"),
    "our-ista": (lambda: crate_kernels.nn.ISTA(DIM), "already fused"),
    "our-mssa": (lambda: crate_kernels.nn.MSSA(DIM, HEADS, HEAD_DIM), "already fused"),
}


@pytest.mark.parametrize(("make", "reason"), LEFT.values(), ids=LEFT)
def test_left_with_the_reason(make, reason):
    module = make()
    report = patch(nn.Sequential(module))
    assert report.replaced == {}
    assert reason in report.left["0"]
    assert reason in str(report)


class Switch(FeedForward):
    """One class, two functions, by an attribute of each type."""

    def __init__(self, plain, via=lambda value: value):
        super().__init__()
        self.plain = via(plain)

    def forward(self, x):
        plain = self.plain[0] if isinstance(self.plain, list) else self.plain
        return F.linear(x, self.weight) if plain else super().forward(x)


@pytest.mark.parametrize("via", [bool, str, lambda v: [v], torch.tensor], ids=["bool", "str", "list", "tensor"])
def test_layers_of_one_class_are_told_apart(via):
    values = ("", "plain") if via is str else (False, True)
    model = nn.Sequential(*(Switch(value, via) for value in (*values, *values)))
    assert list(patch(model).replaced) == ["0", "2"]


def test_layers_of_one_signature_share_a_probe(monkeypatch):
    probed, probe = [], _patch_probe.same_function
    monkeypatch.setattr(_patch_probe, "same_function", lambda *args: probed.append(1) or probe(*args))
    tied = Overcomplete()
    tied.D1 = tied.D
    model = nn.Sequential(Attention(), FeedForward(), FeedForward(lambd=0.5), Attention(), FeedForward(), tied)
    assert len(patch(nn.Sequential(model, Overcomplete(), Overcomplete())).replaced) == 8
    assert len(probed) == 5


def test_unrelated_modules_are_not_listed():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.MultiheadAttention(4, 2), nn.Conv2d(1, 1, 1))
    report = patch(model)
    assert (report.replaced, report.left, str(report)) == ({}, {}, "nothing to replace")


def test_probe_leaves_no_trace():
    calls = []

    class Counting(Attention):
        def __init__(self):
            super().__init__(dropout=0.5)
            self.register_buffer("seen", torch.zeros(1))
            self.log, self.count = [], 0

        def forward(self, x, return_attention=False):
            self.count += 1
            self.log.append(x.shape)
            self.seen += 1
            torch.rand(3)
            return super().forward(x, return_attention)

    def hook(*_):
        calls.append(1)

    model: Any = nn.Sequential(Counting(), FeedForward())
    model[0].qkv.eval()
    model[0].to_out[0].weight.requires_grad_(False)
    model[1].weight.grad = torch.ones(DIM, DIM)
    for module in model.modules():
        module.register_forward_hook(hook)
        module.register_forward_pre_hook(hook)
        module.register_full_backward_hook(hook)
    handle = nn.modules.module.register_module_forward_hook(hook)
    attributes = [set(vars(m)) for m in model.modules()]
    modes = [m.training for m in model.modules()]
    flags = [p.requires_grad for p in model.parameters()]
    values = [p.clone() for p in model.parameters()]
    random = torch.get_rng_state()
    try:
        assert patch(model).replaced == {"0": "mssa", "1": "ista"}
    finally:
        handle.remove()
    assert torch.equal(torch.get_rng_state(), random)
    assert calls == []
    assert (model[0].count, model[0].log, model[0].seen.item()) == (0, [], 0)
    assert [set(vars(m)) for m in model.modules()] == attributes
    assert [m.training for m in model.modules()] == modes
    assert [p.requires_grad for p in model.parameters()] == flags
    assert all(torch.equal(p, v) for p, v in zip(model.parameters(), values, strict=True))
    assert [p.grad is None for p in model.parameters()] == [True, True, True, False]
    assert torch.equal(model[1].weight.grad, torch.ones(DIM, DIM))


def test_probe_ignores_autocast_grad_mode_and_default_device():
    model = system("crate")
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode(), torch.device("meta"):
        assert len(patch(model).replaced) == 4


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


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "save"])
def test_copies_are_patched_and_independent(way):
    model = Block(Attention(), FeedForward()).eval()
    patch(model, backend="reference")
    if way == "deepcopy":
        other = copy.deepcopy(model)
    elif way == "pickle":
        other = pickle.loads(pickle.dumps(model))
    else:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        other = torch.load(buffer, weights_only=False)
    assert torch.equal(other(tokens()), model(tokens()))
    assert [type(m) for m in other.modules()] == [type(m) for m in model.modules()]
    with torch.no_grad():
        other.attn.qkv.weight.zero_()
    assert not torch.equal(other(tokens()), model(tokens()))
    assert unpatch(other) == ("attn", "code")
    assert type(other.attn) is Attention
    assert type(model.attn) is not Attention


def test_a_module_that_pickles_itself_is_refused():
    class Own(FeedForward):
        def __reduce__(self):
            return FeedForward, ()

    model = Own()
    assert patch(model).replaced == {"": "ista"}
    with pytest.raises(pickle.PicklingError, match="call unpatch first"):
        copy.deepcopy(model)


def test_replicas_use_their_own_parameters():
    model = FeedForward()
    patch(model)
    replica = model._replicate_for_data_parallel()
    replica.weight = torch.zeros(DIM, DIM)
    assert torch.allclose(replica(tokens()), F.relu(tokens() - model.step_size * model.lambd))


def test_a_class_derived_after_patch_is_refused():
    model = nn.Sequential(FeedForward(), FeedForward())
    patch(model)
    nn.utils.parametrize.register_parametrization(model[0], "weight", nn.Identity())
    with pytest.raises(RuntimeError, match="unpatch: 0 must have the class patch gave it"):
        unpatch(model)
    assert type(model[1]) is not FeedForward
    nn.utils.parametrize.remove_parametrizations(model[0], "weight")
    assert unpatch(model) == ("0", "1")


def test_compiles_in_one_graph():
    torch.manual_seed(0)
    model = nn.Sequential(Attention(), FeedForward(), Overcomplete(), VisionTSSA(), CausalTSSA())
    expected = outcome(model, tokens())
    assert len(patch(model).replaced) == 5
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_close(outcome(compiled, tokens()), expected, 64)


def test_a_compiled_model_sees_the_patch():
    model = system("crate").eval()
    compiled: Any = torch.compile(model, backend="eager")
    calls, x = [], tokens()
    with torch.no_grad():
        before = compiled(x)
        patch(compiled)
        model[0].attn.attend.register_forward_hook(lambda *_: calls.append(1))
        assert torch.allclose(compiled(x), before, atol=1e-5)
        assert calls == [1]
        unpatch(compiled)
        assert torch.equal(compiled(x), before)


def test_the_signature_is_the_published_one():
    model = Attention()
    patch(model)
    assert inspect.signature(model.forward) == inspect.signature(Attention().forward)
    assert isinstance(model, Attention)
    assert "FusedAttention" in repr(model)


def test_training_goes_on_with_the_same_optimizer():
    def train(model, steps):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for step in range(steps):
            if step == 1:
                patch(model) if patched else None
            optimizer.zero_grad()
            loss = model(tokens()).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    patched = False
    plain = train(system("crate"), 4)
    patched = True
    assert train(system("crate"), 4) == pytest.approx(plain, rel=1e-4)


@pytest.mark.parametrize(
    ("model", "backend", "error", "message"),
    [
        ("crate", None, TypeError, "model must be a Module, got str"),
        (Attention(), "fused", ValueError, "backend must be None or one of .*, got 'fused'"),
        (Attention(), 3, ValueError, "got 3"),
    ],
    ids=["model", "name", "number"],
)
def test_bad_arguments(model, backend, error, message):
    with pytest.raises(error, match=message):
        patch(model, backend=backend)


def test_an_unavailable_backend_changes_nothing():
    _backend.register(_backend.Backend("absent", "crate_kernels.ops.{op}.reference", missing="it is not there"))
    try:
        model = system("crate")
        with pytest.raises(RuntimeError, match="backend='absent' is unavailable: it is not there"):
            patch(model, backend="absent")
        assert unpatch(model) == ()
    finally:
        _backend.unregister("absent")
