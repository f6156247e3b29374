"""Linear layers by another product: the values and gradients of nn.Linear, and nn.Linear itself where a tool looks."""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.flop_counter import FlopCounterMode

from crate_kernels._core import products
from crate_kernels._native import extension
from crate_kernels.nn import _linear
from crate_kernels.testing import FORWARD_FACTOR, GRADIENT_FACTOR

IN, OUT = 48, 80
SHAPES = {"2d": (65, IN), "3d": (2, 37, IN), "1d": (IN,), "4d": (2, 3, 5, IN), "empty": (0, 7, IN)}

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs a PyTorch with oneDNN")


@pytest.fixture
def taken(monkeypatch):
    """Take the other product at any size, on any processor; list the calls of it."""
    calls = []
    given = torch.ops.mkldnn._linear_pointwise.default

    def product(*args):
        calls.append(args)
        return given(*args)

    monkeypatch.setattr(products, "_library", product)
    monkeypatch.setattr(products, "_LEAST_WORK", 1)
    return calls


@pytest.fixture
def no_half(monkeypatch):
    """Take the way of a processor without arithmetic in 16 bits, for matrices of any size."""
    monkeypatch.setattr(
        products, "_slow", dict.fromkeys((torch.bfloat16, torch.float16), products.Fp32Fallback(1, 1, 1))
    )


class Applied(nn.Module):
    """A linear layer as our modules apply it; as it is, for backend="reference"."""

    def __init__(self, linear, backend):
        super().__init__()
        self.linear, self.backend = linear, backend

    def forward(self, x):
        return _linear.linear(self.linear, x, self.backend)


def pair(bias=True, backend=None, dtype=torch.float32):
    """Return nn.Linear as our modules apply it, and as it is, with the same weights."""
    torch.manual_seed(0)
    linear = nn.Linear(IN, OUT, bias, dtype=dtype)
    return Applied(linear, backend), Applied(copy.deepcopy(linear), "reference")


def outcome(layer, x):
    """Return the output and all gradients by name."""
    x = x.detach().clone().requires_grad_()
    y = layer(x)
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.dtype)
    named = {"x": x, **{name: p for name, p in layer.named_parameters() if p.requires_grad}}
    grads = torch.autograd.grad(y, list(named.values()), g)
    return {"y": y.detach(), **dict(zip(named, grads, strict=True))}


