"""mssa's tensor-core kernels under the emulator: every argument, within the tolerance of every backend."""

import math
from functools import partial

import pytest
import torch

from crate_kernels import mssa, testing
from crate_kernels._core import backends, operator
from crate_kernels.ops.mssa.call import MSSACall
from crate_kernels.ops.mssa.cuda import problem, tensor_cores
from tests.ops import test_not_numbers
from tests.ops.common import FORMS, keep_mask, offsets, over_tolerance, randn
from tests.ops.mssa import test_cancelling, test_threshold

HALVES = [pytest.param(torch.bfloat16, id="bf16"), pytest.param(torch.float16, id="fp16")]
DTYPES = pytest.mark.parametrize("dtype", HALVES)
CASES = [c for c in testing.cases("mssa") if c.options.get("phi") not in ("relu", "identity")]
CALLS = {
    "plain": {},
    "causal": {"causal": True},
    "padded": {"padding": "scattered"},
    "dropout": {"dropout_p": 0.3},
    "threshold": {"phi": "threshold", "threshold": 0.1, "causal": True},
}
# Rows near each other in norm, and further apart than the weights of any dtype reach.
SPREADS = {"near": {}, "far": {"special": "mixed norms", "magnitude": 2.0}}


def case_of(*shape, **options):
    name = f"{shape}-{options}"  # what expected results are kept by
    fields = {k: options.pop(k) for k in list(options) if k in testing.Case.__dataclass_fields__}
    return testing.Case("mssa", name, shape, {"return_lse": True, **options}, **fields)


def results(call, w, backend, **others):
    w = w.detach().requires_grad_()
    torch.manual_seed(0)
    out, lse = mssa(w, return_lse=True, backend=backend, **call, **others)
    upstream = (randn(*out.shape, seed=1, dtype=out.dtype), randn(*lse.shape, seed=2, dtype=lse.dtype))
    (dw,) = torch.autograd.grad((out, torch.where(lse.isfinite(), lse, 0.0)), w, upstream)
    return out.detach(), lse.detach(), dw


def mask_and_options(options, batch, seqlen):
    options = dict(options)
    kind = options.pop("padding", "")
    mask = testing.padding_mask(kind, batch, seqlen, torch.Generator().manual_seed(2)) if kind else None
    return {"key_padding_mask": mask, **options}


@pytest.mark.turns
@DTYPES
@pytest.mark.parametrize("case", CASES, ids=str)
def test_within_tolerance(case, dtype, backend):
    assert over_tolerance(case, dtype, backend, "cpu") == []


@DTYPES
@FORMS
def test_scores_of_ten_thousands_give_weights_of_one(causal, dtype, backend):
    """out is then w, bit for bit, and g.w - g.out vanishes: of two sums of one order, of numbers that are the same."""
    w = (400 * torch.nn.functional.normalize(randn(1, 2, 65, 16), dim=-1)).to(dtype).requires_grad_()
    out = mssa(w, causal=causal, backend=backend)
    assert torch.equal(out, w)
    upstream = randn(*w.shape, seed=1, dtype=dtype)
    assert torch.equal(torch.autograd.grad(out, w, upstream)[0], upstream)


@DTYPES
@pytest.mark.parametrize("shape", [(1, 8, 14, 3), (1, 2, 65, 16)], ids=str)
def test_gradients_by_a_tiny_scale_keep_their_bits(shape, dtype, backend):
    """Of scores, in fp16, they would be subnormal, and the tokens that they are multiplied by are large."""
    assert over_tolerance(case_of(*shape, scale=1e-6, magnitude=1e4), dtype, backend, "cpu") == []


@DTYPES
def test_small_gradients_of_long_tokens_keep_their_bits(dtype, backend):
    """Gradients of scores are 3e-8 here, half of fp16's smallest number."""
    assert test_cancelling.worst(test_cancelling.SMALL, dtype, backend) < 1


@DTYPES
@pytest.mark.parametrize("tokens", [1, 40])
def test_weights_of_one_beside_small_gradients(tokens, dtype, backend):
    test_cancelling.check_weights_of_one(tokens, dtype, backend)


@pytest.mark.parametrize("case", [c for c in CASES if c.shape[2] in (0, 64)], ids=str)
def test_what_tensor_cores_refuse_is_within_tolerance(case, backend, device, library):
    def kernels(dtype):
        library.emulated_launches()
        assert over_tolerance(case, dtype, backend, "cpu") == []
        names = [name.split("::")[1] for name in library.emulated_launches().splitlines()]
        assert bool(names) == bool(sum(case.lengths) or math.prod(case.shape))
        return {*names}

    assert kernels(torch.float32) <= {"plain"}
    for refusing in ({"capability": 75}, {"shared_limit": 64 * 1024}):
        device(**refusing)
        assert kernels(torch.bfloat16) <= {"plain"}
    device()
    assert kernels(torch.bfloat16) <= {"mssa"}


