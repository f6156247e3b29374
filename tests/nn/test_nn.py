"""The modules: published parameters and arguments around the operators, which have other tests."""

# pyright: reportArgumentType=false, reportOptionalMemberAccess=false

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from crate_kernels.nn import ISTA, MSSA, TSSA, CausalMSSA, CausalTSSA, OvercompleteISTA
from crate_kernels.ops.mssa import SubspaceCache
from crate_kernels.ops.tssa import tssa

DIM, HEADS, HEAD_DIM, SEQLEN = 12, 3, 4, 7


def tokens(*shape, dtype=torch.float64):
    return torch.randn(*(shape or (2, SEQLEN, DIM)), generator=torch.Generator().manual_seed(0), dtype=dtype)


def built(module):
    """A double module with every parameter drawn, so that ones and zeros hide nothing."""
    generator = torch.Generator().manual_seed(1)
    for parameter in module.double().parameters():
        nn.init.normal_(parameter, std=0.4, generator=generator)
    return module.eval()


def heads_of(projected, heads=HEADS):
    return projected.view(*projected.shape[:2], heads, -1).transpose(1, 2)


MODULES = {
    "mssa": lambda **k: MSSA(DIM, HEADS, HEAD_DIM, **k),
    "mssa-causal": lambda **k: MSSA(DIM, HEADS, HEAD_DIM, causal=True, **k),
    "tssa": lambda **k: TSSA(DIM, HEADS, **k),
    "causal-mssa": lambda **k: CausalMSSA(DIM, HEADS, **k),
    "causal-tssa": lambda **k: CausalTSSA(DIM, HEADS, 9, **k),
    "ista": lambda **k: ISTA(DIM, **k),
    "overcomplete": lambda **k: OvercompleteISTA(DIM, **k),
}
SHAPES = {
    "mssa": (MODULES["mssa"], {"qkv.weight": (12, 12), "to_out.0.weight": (12, 12), "to_out.0.bias": (12,)}),
    "mssa-wide": (lambda: MSSA(DIM, 2, 5, bias_out=False), {"qkv.weight": (10, 12), "to_out.0.weight": (12, 10)}),
    "mssa-one-narrow-head": (
        lambda: MSSA(DIM, 1, 5),
        {"qkv.weight": (5, 12), "to_out.0.weight": (12, 5), "to_out.0.bias": (12,)},
    ),
    "mssa-one-head": (lambda: MSSA(DIM, 1, DIM), {"qkv.weight": (12, 12)}),
    "mssa-tied": (lambda: MSSA(DIM, HEADS, 5, tied=True), {"qkv.weight": (15, 12)}),
    "tssa": (
        MODULES["tssa"],
        {"temp": (3, 1), "qkv.weight": (12, 12), "to_out.0.weight": (12, 12), "to_out.0.bias": (12,)},
    ),
    "tssa-bias": (
        lambda: TSSA(DIM, HEADS, True),
        {"temp": (3, 1), "qkv.weight": (12, 12), "qkv.bias": (12,), "to_out.0.weight": (12, 12)}
        | {"to_out.0.bias": (12,)},
    ),
    "causal-mssa": (
        MODULES["causal-mssa"],
        {"c_attn.weight": (12, 12), "c_proj.weight": (12, 12), "c_proj.bias": (12,)},
    ),
    "causal-mssa-no-bias": (
        lambda: CausalMSSA(DIM, HEADS, False),
        {"c_attn.weight": (12, 12), "c_proj.weight": (12, 12)},
    ),
    "causal-tssa": (
        lambda: CausalTSSA(DIM, HEADS, 9, False),
        {"temp": (3, 1), "denom_bias": (3, 9, 1), "c_attn.weight": (12, 12), "c_proj.weight": (12, 12)},
    ),
    "ista": (MODULES["ista"], {"weight": (12, 12)}),
    "overcomplete": (MODULES["overcomplete"], {"D": (12, 48), "D1": (12, 48)}),
    "overcomplete-tied": (lambda: OvercompleteISTA(DIM, 20, tied=True), {"D": (12, 20)}),
}