def check(ours, plain, x):
    actual, eager, eps = outcome(ours, x), outcome(plain, x), torch.finfo(x.dtype).eps
    exact = outcome(copy.deepcopy(plain).double(), x.double())
    assert actual.keys() == exact.keys()
    for name, target in exact.items():
        assert actual[name].shape == target.shape
        if not target.numel():
            continue
        factor = FORWARD_FACTOR if name == "y" else GRADIENT_FACTOR
        size = target.abs().max()
        budget = factor * ((eager[name].double() - target).abs().max() + eps * size)
        assert (actual[name].double() - target).abs().max() <= budget, name


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_linear_is_exact(taken, shape, bias):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    check(*pair(bias), x)
    assert len(taken) == (3 if x.numel() else 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_16_bits_are_multiplied_in_float32_and_rounded_once(no_half, shape, bias, dtype):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    ours, plain = pair(bias, dtype=dtype)
    check(ours, plain, x)
    exact = copy.deepcopy(plain).float()(x.float())
    assert torch.equal(ours(x), exact.to(dtype))
    assert ours(x).dtype == dtype


@pytest.mark.parametrize(
    ("fallback", "rows", "min_rows_large"),
    [(products.NUMBER_BY_NUMBER, 8, 32), (products.HALF_RATE, 64, 64)],
    ids=["number-by-number", "half-rate"],
)
def test_few_rows_of_16_bits_are_not_converted(fallback, rows, min_rows_large, monkeypatch):
    monkeypatch.setattr(products, "_slow", {torch.bfloat16: fallback})
    right, tokens = torch.randn(OUT, IN, dtype=torch.bfloat16), torch.randn(64, IN, dtype=torch.bfloat16)
    assert not products.should_reroute(tokens[: rows - 1], right)
    assert products.should_reroute(tokens[:rows], right)
    assert not products.should_reroute(tokens[:rows], right.float())
    monkeypatch.setattr(products, "_LARGE", OUT * IN)
    assert not products.should_reroute(tokens[: min_rows_large - 1], right)
    assert products.should_reroute(tokens[:min_rows_large], right)


@pytest.mark.parametrize(
    ("fallback", "rows"),
    [(products.NUMBER_BY_NUMBER, 1), (products.HALF_RATE, 64)],
    ids=["number-by-number", "half-rate"],
)
def test_an_operator_converts_from_its_own_number_of_rows(fallback, rows, monkeypatch):
    monkeypatch.setattr(products, "_slow", {torch.bfloat16: fallback})
    assert products.fast_dtype(torch.bfloat16, rows) == torch.float32
    assert products.fast_dtype(torch.bfloat16, rows - 1) == torch.bfloat16
    assert products.fast_dtype(torch.float16, rows) == torch.float16


@pytest.mark.parametrize(
    "shape", [(19, IN), (2, 8, IN), (2, 9, IN)], ids=["a-rest", "whole-parts", "batches-and-a-rest"]
)
def test_many_rows_of_16_bits_are_converted_in_parts(no_half, shape, monkeypatch):
    monkeypatch.setattr(products, "_AT_ONCE", 4)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    ours, plain = pair(dtype=torch.bfloat16)
    check(ours, plain, x)
    assert torch.equal(ours(x), copy.deepcopy(plain).float()(x.float()).to(torch.bfloat16))


# (m, n), which of the two is transposed, and whether the right one is turned instead of the left.
LAID_OUT = {
    "both-left-smaller": (40, 96, True, True, False),
    "both-right-smaller": (96, 40, True, True, True),
    "left": (96, 40, True, False, False),
    "right": (96, 40, False, True, False),
    "none": (96, 40, False, False, False),
}


@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize(("m", "n", "of_left", "of_right", "turned"), LAID_OUT.values(), ids=LAID_OUT)
def test_onednn_gets_rows_on_the_left(taken, m, n, of_left, of_right, turned, with_bias):
    """PyTorch would copy a transposed matrix number by number. As its second operand oneDNN takes either."""
    if extension.PATH is None:
        pytest.skip("needs python -m crate_kernels build")

    def matrix(rows, seed, transposed):
        numbers = torch.randn(rows, 70, generator=torch.Generator().manual_seed(seed))
        return numbers.t().contiguous().t() if transposed else numbers

    left, right, bias = matrix(m, 0, of_left), matrix(n, 1, of_right), torch.ones(n) if with_bias else None
    out = products.product(left, right, bias)
    ((given_left, given_right, *_),) = taken
    assert given_left.is_contiguous()
    assert given_right is (left if turned and bias is None else right)
    assert out.is_contiguous()
    torch.testing.assert_close(out, torch.nn.functional.linear(left, right, bias), rtol=1e-5, atol=1e-5)


SAID = {
    "linux": ("vendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 17\n", 25),
    "windows": ("AMD64 Family 26 Model 2 Stepping 1, AuthenticAMD", 26),
    "unknown": ("arm", 0),
}


@pytest.mark.parametrize(("said", "family"), SAID.values(), ids=SAID)
def test_the_family_of_a_processor(said, family, monkeypatch):
    monkeypatch.setattr(products, "_processor", lambda: said)
    assert products._family() == family
    assert products._is_made_by("AuthenticAMD") == (family > 0)


VENDORS = {"intel": "GenuineIntel", "amd": "AuthenticAMD"}


@pytest.mark.parametrize("amx", [True, False], ids=["amx", "no-amx"])
@pytest.mark.parametrize("vendor", VENDORS.values(), ids=VENDORS)
def test_bfloat16_takes_the_detour_on_intel_without_amx(vendor, amx, monkeypatch):
    monkeypatch.setattr(products, "_HAS_ONEDNN", True)
    monkeypatch.setattr(products, "_is_made_by", vendor.__eq__)
    for name, has in {"_is_avx512_bf16_supported": True, "_is_amx_tile_supported": amx}.items():
        monkeypatch.setattr(torch.cpu, name, lambda has=has: has)
    for name in ("_is_mkldnn_bf16_supported", "_is_mkldnn_fp16_supported"):
        monkeypatch.setattr(torch.ops.mkldnn, name, lambda: True)
    assert products._fallbacks() == (
        {torch.bfloat16: products.HALF_RATE} if vendor == VENDORS["intel"] and not amx else {}
    )


def test_a_processor_that_multiplies_16_bits_is_left_to_it(monkeypatch):
    monkeypatch.setattr(products, "_slow", {})
    x = torch.randn(65, IN, dtype=torch.bfloat16)
    ours, plain = pair(dtype=torch.bfloat16)
    assert torch.equal(ours(x), plain(x))
    assert products.fast_dtype(torch.bfloat16, 65) == torch.bfloat16


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_a_bias_in_bfloat16_is_not_copied_first(taken, bias, monkeypatch):
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("needs a processor on which oneDNN multiplies bfloat16")
    monkeypatch.setattr(products, "_slow", {})
    x = torch.randn(2, 65, IN, generator=torch.Generator().manual_seed(1), dtype=torch.bfloat16)
    check(*pair(bias, dtype=torch.bfloat16), x)
    assert len(taken) == bias  # neither gradient has a bias
    half, ones = pair(dtype=torch.bfloat16)[0].linear.weight[:, ::2], torch.ones(OUT, dtype=torch.bfloat16)
    assert products.should_reroute(x[..., ::2].contiguous(), half, ones)
    assert not products.should_reroute(x[..., ::2], half, ones), "oneDNN would copy it"


@pytest.mark.parametrize("strided", ["transposed", "sliced", "expanded"])
def test_linear_takes_any_strides(taken, strided):
    x = torch.randn(9, IN, 2, generator=torch.Generator().manual_seed(1))
    view = {"transposed": x.transpose(1, 2), "sliced": x[..., 0], "expanded": x[:1, :, 0].expand(9, -1)}[strided]
    check(*pair(), view)
    assert taken


def test_a_part_of_a_matrix_is_copied(taken):
    """oneDNN takes a hundred times as long for one whose rows are further apart than they are long."""
    x, wide = torch.randn(5, IN), torch.randn(OUT, 2 * IN)
    for right in (wide[:, :IN], wide[:, ::2]):
        torch.testing.assert_close(products.product(x, right), x @ right.t(), rtol=1e-4, atol=1e-4)
    assert [right.is_contiguous() for _, right, *_ in taken] == [True, True]


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_linear_leaves_out_the_gradient_of_what_is_frozen(taken, frozen):
    ours, plain = pair()
    for layer in (ours, plain):
        getattr(layer.linear, frozen).requires_grad_(False)
    check(ours, plain, torch.randn(5, IN, generator=torch.Generator().manual_seed(1)))
    assert len(taken) == (2 if frozen == "weight" else 3)


def test_linear_without_gradient(taken):
    ours, plain = pair()
    x = torch.randn(5, IN)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), plain(x))
    with torch.inference_mode():
        torch.testing.assert_close(ours(x), plain(x))
    assert len(taken) == 2


