"""Linear layers by another product: the values, gradients and errors of nn.Linear."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode

from crate_kernels._core import products
from tests.nn.linear import IN, OUT, SHAPES, check, needs_onednn, outcome, pair

pytestmark = needs_onednn


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_linear_is_exact(taken, shape, bias):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    check(*pair(bias), x)
    assert len(taken) == (3 if x.numel() else 0)


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


@pytest.mark.parametrize(("need_dx", "need_dweight"), [(True, True), (True, False), (False, True), (False, False)])
def test_flops_of_the_op_are_those_of_its_products(need_dx, need_dweight):
    ops, x, weight = torch.ops.crate_kernels, torch.ones(2, 5, IN), torch.ones(OUT, IN)
    dy = torch.ones(2, 5, OUT)
    with FlopCounterMode(display=False) as forward:
        ops.linear_fwd(x, weight, None)
    with FlopCounterMode(display=False) as backward:
        ops.linear_bwd(dy, x, weight, need_dx, need_dweight, True)
    product = 2 * 2 * 5 * IN * OUT
    assert (forward.get_total_flops(), backward.get_total_flops()) == (product, (need_dx + need_dweight) * product)


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


def test_opcheck(taken):
    x, weight, bias = torch.randn(5, IN, requires_grad=True), torch.randn(OUT, IN), torch.randn(OUT)
    ops = torch.ops.crate_kernels
    torch.library.opcheck(ops.linear_fwd.default, (x, weight, bias), test_utils=("test_schema", "test_faketensor"))
    dy = torch.randn(5, OUT)
    for needs in ((True, True, True), (True, False, False), (False, True, False)):
        args = (dy, x.detach(), weight, *needs)
        torch.library.opcheck(ops.linear_bwd.default, args, test_utils=("test_schema", "test_faketensor"))