@pytest.mark.parametrize("name", MODULES)
def test_parameters_are_made_where_and_as_asked(name):
    """As torch.nn.Linear's: no copy on another device first."""
    options = (
        {"learned": ("step_size", "lambd", "bias"), "per_channel": True} if name in ("ista", "overcomplete") else {}
    )
    module = MODULES[name](device="meta", dtype=torch.bfloat16, **options)
    assert {(one.device.type, one.dtype) for one in module.parameters()} == {("meta", torch.bfloat16)}
    half, default = MODULES[name](dtype=torch.float16, **options), MODULES[name](**options)
    assert {(one.device.type, one.dtype) for one in half.parameters()} == {("cpu", torch.float16)}
    assert [(n, one.shape) for n, one in half.named_parameters()] == [
        (n, one.shape) for n, one in default.named_parameters()
    ]
    assert {one.dtype for one in default.parameters()} == {torch.float32}


@pytest.mark.parametrize(("make", "shapes"), SHAPES.values(), ids=SHAPES)
def test_parameters(make, shapes):
    assert {name: tuple(value.shape) for name, value in make().state_dict().items()} == shapes


def softmax(w, scale=HEAD_DIM**-0.5):
    return (scale * w @ w.mT).softmax(-1)


def published_mssa(m, x):
    w = heads_of(m.qkv(x))
    return m.to_out((softmax(w) @ w).transpose(1, 2).flatten(2))


def tied_mssa(m, x):
    u = m.qkv.weight.view(HEADS, HEAD_DIM, DIM)  # CRATE Eq. 11-12, a head at a time
    w = [x @ u_k.T for u_k in u]
    return 0.7 * sum(softmax(w_k, 1.0) @ w_k @ u_k for w_k, u_k in zip(w, u, strict=True))


def published_tssa(m, x):
    return m.to_out(tssa(heads_of(m.qkv(x)), m.temp, backend="reference").transpose(1, 2).flatten(2))


def published_causal_tssa(m, x):
    w = heads_of(m.c_attn(x))
    out = tssa(w, m.temp, causal=True, denom_bias=m.denom_bias, backend="reference")
    return m.c_proj(out.transpose(1, 2).flatten(2))


def published_causal_mssa(m, x, scale=HEAD_DIM**-0.5):
    w = heads_of(m.c_attn(x))
    later = torch.ones(SEQLEN, SEQLEN).triu(1).bool()
    weights = (scale * w @ w.mT).masked_fill(later, -torch.inf).softmax(-1)
    return m.c_proj((weights @ w).transpose(1, 2).flatten(2))


def descent(m, x):
    return x + 0.2 * (x @ m.weight - x @ m.weight.T @ m.weight)


def soft_ista(m, x):
    v = descent(m, x)
    return v.sign() * (v.abs() - 0.2 * 0.3).clamp_min(0)


def mm_ista(m, x):
    return F.relu((1 + 4 / (9 * (1 + 0.5))) * x @ m.weight - 4 * 0.3 / (9 * 0.5))


def overcomplete(m, x, steps=2):
    z = x.new_zeros(*x.shape[:-1], m.D.shape[1])
    for _ in range(steps):
        z = F.relu(z + 0.2 * (x - z @ m.D.T) @ m.D - 0.2 * 0.3)
    return z @ (m.D if m.D1 is None else m.D1).T


NUMBERS = {"step_size": 0.2, "lambd": 0.3}
EQUATIONS = {
    "mssa": (lambda b: MSSA(DIM, HEADS, HEAD_DIM, backend=b), published_mssa),
    "mssa-tied": (lambda b: MSSA(DIM, HEADS, HEAD_DIM, tied=True, gamma=0.7, backend=b), tied_mssa),
    "tssa": (lambda b: TSSA(DIM, HEADS, True, backend=b), published_tssa),
    "causal-mssa": (lambda b: CausalMSSA(DIM, HEADS, backend=b), published_causal_mssa),
    "causal-mssa-scale": (
        lambda b: CausalMSSA(DIM, HEADS, scale=1.5, backend=b),
        lambda m, x: published_causal_mssa(m, x, 1.5),
    ),
    "causal-tssa": (lambda b: CausalTSSA(DIM, HEADS, 9, backend=b), published_causal_tssa),
    "ista": (lambda b: ISTA(DIM, **NUMBERS, backend=b), lambda m, x: F.relu(descent(m, x) - 0.2 * 0.3)),
    "ista-soft": (lambda b: ISTA(DIM, **NUMBERS, prox="soft", backend=b), soft_ista),
    "ista-mm": (lambda b: ISTA(DIM, **NUMBERS, prox="mm", alpha=0.5, backend=b), mm_ista),
    "overcomplete": (lambda b: OvercompleteISTA(DIM, **NUMBERS, backend=b), overcomplete),
    "overcomplete-tied": (
        lambda b: OvercompleteISTA(DIM, 20, 3, True, **NUMBERS, backend=b),
        lambda m, x: overcomplete(m, x, 3),
    ),
}