def test_small_layers_are_plain(monkeypatch):
    monkeypatch.setattr(products, "_library", None)
    ours, plain = pair()
    x = torch.randn(5, IN)
    assert torch.equal(ours(x), plain(x))


def vmapped(layer, x):
    return torch.func.vmap(layer)(x)


def forward_ad(layer, x):
    return torch.func.jvp(layer, (x,), (torch.ones_like(x),))[1]


def dual(layer, x):
    with torch.autograd.forward_ad.dual_level():
        out = layer(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
        return torch.autograd.forward_ad.unpack_dual(out).tangent


def autocast(layer, x):
    with torch.autocast("cpu", torch.bfloat16):
        return layer(x)


def switched_off(layer, x):
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        return layer(x)
    finally:
        torch._C._set_mkldnn_enabled(before)


def in_float64(layer, x):
    return copy.deepcopy(layer).double()(x.double())


@pytest.mark.parametrize("call", [vmapped, forward_ad, dual, autocast, switched_off, in_float64])
def test_linear_is_plain_where_a_mode_wants_to_see_it(taken, call):
    ours, plain = pair()
    x = torch.randn(2, 5, IN, generator=torch.Generator().manual_seed(1))
    assert torch.equal(call(ours, x), call(plain, x))
    assert not taken


@pytest.mark.parametrize("backend", ["composite", "reference", "triton"])
def test_other_backends_are_plain(taken, backend):
    ours, plain = pair(backend=backend)
    x = torch.randn(5, IN)
    assert torch.equal(ours(x), plain(x))
    assert not taken


def test_double_backward_and_mapped_gradients(taken):
    x = torch.randn(5, IN, generator=torch.Generator().manual_seed(1))
    found = []
    for layer in pair():
        leaf = x.clone().requires_grad_()
        (dx,) = torch.autograd.grad(layer(leaf).square().sum(), leaf, create_graph=True)
        second = torch.autograd.grad(dx.square().sum(), [leaf, layer.linear.weight])
        y, dy = layer(leaf), torch.ones(3, 5, OUT)
        mapped = torch.autograd.grad(y, leaf, dy, is_grads_batched=True, retain_graph=True)
        each = torch.func.vmap(lambda dy, y=y, x=leaf: torch.autograd.grad(y, x, dy, retain_graph=True)[0])(dy)
        found.append((*second, *mapped, each))
    for ours, plain in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)
    assert taken


def test_flops_are_those_of_nn_linear(taken):
    counts = []
    for layer in pair():
        with FlopCounterMode(display=False) as counter:
            layer(torch.ones(5, IN, requires_grad=True)).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", [(3, IN + 1), (), (3, IN)], ids=["width", "scalar", "bias-in-float64"])
