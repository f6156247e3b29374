"""mssa's fp32 CUDA kernels under the emulator: every named case in every dtype, and what the cases do not reach."""

import math

import pytest
import torch

from crate_kernels import mssa, testing
from crate_kernels._core import backends
from crate_kernels.ops.mssa.call import MSSACall
from tests.ops import test_not_numbers
from tests.ops.common import DTYPES, FORMS, keep_mask, offsets, outputs_and_gradients, over_tolerance, randn
from tests.ops.mssa import test_cancelling, test_dropout, test_outputs, test_threshold
from tests.ops.mssa.test_public import wrong
from tests.tools.emulator.plain import registered

CASES = [case for case in testing.cases("mssa") if case.options.get("phi") not in ("relu", "identity")]
LSE = {"return_lse": True}


def case(name, *shape, **kwargs):
    own = {key: kwargs.pop(key) for key in list(kwargs) if key in testing.Case.__dataclass_fields__}
    return testing.Case("mssa", f"plain-{name}", shape, {**LSE, **kwargs}, **own)


# Tiles are 64 owned rows by 32; channels come in chunks of 64, outputs in groups of 128.
SHAPES = [
    *(case(f"d{d}", 1, 2, 70, d) for d in (1, 3, 33, 50, 64, 65, 72, 129, 160, 200, 255)),
    *(case(f"causal-d{d}", 1, 2, 70, d, causal=True) for d in (20, 96, 192, 256)),
    *(case(f"n{n}", 1, 1, n, 24) for n in (2, 31, 32, 33, 95, 96, 97, 128, 129)),
    *(case(f"causal-n{n}", 1, 1, n, 24, causal=True) for n in (2, 31, 32, 33, 95, 96, 97, 128, 129)),
    case("wide-everything", 3, 2, 100, 136, causal=True, padding="scattered", dropout_p=0.2, scale=-0.1),
    case("wide-dropout", 2, 2, 70, 256, dropout_p=0.2),
    case("wide-packed", 0, 2, 0, 144, lengths=(70, 0, 3, 129), dropout_p=0.1),
    case("wide-causal-packed", 0, 2, 0, 80, lengths=(70, 0, 3, 129), causal=True),
    case("threshold-wide", 1, 2, 70, 136, phi="threshold", threshold=0.4, magnitude=0.6),
    case("threshold-pad-row", 3, 2, 70, 16, phi="threshold", threshold=0.3, magnitude=1.0, padding="row"),
    case("threshold-dropout", 2, 2, 70, 16, phi="threshold", threshold=0.3, magnitude=1.0, dropout_p=0.3),
    case("threshold-packed", 0, 2, 0, 16, phi="threshold", threshold=0.3, magnitude=1.0, lengths=(70, 0, 33)),
    case("pad-scattered-odd-rows", 3, 2, 97, 40, padding="scattered"),
    # A rounding of lse, or of an out that is nearly one token, times scores that are large.
    case("far-padded", 2, 1, 45, 42, padding="scattered", magnitude=30.0),
    case("far-padded-right", 3, 2, 40, 48, padding="right", magnitude=60.0),
    case("far-dropout", 2, 4, 45, 96, dropout_p=0.3, magnitude=5.0),
    case("few-keys-padded", 16, 4, 5, 113, padding="scattered", magnitude=1.2),
    case("few-keys-causal", 16, 4, 3, 255, causal=True, magnitude=1.0),
]


@pytest.fixture(scope="module")
def plain(library):
    with registered() as name:
        yield name


