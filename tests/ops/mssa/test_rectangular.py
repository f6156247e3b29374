"""Attention of ranges of a sequence to others, put together, against dense attention in float64."""

import itertools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from crate_kernels._core import philox
from crate_kernels.ops.mssa import rectangular
from crate_kernels.ops.mssa.rectangular import RangeTokens, RectangularCall, composite
from tests.ops.common import EXACT
from tests.ops.mssa.naive import rectangular_gradient_loop, rectangular_loop
from tests.ops.mssa.rectangles import CASES as NAMED
from tests.ops.mssa.rectangles import drawn, in_dtype
from tests.ops.naive_philox import philox4x32_10

BATCH, NHEADS, SEQLEN, HEAD_DIM = 2, 2, 11, 3
CUTS = {
    "whole": [(0, 11)],
    "three": [(0, 4), (4, 5), (5, 11)],
    "out-of-order": [(7, 11), (0, 3), (3, 7)],
    "empty": [(0, 6), (6, 6), (6, 11)],
}
CASES = {
    "full": {},
    "causal": {"causal": True},
    "dropout": {"dropout_p": 0.4},
    "causal-dropout": {"causal": True, "dropout_p": 0.4},
    "negative-scale": {"scale": -0.9},
}
HEADS = {"first_head": 3, "nheads": 5}


def dense(w, call, mask):
    """The equation, differentiated by PyTorch."""
    scores = call.scale * (w @ w.mT)
    allowed = torch.ones(SEQLEN, SEQLEN, dtype=torch.bool)
    allowed = (allowed.tril() if call.causal else allowed).expand(BATCH, 1, -1, -1)
    allowed = allowed if mask is None else allowed & mask[:, None, None, :]
    has_key = allowed.any(-1, keepdim=True)
    lse = scores.masked_fill(~allowed, -torch.inf).logsumexp(-1)
    weights = torch.where(allowed, (scores - lse.masked_fill(~has_key[..., 0], 0.0).unsqueeze(-1)).exp(), 0.0)
    if call.seed is not None:
        places = torch.arange(SEQLEN)
        heads = torch.tensor([[b * call.nheads + call.first_head + h for h in range(NHEADS)] for b in range(BATCH)])
        args = (heads[:, :, None, None], places[:, None], places, w.dtype)
        weights = weights * philox.keep_factor(call.seed, call.dropout_p, *args)
    return weights @ w, lse


def ranges(cuts, *tensors):
    for first, last in cuts:
        yield (first, last), [t if t is None else t[:, :, first:last] for t in tensors]


@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_ranges_together_are_dense_attention(options, cuts, padded, monkeypatch):
    monkeypatch.setattr(composite, "_CHUNK_ELEMENTS", 24)  # several chunks of rows
    generator = torch.Generator().manual_seed(0)
    w, dout = torch.randn(2, BATCH, NHEADS, SEQLEN, HEAD_DIM, generator=generator, dtype=torch.float64)
    dlse = torch.randn(BATCH, NHEADS, SEQLEN, generator=generator, dtype=torch.float64)
    seed = torch.tensor(5) if "dropout_p" in options else None
    call = RectangularCall(**{"scale": 0.6, "seed": seed, **HEADS, **options})
    mask = None
    if padded:
        mask = torch.ones(BATCH, SEQLEN, dtype=torch.bool)
        mask[0, 3:6] = False
        mask[1, :2] = False  # causal: rows without a key
    w.requires_grad_()
    expected, expected_lse = dense(w, call, mask)
    dlse = dlse.masked_fill(expected_lse == -torch.inf, 0.0)
    finite = expected_lse.masked_fill(expected_lse == -torch.inf, 0.0)
    ((expected * dout).sum() + (finite * dlse).sum()).backward()
    dw, w = w.grad, w.detach()

    def tokens(first, last, *rest):
        return RangeTokens(first, w[:, :, first:last], None if mask is None else mask[:, first:last], *rest)

    out, lse = torch.zeros_like(w), torch.full(w.shape[:3], -torch.inf, dtype=w.dtype)
    for own, other in itertools.product(cuts, cuts):
        place = slice(*own)
        results = rectangular.forward(tokens(*own), tokens(*other), call, "composite")
        rectangular.merge_(out[:, :, place], lse[:, :, place], *results)
    torch.testing.assert_close(out, expected, **EXACT)
    torch.testing.assert_close(lse, expected_lse, **EXACT)

    delta = rectangular.delta(w, dout, out, lse, call, "composite")
    total = torch.zeros_like(w)
    sides = [tokens(*place, *parts) for place, parts in ranges(cuts, dout, lse, delta, dlse)]
    for own, other in itertools.product(sides, sides):
        total[:, :, own.start : own.stop] += rectangular.backward(own, other, call, "composite")
    torch.testing.assert_close(total, dw, **EXACT)