@FORMS
def test_every_row_tail(causal, backend):
    for seqlen in (*range(1, 19), 31, 32, 33, 127, 128, 129, 130):
        case = case_of(1, 1, seqlen, 24, causal=causal)
        assert over_tolerance(case, torch.bfloat16, backend, "cpu") == [], seqlen


@pytest.mark.parametrize("options", [{}, {"phi": "threshold", "threshold": 0.02}], ids=["softmax", "threshold"])
def test_every_head_dim_fits_the_least_shared_memory(options, backend, device):
    device(shared_limit=99 * 1024)
    for head_dim in (1, 2, 7, 8, 17, 31, 33, 48, 63, 65, 72, 97, 120, 129, 200, 255, 256):
        case = case_of(1, 1, 67, head_dim, **options)
        assert over_tolerance(case, torch.float16, backend, "cpu") == [], head_dim


@pytest.mark.turns
@DTYPES
@pytest.mark.parametrize("outputs", ["out", "lse"])
@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
def test_a_gradient_of_one_output_alone(options, outputs, dtype, backend):
    call = mask_and_options(options, 2, 65)

    def gradient(w, backend):
        w = w.detach().requires_grad_()
        torch.manual_seed(0)
        result = mssa(w, return_lse=True, backend=backend, **call)[outputs == "lse"]
        upstream = randn(*result.shape, dtype=torch.float64).bfloat16().to(result.dtype)
        return {"dw": torch.autograd.grad(torch.where(result.isfinite(), result, 0.0), w, upstream)[0]}

    w = randn(2, 2, 65, 40, dtype=dtype) * 0.6
    exact = gradient(w.double(), "reference")
    measured = testing.measure(gradient(w, backend), gradient(w, "reference"), exact, dtype)
    assert [m for m in measured if not m.passed] == []


@DTYPES
@pytest.mark.parametrize("seqlen", [2, 4, 16])
def test_equal_tokens_are_not_above_their_share(seqlen, dtype, backend):
    test_threshold.test_equal_tokens_are_not_above_their_share(seqlen, dtype, backend, "cpu")


@pytest.mark.parametrize("multiprocessors", [1, 100], ids=["pairs", "rows"])
@FORMS
def test_an_infinite_score_has_an_infinite_lse(causal, multiprocessors, backend, device):
    device(multiprocessors=multiprocessors)
    test_not_numbers.test_an_infinite_score_has_an_infinite_lse(causal, torch.bfloat16, backend, "cpu")


@pytest.mark.turns
@DTYPES
@pytest.mark.parametrize("head_dim", [40, 136])
@pytest.mark.parametrize("options", test_threshold.OPTIONS.values(), ids=test_threshold.OPTIONS)
def test_a_backward_selects_what_its_forward_did(options, head_dim, dtype, backend):
    test_threshold.test_a_backward_selects_what_its_forward_did(options, head_dim, dtype, backend, "cpu")


SHIFTS = {"full": {}, "causal": {"causal": True}, "padded": {"key_padding_mask": torch.arange(33) % 3 != 1}}


@DTYPES
@pytest.mark.parametrize("options", SHIFTS.values(), ids=SHIFTS)
def test_the_shift_with_dropout_sums_the_keys_that_a_row_sees(options, dtype, library):
    """The backward's scratch: ``sum_j P_ij R_ij g_i.w_j - dlse_i``. One key more or fewer shows in every row."""
    n, p, scale = 33, 0.3, 0.25  # the last tile of 16 keys has one
    w, g = randn(1, 2, n, 16, dtype=dtype), randn(1, 2, n, 16, seed=1, dtype=dtype)
    lse, dlse = (randn(1, 2, n, seed=s, dtype=torch.float32) for s in (2, 3))
    delta = randn(2, 1, 2, n, seed=4, dtype=torch.float32)
    mask = options.get("key_padding_mask")
    kept = keep_mask(5, p, 2, n, n) / (1 - p)
    seed = operator.draw_seed(torch.device("cpu"))
    call = MSSACall(None if mask is None else mask[None], None, 0, seed, "causal" in options, scale, p, None)
    fields = problem.of_backward(g, dlse, w, torch.zeros_like(w), lse, call, torch.empty_like(w), delta)
    tensor_cores.backward(fields, w, call)
    seen = torch.ones(n, n, dtype=torch.bool).tril(0 if call.causal else n)
    seen = seen if mask is None else seen & mask
    weights = (scale * w.double() @ w.double().mT).masked_fill(~seen, -torch.inf).softmax(-1)
    expected = (weights * kept * (g.double() @ w.double().mT)).sum(-1) - dlse
    torch.testing.assert_close(delta[0].double(), expected, rtol=1e-5, atol=1e-5)


