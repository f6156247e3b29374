"""What only Triton's kernels of mssa have: branches, tilings, stretches of a cache. Each against float64 or itself."""

import itertools
import math

import pytest
import torch

from crate_kernels import SubspaceCache, mssa, testing
from crate_kernels._core import checks, philox
from crate_kernels._triton import launch
from crate_kernels._triton.table import forced
from tests.ops.common import DTYPES, FORMS, TURNS, home, kernels, over_tolerance, randn
from tests.ops.mssa import test_cancelling

if "triton" not in kernels("mssa"):
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

import triton  # only where it can run
import triton.language as tl

from crate_kernels._triton import jit
from crate_kernels.ops.mssa.splits import choose_splits
from crate_kernels.ops.mssa.triton import delta, tables
from crate_kernels.ops.mssa.triton.tile import split_dims

DEVICE = home("triton")


@triton.jit(do_not_specialize=["drop_last"])
def _mask_kernel(seed_ptr, out_ptr, head, drop_last, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    keep = jit.keep_mask(tl.load(seed_ptr), head, rows, columns, drop_last)
    tl.store(out_ptr + rows * COLUMNS + columns, keep.to(tl.int8))


@pytest.mark.parametrize("seed", [0, 5, -1, 2**63 - 1, 0x299F31D0A4093822])
@pytest.mark.parametrize("p", [1e-12, 0.3, 0.7, 1 - 1e-12])
def test_the_mask_is_that_of_every_backend(seed, p):
    seed, out = torch.tensor(seed, device=DEVICE), torch.zeros(16, 32, dtype=torch.int8, device=DEVICE)
    _mask_kernel[(1,)](seed, out, 7, launch.drop_last(p), 16, 32)
    rows, columns = torch.arange(16, device=DEVICE)[:, None], torch.arange(32, device=DEVICE)
    expected = philox.keep_factor(seed, p, torch.tensor(7, device=DEVICE), rows, columns, torch.float64) > 0
    assert torch.equal(out.bool(), expected)


@pytest.mark.parametrize("widest", [64, 256])
def test_parts_are_powers_of_two_that_cover_a_head(widest):
    for head_dim in range(1, 257):
        dims = split_dims(head_dim, widest)
        assert len(dims.WIDTHS) <= (3 if widest == 256 else 4), head_dim
        assert all(16 <= width <= widest and width & (width - 1) == 0 for width in dims.WIDTHS), head_dim
        assert tuple(sum(dims.WIDTHS[:k]) for k in range(len(dims.WIDTHS))) == dims.FIRST, head_dim
        assert head_dim <= sum(dims.WIDTHS) < head_dim + (16 if head_dim <= 128 else 32), head_dim
    assert split_dims(48) == (48, (0, 32), (32, 16))
    assert split_dims(112) == (112, (0, 64, 96), (64, 32, 16))


def tokens(*shape, seed=0, dtype=torch.float32):
    batch, heads, seqlen, head_dim = shape
    return randn(batch, seqlen, heads, head_dim, seed=seed, dtype=dtype, device=DEVICE).transpose(1, 2)


def run(w, table=tables.FORWARD, causal=False, **changed):
    """Return out, lse and dw, with some entries of the configuration of ``table`` replaced."""
    w = w.detach().requires_grad_()
    config = table.config(w.device, w.shape[-1], w.shape[-2], causal, w.dtype)
    with forced(table, {**config, **changed}):
        out, lse = mssa(w, causal=causal, return_lse=True, backend="triton")
        (dw,) = torch.autograd.grad(out.sum() + lse.sum(), w)
    return out.detach(), lse.detach(), dw


def wide(seqlen):
    """Return norms further apart than either form of fp32 can take, the largest first: others are far from it."""
    return 2.0 ** torch.linspace(4, -4, seqlen, device=DEVICE)[:, None]


@FORMS
def test_rows_in_range_take_the_bounded_softmax_and_others_the_online_one(causal):
    """The online form gives the same bits wherever it is taken; the bounded one has other roundings."""
    near, far = tokens(1, 2, 65, 16), 2 * wide(65) * tokens(1, 2, 65, 16)
    for w, same in ((near, False), (far, True)):
        online = run(w, tables.FORWARD, BOUNDED=0, causal=causal)
        either = run(w, tables.FORWARD, BOUNDED=1, causal=causal)
        # In the causal form a row takes its form by itself, and the first ones are not far from the largest before.
        assert torch.equal(online[0][:, :, 16:], either[0][:, :, 16:]) == same
        torch.testing.assert_close(either[:2], online[:2], rtol=1e-4, atol=1e-4)


def gradient(w, backend):
    """Return dw by name, as ``testing.measure`` takes it."""
    w = w.detach().requires_grad_()
    out, lse = mssa(w, return_lse=True, backend=backend)
    return {"dw": torch.autograd.grad(out.sum() + lse.sum(), w)[0]}


# Rows whose normalisers are near, just within the reach of one exponential, and beyond it.
REACHES = {"near": (1.0, 10.0), "edge": (43.0, 44.0), "far": (100.0, float("inf"))}


def reaching(reach, seqlen, dtype):
    """Return tokens whose largest normaliser is within the limits of ``reach``."""
    w = tokens(1, 2, seqlen, 16)
    if reach == "edge":
        w *= (43.5 / (w.square().sum(-1).max() / 4)).sqrt()
    elif reach == "far":
        w *= wide(seqlen)
    low, high = REACHES[reach]
    assert low <= mssa(w.to(dtype).double(), return_lse=True, backend="reference")[1].abs().max() <= high
    return w.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reach", REACHES)
def test_one_exponential_and_two_are_within_tolerance(reach, dtype):
    w = reaching(reach, 65, dtype)
    eager, exact = gradient(w, "reference"), gradient(w.double(), "reference")
    for derived in (0, 1):
        found = {"dw": run(w, tables.BACKWARD, DERIVED=derived)[2]}
        assert [m for m in testing.measure(found, eager, exact, dtype) if not m.passed] == []


@pytest.mark.usefixtures("unrepeated")
@pytest.mark.skipif(DEVICE != "cpu", reason="counts what Triton's interpreter makes: needs TRITON_INTERPRET=1")
@pytest.mark.parametrize(("reach", "each"), [("near", 1), ("edge", 1), ("far", 2)])
def test_exponentials_of_a_score_in_the_backward(reach, each, monkeypatch):
    from triton.runtime import interpreter

    w = reaching(reach, 128, torch.float16).requires_grad_()
    out = mssa(w, backend="triton")
    counted, exponential = [], interpreter.InterpreterBuilder.create_exp2

    def create_exp2(self, x):
        counted.append(x.data.size if x.data.ndim == 2 else 0)
        return exponential(self, x)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_exp2", create_exp2)
    monkeypatch.setattr(delta, "_MAX_ROUNDING", math.inf)  # else ones have delta summed anew
    torch.autograd.grad(out.sum(), w)
    assert sum(counted) == 2 * each * 128 * 128


@FORMS
def test_bounded_sums_are_of_the_weights_as_the_products_have_them(causal):
    """79 equal tokens average to themselves, unless they are divided by the sum of weights that are not rounded."""
    w = torch.full((1, 4, 80, 16), 0.498046875, dtype=torch.bfloat16, device=DEVICE)  # the largest below a half
    w[:, :, 79] = 0
    # Just above the middle of two neighbours in bf16, times 2^11: norms that the bounded form still takes.
    score = (11 + math.log2(1 + 2**-8 + 2**-12)) * math.log(2)
    config = tables.FORWARD.config(w.device, 16, 80, causal, w.dtype)
    with forced(tables.FORWARD, {**config, "BOUNDED": 1}):
        out = mssa(w, causal=causal, scale=score / w[0, 0, 0].double().square().sum().item(), backend="triton")
    assert torch.equal(out[:, :, :79], w[:, :, :79])


TILINGS = [
    {"BLOCK_M": m, "BLOCK_N": n, "BOUNDED": bounded}
    for (m, n), bounded in itertools.product(((16, 64), (32, 16), (128, 32)), (0, 1))
]


@TURNS
@pytest.mark.parametrize("seqlen", [33, 80])
@FORMS
@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_every_tiling_of_the_forward_gives_the_same(tiling, causal, seqlen):
    w = tokens(2, 2, seqlen, 48)
    expected, expected_lse = mssa(w.double(), causal=causal, return_lse=True, backend="reference")
    config = {**tables.FORWARD.config(w.device, 48, seqlen, causal, w.dtype), **tiling}
    with forced(tables.FORWARD, config):
        out, lse = mssa(w, causal=causal, return_lse=True, backend="triton")
    torch.testing.assert_close((out.double(), lse.double()), (expected, expected_lse), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seqlen", [33, 80])
@FORMS
@pytest.mark.parametrize("tiling", [{"BLOCK_J": j, "BLOCK_I": i} for j, i in ((32, 32), (64, 16), (128, 64))], ids=str)
def test_every_tiling_of_the_backward_gives_the_same(tiling, causal, seqlen):
    w = tokens(1, 2, seqlen, 48)
    leaf = w.double().requires_grad_()
    out, lse = mssa(leaf, causal=causal, return_lse=True, backend="reference")
    (expected,) = torch.autograd.grad(out.sum() + lse.sum(), leaf)
    dw = run(w, tables.BACKWARD, causal=causal, **tiling)[2]
    torch.testing.assert_close(dw.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wanted", ["out", "lse"])
@pytest.mark.parametrize("options", [{}, {"phi": "threshold", "threshold": 0.3}], ids=["softmax", "threshold"])
def test_one_of_the_gradients_may_be_missing(options, wanted):
    w = 2 * tokens(1, 2, 33, 16)
    grads = []
    for x, backend in ((w, "triton"), (w.double(), "reference")):
        leaf = x.detach().requires_grad_()
        out, lse = mssa(leaf, return_lse=True, backend=backend, **options)
        grads.append(torch.autograd.grad((out if wanted == "out" else lse).sum(), leaf)[0].double())
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-5)


def test_two_backwards_give_the_same_bits():
    w = tokens(2, 3, 65, 16)
    for first, second in zip(run(w), run(w), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("bounds", [(0, 20, 50), (0, 70), (-3, 20, 90), (0, 40, 20, 70), (2, 9, 33)], ids=str)
@pytest.mark.parametrize("longest", [10, 50])
def test_offsets_out_of_range_leave_no_row_unwritten(bounds, longest, monkeypatch):
    monkeypatch.setattr(checks, "_readable", lambda tensor: None)
    w = randn(70, 2, 16, dtype=torch.float32, device=DEVICE).requires_grad_()
    packing = {"cu_seqlens": torch.tensor(bounds, dtype=torch.int32, device=DEVICE), "max_seqlen": longest}
    out, lse = mssa(w, **packing, return_lse=True, backend="triton")
    (dw,) = torch.autograd.grad(out.sum() + lse.sum(), w)
    assert all(t.isfinite().all() for t in (out, lse, dw))
    outside = [row for row in range(70) if not bounds[0] <= row < bounds[-1]]
    assert not any(t.any() for t in (out[outside], lse[:, outside], dw[outside]))


@pytest.mark.parametrize("lengths", [(70, 70), (0, 65), (40, 3)], ids=str)
@pytest.mark.parametrize("new", [1, 5])
def test_decoding_in_stretches_equals_the_full_forward(new, lengths):
    """Sequences of 0 and 3 tokens leave most of the stretches empty."""
    w = tokens(2, 1, 80, 16)
    cache = SubspaceCache(2, 1, 80, 16, device=DEVICE)
    cache.data.copy_(w)
    cache.lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
    cache._bound, cache._uniform = max(lengths), False
    config = tables.DECODE.config(w.device, 16, new, True, w.dtype)
    processors = config["RESIDENT"] * launch.multiprocessors(w.device)
    assert choose_splits(2, processors, triton.cdiv(max(lengths), config["BLOCK_N"])) > 1
    block = tokens(2, 1, new, 16, seed=1)
    out, lse = mssa(block, causal=True, cache=cache, return_lse=True, backend="triton")
    for b, length in enumerate(lengths):
        sequence = torch.cat([w[b : b + 1, :, :length], block[b : b + 1]], 2).double()
        expected = mssa(sequence, causal=True, return_lse=True, backend="reference")
        actual = out[b : b + 1].double(), lse[b : b + 1].double()
        torch.testing.assert_close(actual, tuple(t[:, :, length:] for t in expected), rtol=1e-5, atol=1e-5)
        assert torch.equal(cache.data[b, :, length : length + new], block[b])
    assert cache.lengths.tolist() == [length + new for length in lengths]


@pytest.mark.parametrize(
    ("blocks", "processors", "tiles", "expected"),
    [(106, 132, 100, 1), (1, 132, 1, 1), (1, 132, 100, 85), (12, 132, 64, 10), (48, 264, 1000, 5), (1, 264, 0, 1)],
)
def test_sequences_are_split_until_the_device_is_full(blocks, processors, tiles, expected):
    assert choose_splits(blocks, processors, tiles) == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("magnitude", [0.6, 3.0])
def test_the_gradient_of_out_alone_is_within_tolerance(dtype, magnitude):
    """Without a gradient of lse, one multiply-add has a difference to delta and its weight."""
    w, g = (randn(1, 2, 130, 32, dtype=dtype, seed=seed, device=DEVICE) for seed in (0, 1))
    found = {}
    for name, x in (("triton", w * magnitude), ("reference", w * magnitude), ("exact", (w * magnitude).double())):
        x = x.detach().requires_grad_()
        out = mssa(x, scale=32**-0.5, backend="triton" if name == "triton" else "reference")
        (found[name],) = torch.autograd.grad(out, x, g.to(x.dtype))
    exact = found["exact"]
    tolerance = (found["reference"] - exact).abs().max() + torch.finfo(dtype).eps * exact.abs().max()
    assert (found["triton"] - exact).abs().max() <= 3 * tolerance


def test_float32_gradients_of_ones():
    """delta is 0 but for the rounding of out's sum over keys, which would cost dw 0.7 to 1.2 tolerances."""
    case = (test_cancelling.ones(230, 128), {}, (0,))
    assert test_cancelling.worst(case, torch.float32, "triton", DEVICE) < 0.5


@triton.jit
def _difference_kernel(a_ptr, b_ptr, c_ptr, out_ptr, SIZE: tl.constexpr, ROUNDED: tl.constexpr):
    at = tl.arange(0, SIZE)
    a, b, c = tl.load(a_ptr + at), tl.load(b_ptr + at), tl.load(c_ptr + at)
    tl.store(out_ptr + at, (jit.rounded_product(a, b) if ROUNDED else a * b) - c)


@pytest.fixture
def fused():
    """Let products be fused with sums in the interpreter, as compilers for GPUs do."""
    if DEVICE != "cpu":
        yield
        return
    from tests.tools.interpreter import contraction

    with contraction.computed():
        yield


@pytest.mark.parametrize("rounded", [False, True], ids=["fused", "rounded"])
def test_a_rounded_product_less_itself_is_0(rounded, fused):
    a, b = (randn(64, seed=seed, dtype=torch.float32, device=DEVICE) for seed in (0, 1))
    out = torch.full_like(a, math.nan)
    launch.run(_difference_kernel, 1, a_ptr=a, b_ptr=b, c_ptr=a * b, out_ptr=out, SIZE=64, ROUNDED=rounded)
    assert bool((out == 0).all()) == rounded
    assert out.abs().max() <= 2**-24 * (a * b).abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["saturated", "causal-saturated", "dropout-saturated", "pad-right", "zero-scale"])
def test_no_product_is_fused_with_what_is_subtracted_from_a_score(name, dtype, fused):
    """The largest weight of a row is then exactly 1: gradients of saturated rows are differences of equal numbers."""
    case = next(case for case in testing.cases("mssa") if case.name == name)
    assert over_tolerance(case, dtype, "triton", DEVICE) == []