def test_half_tokens_are_added_up_in_float32():
    w = torch.randn(1, 2, 70, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    out, lse = rectangular.forward(RangeTokens(0, w), RangeTokens(0, w), RectangularCall(scale=0.5), "composite")
    assert out.dtype == lse.dtype == torch.float32
    expected, expected_lse = rectangular.forward(
        RangeTokens(0, w.double()), RangeTokens(0, w.double()), RectangularCall(scale=0.5), "composite"
    )
    torch.testing.assert_close(out, expected.float())
    torch.testing.assert_close(lse, expected_lse.float())


@pytest.mark.parametrize("low", [torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 4, 8).bfloat16()], ids=["dtype", "shape"])
def test_what_rounding_took_is_as_the_output(low):
    w = torch.zeros(1, 2, 5, 8).bfloat16()
    with pytest.raises(ValueError, match=r"^mssa backward: low must be .*, got"):
        rectangular.delta(w, w, w, torch.zeros(1, 2, 5), RectangularCall(), "composite", low)


@pytest.mark.parametrize("name", ["causal-padded-dropout", "dropout", "padded", "across", "causal-before"])
def test_composite_is_the_loops(name):
    """The same rows and columns around the same places, but few of them: the loops are slow."""
    case = NAMED[name]
    (first, last), (start, stop) = case.rows, case.columns
    middle = (max(first, start) + min(last, stop)) // 2
    case = case._replace(
        rows=(max(first, middle - 4), min(last, middle + 3)), columns=(max(start, middle - 3), min(stop, middle + 5))
    )
    rows, columns, call = drawn(case, torch.float64)
    rows, columns = (in_dtype(side, torch.float64) for side in (rows, columns))
    call = call.between(rows, columns)

    def keep(head, query, key):
        return call.seed is None or philox4x32_10((key, query, head, 0), int(call.seed))[0] >= call.dropout_p * 2**32

    out, lse = rectangular.forward(rows, columns, call, "composite")
    expected, expected_lse = rectangular_loop(rows.w, columns.w, call, keep)
    torch.testing.assert_close(out, expected, **EXACT)
    torch.testing.assert_close(lse, expected_lse, **EXACT)
    sides = [(side.w, *side.gradients()) for side in (rows, columns)]
    dw = rectangular.backward(rows, columns, call, "composite")
    torch.testing.assert_close(dw, rectangular_gradient_loop(*sides, call, keep), **EXACT)


def test_products_are_counted():
    """Causal ranges count what they see; all ranges of a sequence together, what one process counts."""
    w, rest = torch.randn(1, 2, 8, 4), torch.randn(1, 2, 8)
    early, late = (RangeTokens(start, w, None, w, rest, rest, rest) for start in (0, 8))
    with FlopCounterMode(display=False) as counter:
        for rows, columns in itertools.product((early, late), (early, late)):
            rectangular.forward(rows, columns, RectangularCall(causal=True), "composite")
            rectangular.backward(rows, columns, RectangularCall(causal=True), "composite")
    pairs, counts = 16 * 17 // 2, counter.get_flop_counts()["Global"]
    ops = torch.ops.crate_kernels
    assert counts[ops.mssa_rectangular_fwd] == 2 * 2 * 2 * 4 * pairs
    assert counts[ops.mssa_rectangular_bwd] == 5 * 2 * 2 * 4 * pairs


def test_products_of_a_range_are_those_that_it_sees():
    w, rest = torch.randn(1, 2, 8, 4), torch.randn(1, 2, 8)
    early, late = (RangeTokens(start, w, None, w, rest, rest, rest) for start in (0, 8))
    for rows, columns, pairs in ((early, late, 0), (late, early, 64), (late, late, 36)):
        with FlopCounterMode(display=False) as counter:
            rectangular.forward(rows, columns, RectangularCall(causal=True), "composite")
        assert counter.get_total_flops() == 2 * 2 * 2 * 4 * pairs


def test_lse_of_an_infinite_score_stays_infinite():
    out, lse = torch.zeros(1, 1, 1, 3), torch.full((1, 1, 1), -torch.inf)
    rectangular.merge_(out, lse, torch.ones(1, 1, 1, 3), torch.full((1, 1, 1), torch.inf))
    assert lse.item() == torch.inf
