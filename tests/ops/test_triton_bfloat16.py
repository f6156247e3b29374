"""bfloat16 in Triton's interpreter, operation by operation, against PyTorch's, bit for bit."""

import pytest
import torch

from crate_kernels._core import backends

pytest.importorskip("triton", reason="needs Triton's interpreter: pip install triton")
if not backends._INTERPRETED:
    pytest.skip("compares the interpreter with PyTorch: needs TRITON_INTERPRET=1", allow_module_level=True)

import triton  # only where it interprets
import triton.language as tl

from tests.tools.interpreter import bfloat16

BF16, N = torch.bfloat16, 256


def every():
    """All 2^16 numbers, NaNs and infinities among them."""
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(BF16)


def drawn(seed, shape=(N,), scale=3.0):
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(BF16)


@triton.jit
def _unary_kernel(x_ptr, out_ptr, OP: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)
    x = tl.load(x_ptr + at)
    if OP == "float32":
        tl.store(out_ptr + at, x.to(tl.float32))
    elif OP == "float16":
        tl.store(out_ptr + at, x.to(tl.float16))
    elif OP == "int32":
        tl.store(out_ptr + at, x.to(tl.int32))
    elif OP == "bfloat16":
        tl.store(out_ptr + at, x.to(tl.bfloat16))
    elif OP == "toward-zero":
        tl.store(out_ptr + at, x.to(tl.bfloat16, fp_downcast_rounding="rtz"))
    elif OP == "implicit":
        tl.store(out_ptr + at, x)
    elif OP == "negative":
        tl.store(out_ptr + at, -x)
    elif OP == "absolute":
        tl.store(out_ptr + at, tl.abs(x))
    elif OP == "scaled":
        tl.store(out_ptr + at, x * 0.3)
    elif OP == "full":
        tl.store(out_ptr + at, tl.full((N,), 0.3, tl.bfloat16) + x)
    elif OP == "sum":
        tl.store(out_ptr + at, tl.sum(x.to(tl.float32), 0) + tl.zeros((N,), tl.float32))
    elif OP == "maximum":
        tl.store(out_ptr + at, tl.max(x, 0) + tl.zeros((N,), tl.float32))
    elif OP == "running-sum":
        tl.store(out_ptr + at, tl.cumsum(x.to(tl.float32), 0))
    elif OP == "masked":
        tl.store(out_ptr + at, tl.load(x_ptr + at, at < 7, other=0.3))


# name: (numbers, what PyTorch makes of them)
UNARY = {
    "float32": (every(), lambda x: x.float()),
    "float16": (every(), lambda x: x.to(torch.float16)),
    "int32": (drawn(0, scale=300), lambda x: x.to(torch.int32)),
    "bfloat16": (torch.cat([every().float(), every().float() * 1.00390625, drawn(0).float()]), lambda x: x.to(BF16)),
    "implicit": (drawn(1, (4096,)).float() * 1.0019, lambda x: x.to(BF16)),
    "toward-zero": (
        drawn(2, (4096,)).float() * 1.0019,
        lambda x: (x.view(torch.int32) & -65536).view(torch.float32).to(BF16),
    ),
    "negative": (drawn(3), lambda x: -x),
    "absolute": (drawn(4), lambda x: x.abs()),
    "scaled": (drawn(5), lambda x: x * torch.tensor(0.3, dtype=BF16)),
    "full": (drawn(6), lambda x: torch.tensor(0.3, dtype=BF16) + x),
    "sum": (drawn(7).round(), lambda x: x.float().sum().expand(N)),
    "maximum": (drawn(8), lambda x: x.float().max().expand(N)),
    "running-sum": (drawn(9).round(), lambda x: x.float().cumsum(0)),
    "masked": (drawn(10), lambda x: torch.cat([x[:7], torch.full((N - 7,), 0.3, dtype=BF16)])),
    "from-float16": (every().to(torch.float16), lambda x: x.to(BF16)),
    "from-float64": (drawn(11).double() * 1.0019, lambda x: x.to(BF16)),
    "from-int32": (torch.arange(N, dtype=torch.int32) * 1001, lambda x: x.to(BF16)),
}


def same(found, expected):
    """Compare bit for bit; a NaN equals any other."""
    nan = expected.isnan() if expected.is_floating_point() else torch.zeros_like(expected, dtype=torch.bool)
    if expected.is_floating_point():
        assert torch.equal(found.isnan(), nan)
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[expected.element_size()]
    assert torch.equal(found.view(integers)[~nan], expected.contiguous().view(integers)[~nan])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of numbers that float16 does not have