def test_errors_are_those_of_nn_linear(taken, shape, dtype):
    messages, x = [], torch.zeros(shape, dtype=dtype)
    for layer in pair(dtype=dtype):
        if shape == (3, IN):
            layer.linear.bias = nn.Parameter(layer.linear.bias.detach().double())
        with pytest.raises(RuntimeError) as caught:
            layer(x)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_change_in_place_is_refused(taken):
    ours, _ = pair()
    x = torch.randn(5, IN)
    y = ours(x)
    with torch.no_grad():
        x.zero_()
    with pytest.raises(RuntimeError, match="linear: an input or output of this call was changed in place"):
        y.sum().backward()


def test_linear_compiles_without_a_break_or_a_second_time(taken):
    ours, plain = pair()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(ours, backend=counter, fullgraph=True, dynamic=True)
    for rows in (5, 70):
        x = torch.randn(rows, IN, generator=torch.Generator().manual_seed(rows))
        actual, expected = outcome(compiled, x), outcome(plain, x)
        for (_, a), (_, e) in zip(actual.items(), expected.items(), strict=True):
            torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-4)
    assert counter.frame_count == 1
    assert len(taken) >= 6


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("part", ["weight", "input"])
def test_a_tensor_subclass_comes_to_nn_linear(taken, part, compiled):
    """A DTensor and a quantised weight know nn.Linear's operator, and not ours."""
    ours, plain = pair()
    x = torch.randn(5, IN, generator=torch.Generator().manual_seed(1))
    if part == "weight":
        ours.linear.weight = nn.Parameter(TwoTensor(ours.linear.weight.detach(), ours.linear.weight.detach().clone()))
        given = x
    else:
        given = TwoTensor(x, x.clone())
    call = torch.compile(ours, backend="aot_eager", fullgraph=True) if compiled else ours
    torch.testing.assert_close(call(given).a, plain(x))
    assert not taken


def test_opcheck(taken):
    x, weight, bias = torch.randn(5, IN, requires_grad=True), torch.randn(OUT, IN), torch.randn(OUT)
    ops = torch.ops.crate_kernels
    torch.library.opcheck(ops.linear_fwd.default, (x, weight, bias), test_utils=("test_schema", "test_faketensor"))
    dy = torch.randn(5, OUT)
    for needs in ((True, True, True), (True, False, False), (False, True, False)):
        args = (dy, x.detach(), weight, *needs)
        torch.library.opcheck(ops.linear_bwd.default, args, test_utils=("test_schema", "test_faketensor"))


def hooked(linear):
    linear.register_forward_hook(lambda module, args, out: out + 1)


def accelerated(linear):
    given = linear.forward
    linear.forward = lambda x: given(x) + 1


def parametrized(linear):
    nn.utils.parametrize.register_parametrization(linear, "bias", PlusOne())


def pruned(linear):
    linear.register_forward_pre_hook(lambda module, args: setattr(module.bias, "data", module.bias.data + 1))


class PlusOne(nn.Module):
    def forward(self, bias):
        return bias + 1


WATCHED = {"hook": hooked, "forward": accelerated, "parametrized": parametrized, "pre-hook": pruned}


@pytest.mark.parametrize("watch", WATCHED.values(), ids=WATCHED)
@pytest.mark.parametrize("inside", [False, True], ids=["alone", "sequence"])
def test_what_watches_or_changes_a_layer_runs(taken, watch, inside):
    ours, plain = pair()
    x = torch.randn(5, IN)
    expected = plain(x) + 1
    watch(ours.linear)
    found = _linear.sequence(nn.Sequential(ours.linear, nn.Identity()), x, None) if inside else ours(x)
    torch.testing.assert_close(found, expected)
    assert not taken


@pytest.mark.parametrize("kind", ["full_backward", "full_backward_pre"])
def test_backward_hooks_run(taken, kind):
    ours, _ = pair()
    seen = []
    getattr(ours.linear, f"register_{kind}_hook")(lambda *_: seen.append(kind))
    ours(torch.randn(5, IN, requires_grad=True)).sum().backward()
    assert seen == [kind]
    assert not taken


def test_global_hooks_run(taken):
    ours, _ = pair()
    seen = []
    with nn.modules.module.register_module_forward_hook(lambda module, args, out: seen.append(type(module))):
        ours(torch.randn(5, IN))
    assert nn.Linear in seen
    assert not taken


def test_a_sequence_is_its_layers_unless_it_is_watched(taken):
    ours, plain = pair()
    x = torch.randn(5, IN)
    layers = nn.Sequential(ours.linear, nn.ReLU())
    torch.testing.assert_close(_linear.sequence(layers, x, None), plain(x).relu())
    assert len(taken) == 1
    layers.register_forward_hook(lambda module, args, out: out + 1)
    torch.testing.assert_close(_linear.sequence(layers, x, None), plain(x).relu() + 1)
    torch.testing.assert_close(_linear.sequence(nn.Identity(), x, None), x)
    assert len(taken) == 1