@pytest.mark.parametrize("backend", [None, "reference", "composite"])
@pytest.mark.parametrize(("make", "equation"), EQUATIONS.values(), ids=EQUATIONS)
def test_equations(make, equation, backend):
    module, x = built(make(backend)), tokens()
    torch.testing.assert_close(module(x), equation(module, x), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", MODULES)
def test_a_backend_is_a_name(name):
    with pytest.raises(TypeError, match=r"^\w+: backend must be None or a string, got int"):
        MODULES[name](backend=5)


@pytest.mark.parametrize("name", MODULES)
def test_backend_reaches_the_operator(name):
    module = MODULES[name](backend="nowhere")
    with pytest.raises(ValueError, match=r"backend must be None or one of .*, got 'nowhere'"):
        module(tokens(dtype=torch.float32))


# Where each module keeps its projection, and its dropout argument.
CALLS = {
    "mssa": ("qkv", "dropout"),
    "tssa": ("qkv", "attn_drop"),
    "causal-mssa": ("c_attn", "dropout"),
    "causal-tssa": ("c_attn", "dropout"),
}


@pytest.mark.parametrize("name", CALLS)
def test_projection_is_hooked_and_never_copied(name, monkeypatch):
    projection, _ = CALLS[name]
    module, seen = MODULES[name](), {}
    real = module._operator

    def spy(w, *args, **options):
        seen["w"], seen["out"] = w, real(w, *args, **options)
        return seen["out"]

    monkeypatch.setattr(module, "_operator", spy)
    getattr(module, projection).register_forward_hook(lambda m, args, out: seen.__setitem__("projected", out))
    module(tokens(dtype=torch.float32))
    assert seen["w"].shape == (2, HEADS, SEQLEN, HEAD_DIM)
    assert seen["w"].data_ptr() == seen["projected"].data_ptr()
    assert seen["out"].transpose(1, 2).flatten(2).data_ptr() == seen["out"].data_ptr()


@pytest.mark.parametrize("name", CALLS)
def test_dropout_follows_its_own_mode(name, monkeypatch):
    _, drop = CALLS[name]
    rates = []
    module, x = MODULES[name](**{drop: 0.25}), tokens(dtype=torch.float32)
    monkeypatch.setattr(module, "_operator", lambda w, *a, dropout_p, **k: rates.append(dropout_p) or w)
    module(x)
    module.eval()(x)
    module.train()
    for child in module.children():
        if isinstance(child, nn.Dropout):
            child.eval()
    module(x)
    assert rates == [0.25, 0.0, 0.0]


AFTER = {
    "mssa": (lambda: MODULES["mssa"](dropout=0.5), "dropout"),
    "mssa-tied": (lambda: MODULES["mssa"](dropout=0.5, tied=True), "dropout"),
    "tssa": (lambda: MODULES["tssa"](proj_drop=0.5), "attn_drop"),
    "causal-mssa": (lambda: MODULES["causal-mssa"](dropout=0.5), "attn_dropout"),
    "causal-tssa": (lambda: MODULES["causal-tssa"](dropout=0.5), "attn_dropout"),
}


@pytest.mark.parametrize(("make", "inside"), AFTER.values(), ids=AFTER)
def test_dropout_of_the_output(make, inside):
    module, x = built(make()).train(), tokens()
    getattr(module, inside).eval()
    torch.manual_seed(0)
    out = module(x)
    kept = out != 0
    assert abs(kept.double().mean() - 0.5) < 5 * 0.5 / kept.numel() ** 0.5  # five standard deviations
    torch.testing.assert_close(out[kept], 2 * module.eval()(x)[kept])


def test_return_key_is_the_projection():
    module, x = MODULES["mssa"](), tokens(dtype=torch.float32)
    assert torch.equal(module(x, return_key=True), module.qkv(x))


PHI = {
    "softmax": {},
    "causal": {"causal": True},
    "scale": {"scale": 1.5},
    "threshold": {"phi": "threshold", "threshold": 0.2},
    "relu": {"phi": "relu"},
    "identity": {"phi": "identity", "causal": True},
}


@pytest.mark.parametrize("masked", [False, True], ids=["all", "padded"])
@pytest.mark.parametrize("options", PHI.values(), ids=PHI)
def test_return_attention_are_the_weights_of_the_output(options, masked):
    module, x = built(MSSA(DIM, 1, DIM, **options)), tokens()
    mask = torch.arange(SEQLEN) < torch.tensor([[SEQLEN], [0]]) if masked else None
    weights = module(x, return_attention=True, key_padding_mask=mask)
    assert weights.shape == (2, 1, SEQLEN, SEQLEN)
    torch.testing.assert_close(weights[:, 0] @ module.qkv(x), module(x, key_padding_mask=mask))
    if options.get("phi") != "threshold":  # piecewise constant
        weights.sum().backward()
        assert module.qkv.weight.grad.isfinite().all()


def test_return_attention_of_published_shape():
    module, x = built(MODULES["mssa"]()), tokens()
    torch.testing.assert_close(module(x, return_attention=True), softmax(heads_of(module.qkv(x))))
    cache = SubspaceCache(2, HEADS, SEQLEN, HEAD_DIM)
    with pytest.raises(ValueError, match="MSSA: return_attention must be False with a cache"):
        module(x, return_attention=True, cache=cache)


@pytest.mark.parametrize("name", CALLS)
def test_padding_is_as_if_absent(name):
    module, x = built(MODULES[name]()), tokens()
    mask = (torch.arange(SEQLEN) < 4).expand(2, SEQLEN)
    torch.testing.assert_close(module(x, key_padding_mask=mask)[:, :4], module(x[:, :4]))


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("name", ["mssa-causal", "causal-mssa", "causal-tssa"])
def test_a_new_cache_fits_its_module(name, dtype, autocast):
    module, x = built(MODULES[name]()).to(dtype), tokens(dtype=dtype)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        cache = module.new_cache(2, SEQLEN)
        steps = [module(part, cache=cache) for part in x.split([3, 1, 1, 2], dim=1)]
        out, full = torch.cat(steps, dim=1), module(x)
    assert out.dtype == full.dtype
    assert torch.equal(cache.lengths, torch.full((2,), SEQLEN))
    roundings = 16 * torch.finfo(out.dtype).eps
    assert (out - full).abs().max() <= roundings * full.abs().max()


@pytest.mark.parametrize("name", ["mssa-causal", "causal-mssa", "causal-tssa"])
def test_a_new_cache_is_where_its_module_is(name):
    cache = MODULES[name]().to("meta").new_cache(2, SEQLEN)
    assert {t.device.type for t in vars(cache).values() if isinstance(t, torch.Tensor)} == {"meta"}


def test_cache_needs_a_causal_module():
    with torch.no_grad(), pytest.raises(ValueError, match="causal must be True with a cache"):
        MODULES["mssa"]()(tokens(dtype=torch.float32), cache=SubspaceCache(2, HEADS, SEQLEN, HEAD_DIM))


@pytest.mark.parametrize("name", ["ista", "overcomplete"])
def test_codes_take_any_leading_axes(name):
    module, x = built(MODULES[name]()), tokens(2, 3, 5, DIM)
    torch.testing.assert_close(module(x), module(x.view(-1, DIM)).view_as(x))


def test_dictionaries_start_kaiming_uniform():
    torch.manual_seed(0)
    for weight in (ISTA(64).weight, OvercompleteISTA(64).D, OvercompleteISTA(64).D1):
        bound = (6 / weight.shape[1]) ** 0.5
        assert 0.95 * bound < weight.abs().max() <= bound
    module = OvercompleteISTA(64)
    assert not torch.equal(module.D, module.D1)


@pytest.mark.parametrize("name", MODULES)
def test_half_and_autocast(name):
    module, x = MODULES[name](), tokens(dtype=torch.float32)
    exact = module(x)
    with torch.autocast("cpu", torch.bfloat16):
        out = module(x)
    assert out.dtype == (torch.float32 if name in ("ista", "overcomplete") else torch.bfloat16)
    half = module.bfloat16()(x.bfloat16())
    assert half.dtype == torch.bfloat16
    # bfloat16 has 8 bits; a handful of roundings of what the output is a sum of
    for low in (out, half):
        assert (low - exact).abs().max() <= 16 * 2**-8 * exact.abs().max()


@pytest.mark.parametrize("name", MODULES)
def test_a_half_module_under_autocast_takes_float32_tokens(name):
    """CUDA's autocast runs norms in float32, so that a half model hands these on."""
    module, x = MODULES[name]().bfloat16(), tokens(dtype=torch.float32).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = module(x)
        expected = MODULES[name]()
        expected.load_state_dict(module.state_dict())
        torch.testing.assert_close(out, expected(x), rtol=2**-6, atol=2**-6)
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32
    assert all(p.grad is not None and p.grad.dtype == torch.bfloat16 for p in module.parameters())