@pytest.mark.parametrize("name", UNARY)
def test_one_operand(name):
    x, expected = UNARY[name]
    padded = torch.zeros(triton.next_power_of_2(len(x)), dtype=x.dtype)
    padded[: len(x)] = x
    out = torch.empty(len(padded), dtype=expected(x).dtype)
    op = "bfloat16" if name.startswith("from-") else name
    _unary_kernel[(1,)](padded, out, op, len(padded))
    same(out[: len(x)], expected(x))


@triton.jit
def _sum_kernel(x_ptr, out_ptr, N: tl.constexpr):
    tl.store(out_ptr, tl.sum(tl.load(x_ptr + tl.arange(0, N)), 0))


def test_sums_in_bfloat16_are_refused():
    with pytest.raises(triton.runtime.errors.InterpreterError, match="convert to float32 first"):
        _sum_kernel[(1,)](drawn(0), torch.empty(1, dtype=BF16), N)


@triton.jit
def _binary_kernel(x_ptr, y_ptr, out_ptr, OP: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)
    x, y = tl.load(x_ptr + at), tl.load(y_ptr + at)
    if OP == "+":
        result = x + y
    elif OP == "-":
        result = x - y
    elif OP == "*":
        result = x * y
    elif OP == "/":
        result = x / y
    elif OP == "<":
        result = x < y
    elif OP == ">=":
        result = x >= y
    elif OP == "==":
        result = x == y
    elif OP == "!=":
        result = x != y
    elif OP == "maximum":
        result = tl.maximum(x, y)
    elif OP == "minimum":
        result = tl.minimum(x, y)
    elif OP == "where":
        result = tl.where(x < y, x, y)
    elif OP == "mixed":
        result = x * y.to(tl.float32)
    tl.store(out_ptr + at, result)


BINARY = {
    "+": lambda x, y: x + y,
    "-": lambda x, y: x - y,
    "*": lambda x, y: x * y,
    "/": lambda x, y: x.float() / y.float(),
    "<": lambda x, y: x < y,
    ">=": lambda x, y: x >= y,
    "==": lambda x, y: x == y,
    "!=": lambda x, y: x != y,
    "maximum": lambda x, y: torch.maximum(x, y),
    "minimum": lambda x, y: torch.minimum(x, y),
    "where": lambda x, y: torch.where(x < y, x, y),
    "mixed": lambda x, y: x.float() * y.float(),
}


@pytest.mark.parametrize("op", BINARY)
def test_two_operands(op):
    x, y = drawn(1, (4096,)), drawn(2, (4096,))
    y[:1000], y[1000:1100] = x[:1000], -x[1000:1100]
    y[y == 0] = 1
    expected = BINARY[op](x, y)
    out = torch.empty(4096, dtype=expected.dtype)
    _binary_kernel[(1,)](x, y, out, op, 4096)
    if expected.dtype == torch.bool:
        assert torch.equal(out, expected)
    else:
        same(out, expected)


@triton.jit
def _dot_kernel(x_ptr, y_ptr, out_ptr, ROUND: tl.constexpr):
    rows, columns = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    x, y = tl.load(x_ptr + rows * 16 + columns), tl.load(y_ptr + rows * 16 + columns)
    if ROUND:  # as weights are, before they multiply tokens
        x = tl.exp2(x.to(tl.float32)).to(tl.bfloat16)
    tl.store(out_ptr + rows * 16 + columns, tl.dot(x, tl.trans(y), tl.full((16, 16), 1.0, tl.float32)))


@pytest.mark.parametrize("rounded", [False, True], ids=["loaded", "rounded"])
def test_products_are_of_the_numbers(rounded):
    """Of numbers of few bits every sum is exact, in any order."""
    x, y = drawn(1, (16, 16)), drawn(2, (16, 16)).round()
    x = x if rounded else x.round()
    left = torch.exp2(x.float()).to(BF16) if rounded else x
    out = torch.empty(16, 16)
    _dot_kernel[(1,)](x, y, out, rounded)
    expected = 1 + left.double() @ y.double().mT
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=0 if not rounded else 2e-4)


def test_numbers_are_rounded_to_nearest_and_ties_to_even():
    """1 + 2^-8 lies between two numbers, of which 1 is even; 1 + 3 2^-8 between two, of which the upper one is."""
    found = torch.from_numpy(bfloat16.encode(torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20]).numpy()))
    assert found.view(BF16).tolist() == [1.0, 1 + 4 * 2**-8, 1 + 2 * 2**-8]