LAYOUTS = {
    "permuted": lambda w: w.permute(2, 0, 3, 1).contiguous().permute(1, 3, 0, 2),
    "one element on": lambda w: torch.cat([w.flatten()[:1], w.flatten()])[1:].view(w.shape),
    "odd rows": lambda w: torch.cat([w, w[..., :1]], -1)[..., :-1],
    "every other": lambda w: torch.stack([w, w], -1)[..., 0],
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_strides_change_no_bit(layout, backend):
    w = randn(2, 3, 70, 64, dtype=torch.bfloat16)
    view = layout(w)
    assert torch.equal(view, w)
    for options in ({}, {"causal": True}):
        torch.testing.assert_close(results(options, view, backend), results(options, w, backend), rtol=0, atol=0)


def test_an_expanded_gradient_is_its_copy(backend):
    w = randn(1, 2, 70, 64, dtype=torch.bfloat16).requires_grad_()
    out = mssa(w, backend=backend)
    upstream = torch.ones((), dtype=w.dtype).expand_as(out)
    gradients = [torch.autograd.grad(out, w, g, retain_graph=True)[0] for g in (upstream, upstream.contiguous())]
    assert torch.equal(*gradients)


@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
def test_bits_are_those_of_any_device_and_order(options, backend, device):
    call, w = mask_and_options(options, 1, 150), randn(1, 2, 150, 48, dtype=torch.float16)
    expected = results(call, w, backend)
    # Of more multiprocessors than blocks, blocks have fewer warps.
    for properties in ({}, {"descending": True}, {"multiprocessors": 7}, {"multiprocessors": 1000}):
        device(**properties)
        torch.testing.assert_close(results(call, w, backend), expected, rtol=0, atol=0)


def test_a_prefix_does_not_depend_on_the_future(backend):
    w = randn(1, 2, 130, 16, dtype=torch.bfloat16)
    other = torch.cat([w[:, :, :65], 5 * w[:, :, 65:]], 2)
    (out, lse, _), (out_other, lse_other, _) = (results({"causal": True}, t, backend) for t in (w, other))
    assert torch.equal(out[:, :, :65], out_other[:, :, :65])
    assert torch.equal(lse[:, :, :65], lse_other[:, :, :65])


def test_dropout_mask_is_philox(backend):
    w = (2.0**-10 * torch.eye(64)).expand(1, 2, 64, 64).bfloat16()
    expected = keep_mask(3, 0.3, 2, 64, 64)
    factors = mssa(w, dropout_p=0.3, backend=backend) * (64 * 2.0**10)
    assert torch.equal(factors[0] > 0.5, expected)


@DTYPES
@FORMS
def test_offsets_out_of_range_are_clamped_and_leave_no_row_unwritten(causal, dtype, backend):
    kernels, w = backends.kernel("mssa", backend), randn(50, 2, 32, dtype=dtype)
    call = partial(MSSACall, None, max_seqlen=24, seed=None, causal=causal, scale=0.2, dropout_p=0.0, threshold=None)
    wrong = torch.tensor(
        [3, 10, 40, 47, 99], dtype=torch.int32
    )  # the second is longer than 24, the first rows no one's
    out, lse = kernels.forward(w, call(wrong))
    dw = kernels.backward(out, lse.clone(), w, out, lse, call(wrong))
    covered = torch.zeros(50, dtype=torch.bool)
    for start, end in ((3, 10), (10, 34), (40, 47), (47, 50)):
        covered[start:end] = True
        one = offsets((end - start,))
        expected, expected_lse = kernels.forward(w[start:end], call(one))
        assert torch.equal(out[start:end], expected)
        assert torch.equal(lse[:, start:end], expected_lse)
        gradient = kernels.backward(expected, expected_lse.clone(), w[start:end], expected, expected_lse, call(one))
        assert torch.equal(dw[start:end], gradient)
    for result in (out[~covered], lse[:, ~covered], dw[~covered]):
        assert not result.any()


@pytest.mark.turns
@DTYPES
@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize(
    ("seqlen", "head_dim"), [(1, 16), (16, 16), (17, 48), (33, 7), (64, 64), (80, 40), (197, 64), (256, 64)]
)
def test_pairs_are_within_tolerance(seqlen, head_dim, spread, dtype, backend, device):
    device(multiprocessors=2)
    assert over_tolerance(case_of(1, 2, seqlen, head_dim, **SPREADS[spread]), dtype, backend, "cpu") == []


@DTYPES
def test_pairs_of_equal_tokens_of_any_norm(dtype, backend, device):
    """A score and half the norms are then rounded to 64: their difference would overflow, or leave no weight."""
    device(multiprocessors=2)
    w = (1e4 * randn(1, 8, 1, 64)).expand(1, 8, 80, 64).to(dtype)
    out, lse = mssa(w, return_lse=True, backend=backend)
    assert torch.equal(out, w)
    exact = mssa(w.double(), return_lse=True, backend="reference")[1]
    torch.testing.assert_close(lse.double(), exact, rtol=1e-6, atol=0.0)


@DTYPES
def test_pairs_take_their_softmax_head_by_head(dtype, backend, device):
    device(multiprocessors=2)
    w = randn(1, 4, 80, 16, dtype=dtype)
    near = mssa(w, backend=backend)
    far = w.clone()
    far[:, 1] *= 2.0 ** torch.linspace(-3, 4, 80)[:, None]
    mixed = mssa(far, backend=backend)
    others = [0, 2, 3]
    assert torch.equal(near[:, others], mixed[:, others])
    exact = mssa(far[:, 1:2].double(), backend="reference")
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(mixed[:, 1:2].double(), exact, rtol=2 * eps, atol=2 * eps * exact.abs().max().item())


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
@pytest.mark.parametrize("multiprocessors", [2, 1000], ids=["pairs", "rows"])
def test_no_bad_token_is_hidden(multiprocessors, value, backend, device):
    device(multiprocessors=multiprocessors)
    w = randn(1, 4, 80, 16, dtype=torch.bfloat16)
    w[0, 1, 40, 3] = value
    out = mssa(w, backend=backend)
    assert not out[0, 1, 40].isfinite().any()
    assert out[0, [0, 2, 3]].isfinite().all()


def tiles(rows, columns):
    """How many products of 16x8x16 one matrix product of a class of 32 channels takes."""
    return math.ceil(rows / 16) * math.ceil(columns / 8) * 2


@pytest.mark.parametrize(
    ("seqlen", "call", "many", "expected"),
    [
        # Ten pairs of different tiles of 16 and five of a tile and itself, three products or two, and one of ones for
        # the sums of each side. The pair form has one class, of 64 channels.
        (80, {}, True, 10 * (3 * 2 * tiles(16, 16) + 2) + 5 * (2 * 2 * tiles(16, 16) + 1)),
        (128, {}, False, 2 * tiles(128, 128)),
        # Warps of 32 rows, of which no key of a tile of 64 is past.
        (128, {"causal": True}, False, 2 * (2 * tiles(32, 64) + 2 * tiles(32, 128))),
        (96, {"phi": "threshold", "threshold": 0.1}, False, 3 * tiles(96, 128)),
    ],
    ids=["pairs", "rows", "causal", "threshold"],
)
def test_the_forward_takes_as_many_products_as_its_form(
    seqlen, call, many, expected, backend, device, library, unrepeated
):
    device(multiprocessors=1 if many else 1000)
    before = library.probe_products()
    mssa(randn(1, 1, seqlen, 32, dtype=torch.bfloat16), backend=backend, **call)
    assert library.probe_products() - before == expected


@pytest.mark.parametrize(
    ("causal", "expected"),
    # Five a tile of 32 owned rows and 16 others; causal, four after the diagonal, three before it and five on it. And
    # g out^T of blocks of 16 rows, of which the diagonal is delta.
    [
        (False, 5 * tiles(128, 128) + 8 * tiles(16, 16)),
        (True, 5 * tiles(32, 128) + (4 + 3) * (tiles(128, 128) - tiles(32, 128)) // 2 + 8 * tiles(16, 16)),
    ],
    ids=["full", "causal"],
)
def test_the_backward_takes_five_products_a_tile(causal, expected, backend, device, library, unrepeated):
    device(multiprocessors=1000)
    w = randn(1, 1, 128, 32, dtype=torch.bfloat16).requires_grad_()
    out = mssa(w, causal=causal, backend=backend)
    # No row's delta is summed anew: none shows the rounding of its out, beside the largest number of a warp's rows.
    g = 0.1 * randn(*out.shape, seed=1, dtype=out.dtype)
    g[..., ::16, 0] = 8.0
    before = library.probe_products()
    torch.autograd.grad(out, w, g)
    assert library.probe_products() - before == expected