@pytest.mark.turns
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [*CASES, *SHAPES], ids=str)
def test_within_tolerance(plain, case, dtype):
    assert over_tolerance(case, dtype, plain, "cpu") == []


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"dropout_p": 0.3}], ids=str)
def test_what_rounding_took_from_lse_is_added_back(options, plain):
    """Of two equal tokens each has half the weight, whatever their score; an lse of thousands is rounded to 2e-4."""
    w = 140 * torch.nn.functional.normalize(randn(1, 2, 35, 16, dtype=torch.float32), dim=-1).repeat_interleave(
        2, dim=2
    )
    assert wrong(w, {**options, "return_lse": True}, plain) == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_turing_has_the_shared_memory(plain, device, dtype):
    device(capability=75, shared_limit=64 * 1024)
    for shape in ((1, 2, 70, 64), (1, 2, 70, 256)):
        assert over_tolerance(case(f"turing{shape[-1]}", *shape), dtype, plain, "cpu") == []


@pytest.mark.exhaustive
def test_error_does_not_grow_with_the_number_of_tokens(plain):
    assert over_tolerance(case("many-tokens", 1, 1, 4096, 16), torch.float32, plain, "cpu") == []


LAYOUTS = {
    "channels-first": lambda w: w.mT.contiguous().mT,
    "every-second-row": lambda w: w.repeat_interleave(2, 2)[:, :, ::2],
    "every-second-channel": lambda w: w.repeat_interleave(2, 3)[..., ::2],
    "heads-last": lambda w: w.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
    "off-by-one": lambda w: torch.cat([w.new_zeros(1), w.flatten()])[1:].view(w.shape),
    "odd-rows": lambda w: torch.cat([w, w[..., :1]], -1)[..., :-1],
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lay_out", LAYOUTS.values(), ids=LAYOUTS)
def test_strides_change_no_bit(plain, lay_out, dtype):
    same_bits(plain, lay_out, *(randn(2, 3, 70, 72, seed=s, dtype=dtype) for s in (0, 1)))


def same_bits(plain, lay_out, w, upstream):
    results = []
    for change in (lambda t: t, lay_out):
        leaf = change(w).detach().requires_grad_()
        out, lse = mssa(leaf, return_lse=True, backend=plain)
        results.append((out, lse, *torch.autograd.grad(out, leaf, change(upstream))))
    assert all(t.isfinite().all() for t in results[0])
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_channels_beside_the_heads_own_are_not_read(plain, dtype):
    """Rows start on 16 bytes and are no multiple of them long: what follows them in memory is something else."""
    drawn = (randn(1, 2, 70, 64, seed=s, dtype=dtype) for s in (0, 1))
    beside = (torch.cat([t[..., :50], torch.full_like(t[..., 50:], torch.nan)], -1)[..., :50] for t in drawn)
    same_bits(plain, torch.Tensor.contiguous, *beside)


def test_an_expanded_gradient_is_one(plain):
    """What ``out.sum()`` sends back has strides of 0."""
    w = randn(2, 2, 70, 64, dtype=torch.float32).requires_grad_()
    (dw,) = torch.autograd.grad(mssa(w, backend=plain).sum(), w)
    (expected,) = torch.autograd.grad(mssa(w, backend="reference").sum(), w)
    torch.testing.assert_close(dw, expected)


GRADIENTS = {
    "out": lambda out, lse: out.square().sum(),
    "lse": lambda out, lse: torch.where(lse.isfinite(), lse, 0.0).square().sum(),
}
OPTIONS = {
    "full": {},
    "causal": {"causal": True},
    "padded": {"key_padding_mask": torch.arange(70) < torch.tensor([70, 0, 40])[:, None]},
    "threshold": {"phi": "threshold", "threshold": 0.3},
    "threshold-causal": {"phi": "threshold", "threshold": 0.3, "causal": True},
}


@pytest.mark.parametrize("loss", GRADIENTS.values(), ids=GRADIENTS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("head_dim", [16, 96])
def test_gradients_of_one_output_only(plain, loss, options, head_dim):
    w = randn(3, 2, 70, head_dim, dtype=torch.float32)
    grads = []
    for name, dtype in ((plain, torch.float32), ("reference", torch.float64)):
        leaf = w.to(dtype).requires_grad_()
        grads += torch.autograd.grad(loss(*mssa(leaf, **options, return_lse=True, backend=name)), leaf)
    torch.testing.assert_close(grads[0].double(), grads[1], rtol=1e-5, atol=2e-5 * grads[1].abs().max().item())


@FORMS
def test_dropout_mask_is_philox(plain, causal):
    """Every weight's, over several tiles and heads: equal weights of orthogonal tokens show which are dropped."""
    batch, heads, n, p = 2, 2, 70, 0.3
    expected = keep_mask(3, p, batch * heads, n, n).view(batch, heads, n, n)
    w = (1e-3 * torch.eye(n)).expand(batch, heads, n, n)
    torch.manual_seed(3)
    kept = mssa(w, dropout_p=p, causal=causal, backend=plain) * (n / 1e-3) > 0.5
    assert torch.equal(kept, expected.tril() if causal else expected)
    shared = test_dropout.dropout_factors(p, plain, "cpu")
    assert set(shared.mul(1 - p).round().unique().tolist()) == {0.0, 1.0}


@pytest.mark.parametrize("options", [{}, {"causal": True, "dropout_p": 0.2}], ids=["full", "causal-dropout"])
@pytest.mark.parametrize("head_dim", [32, 160])
def test_no_order_of_threads_changes_a_bit(plain, device, options, head_dim):
    results = []
    for descending in (False, True, False):
        device(descending=descending)
        torch.manual_seed(0)
        w = randn(1, 2, 150, head_dim, dtype=torch.float32)
        results.append(outputs_and_gradients(lambda w: mssa(w, **options, return_lse=True, backend=plain), w))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@FORMS
@pytest.mark.parametrize("head_dim", [16, 160])
def test_scores_of_ten_thousands_give_weights_of_one(plain, head_dim, causal, dtype):
    """out is then w, bit for bit, and g.w - g.out vanishes: two sums of the same numbers in one order."""
    w = 400 * torch.nn.functional.normalize(randn(1, 2, 70, head_dim), dim=-1)
    w, upstream = w.to(dtype).requires_grad_(), randn(1, 2, 70, head_dim, seed=1, dtype=dtype)
    out = mssa(w, causal=causal, backend=plain)
    assert torch.equal(out, w)
    assert torch.equal(torch.autograd.grad(out, w, upstream)[0], upstream)


def test_a_probability_equal_to_the_threshold_is_not_above_it(plain):
    w = torch.ones(1, 1, 64, 16)  # 64 equal weights of 2^-6
    assert not mssa(w, phi="threshold", threshold=2**-6, backend=plain).any()
    below = 2**-6 - 2**-20
    torch.testing.assert_close(mssa(w, phi="threshold", threshold=below, backend=plain), 64 * below * w)


@pytest.mark.parametrize("seqlen", [2, 4, 16])
def test_equal_tokens_are_not_above_their_share(plain, seqlen):
    test_threshold.test_equal_tokens_are_not_above_their_share(seqlen, torch.float32, plain, "cpu")


@pytest.mark.parametrize("head_dim", [40, 160])
@pytest.mark.parametrize("options", test_threshold.OPTIONS.values(), ids=test_threshold.OPTIONS)
def test_a_backward_selects_what_its_forward_did(plain, options, head_dim):
    test_threshold.test_a_backward_selects_what_its_forward_did(options, head_dim, torch.float32, plain, "cpu")


@pytest.mark.parametrize("seqlen", [9, 130])
def test_causal_prefixes_do_not_depend_on_the_future(plain, seqlen):
    test_outputs.test_causal_prefixes_do_not_depend_on_the_future(plain, "cpu", seqlen)


def test_what_masks_hide_may_be_anything(plain):
    """Keys of other sequences and after a query: values that are no numbers give none."""
    w = randn(90, 2, 16, dtype=torch.float32)
    packing = {"cu_seqlens": offsets((40, 50)), "max_seqlen": 50}
    out, lse = mssa(w, **packing, return_lse=True, backend=plain)
    w[40:] = torch.nan
    other, other_lse = mssa(w, **packing, return_lse=True, backend=plain)
    assert torch.equal(other[:40], out[:40])
    assert torch.equal(other_lse[:, :40], lse[:, :40])
    assert other[40:].isnan().all()


@pytest.mark.parametrize(
    ("bounds", "covered"),
    [
        ((0, 30, 500), [(0, 30), (30, 90)]),
        ((0, 20, -7), [(0, 20)]),
        ((0, 95, 97), [(0, 90)]),
        ((0, 10, 90), [(0, 10), (10, 74)]),
    ],
    ids=["beyond", "negative", "past-the-end", "longer-than-max_seqlen"],
)
def test_offsets_are_clamped_on_the_device(plain, bounds, covered):
    """A GPU's offsets are not checked: rows outside every clamped sequence give 0, and nothing else is touched."""
    kernels = backends.kernel("mssa", plain)
    longest = 64 if bounds[1] == 10 else 90
    w, g = (randn(90, 2, 16, seed=s, dtype=torch.float32) for s in (0, 1))
    call = MSSACall(None, torch.tensor(bounds, dtype=torch.int32), longest, None, False, 0.25, 0.0, None)
    out, lse = kernels.forward(w, call)
    dw = kernels.backward(g, None, w, out, lse, call)
    outside = torch.ones(90, dtype=torch.bool)
    for first, stop in covered:
        outside[first:stop] = False
        leaf = w[first:stop].transpose(0, 1)[None].double().requires_grad_()
        expected = mssa(leaf, scale=0.25, backend="reference")
        (grad,) = torch.autograd.grad(expected, leaf, g[first:stop].transpose(0, 1)[None].double())
        for actual, wanted in ((out, expected), (dw, grad)):
            actual = actual[first:stop].transpose(0, 1)[None].double()
            torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-5)
    assert not out[outside].any()
    assert not dw[outside].any()
    assert not lse[:, outside].any()


def test_a_row_without_keys_is_zero(plain):
    w = randn(2, 2, 70, 16, dtype=torch.float32).requires_grad_()
    mask = torch.tensor([[True] * 70, [False] * 70])
    out, lse = mssa(w, key_padding_mask=mask, return_lse=True, backend=plain)
    (dw,) = torch.autograd.grad(out.sum() + torch.where(lse.isfinite(), lse, 0.0).sum(), w)
    assert not out[1].any()
    assert not dw[1].any()
    assert lse[1].eq(-math.inf).all()


@test_cancelling.HALF
@pytest.mark.parametrize("name", test_cancelling.CASES)
def test_a_delta_that_cancels(plain, name, dtype):
    assert test_cancelling.worst(test_cancelling.CASES[name], dtype, plain) < 1


@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=str)
def test_float32_gradients_of_ones(plain, options):
    """delta is 0 but for the rounding of out's sum over keys, which would cost dw 2 to 3.2 tolerances."""
    case = (test_cancelling.ones(230, 128), options, (0,))
    assert test_cancelling.worst(case, torch.float32, plain) < 0.5


@FORMS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_an_infinite_score_has_an_infinite_lse(plain, causal, dtype):
    test_not_numbers.test_an_infinite_score_has_an_infinite_lse(causal, dtype, plain, "cpu")


@pytest.mark.parametrize("draw", [test_not_numbers.own, test_not_numbers.tall])
@FORMS
def test_scores_near_the_largest_number_are_numbers(plain, causal, draw):
    test_not_numbers.test_a_score_near_the_largest_number_is_a_number(draw, causal, torch.float32, plain, "cpu")
    test_not_numbers.test_its_gradient_is_a_number_too(draw, causal, torch.float32, plain, "cpu")
