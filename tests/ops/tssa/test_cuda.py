"""tssa's CUDA kernels under the emulator: every form within the tolerance, and the order of sums."""

import itertools
from functools import partial

import pytest
import torch

from crate_kernels import testing
from crate_kernels.ops.tssa import op
from tests.ops.common import DTYPES, FORMS, outputs_and_gradients, over_tolerance
from tests.ops.tssa.common import DEVICES, WAYS, bias, call, going, temps, tokens
from tests.ops.tssa.sums import (
    DRAWN,
    FLOORS,
    distinct_heads,
    drawn_within_tolerance,
    floored_within_tolerance,
    nearly_all_of_a_token,
)


@pytest.mark.turns
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", testing.cases("tssa"), ids=str)
def test_within_tolerance(case, dtype, backend):
    assert over_tolerance(case, dtype, backend, "cpu") == []


def cases(causal):
    """List named cases on either side of the boundaries of tiles (4, 8), marks (8) and chunks (32, 64)."""
    options, form = {"return_membership": True, "causal": causal}, "causal" if causal else "full"
    for n in (32, 33, 72, 129):
        yield testing.Case("tssa", f"{form}-ways-n{n}", (1, 3, n, 32), options)
    for padding in ("left", "scattered", "row"):
        yield testing.Case("tssa", f"{form}-ways-pad-{padding}", (2, 3, 85, 32), options, padding=padding)
    dropout = {**options, "dropout_p": 0.3}
    yield testing.Case("tssa", f"{form}-ways-dropout-packed", (0, 3, 0, 32), dropout, lengths=(64, 0, 101, 1))
    yield testing.Case("tssa", f"{form}-ways-dropout", (2, 3, 69, 32), dropout)
    for special in ("dead channel", "mixed norms"):
        yield testing.Case("tssa", f"{form}-ways-{special}", (1, 3, 77, 32), options, special=special)


@pytest.mark.turns
@WAYS
@pytest.mark.parametrize("dtype", DTYPES[:2])  # fp16 takes bf16's kernels, and test_within_tolerance
@pytest.mark.parametrize("number", range(11))
def test_every_way_is_within_tolerance(number, dtype, causal, way, backend, device):
    going(device, way)
    assert over_tolerance(list(cases(causal))[number], dtype, backend, "cpu") == []


@FORMS
@pytest.mark.parametrize(("capability", "order"), [(80, False), (80, True), (90, True)])
def test_the_same_bits_in_any_order_of_threads(capability, order, causal, backend, device):
    inputs = (tokens(2, 3, 85, 32), temps(3), *((bias(3, 85),) if causal else ()))
    for way in ({"shared_limit": 10 * 1024}, {}):
        results = []
        for descending in (order, False):
            device(capability=capability, multiprocessors=16, descending=descending, **way)
            torch.manual_seed(3)
            results.append(outputs_and_gradients(call(causal, backend, dropout_p=0.2), *inputs))
        for one, other in zip(*results, strict=True):
            assert torch.equal(one, other)


@FORMS
@pytest.mark.parametrize("head_dim", [48, 64])
def test_logits_keep_what_tells_heads_apart(head_dim, causal, backend):
    distinct_heads(head_dim, causal, backend)


@FORMS
@pytest.mark.parametrize("head_dim", [48, 64])
@pytest.mark.parametrize(("nheads", "seed"), [(2, 1), (6, 0), (6, 1)])
def test_a_head_may_have_nearly_all_of_a_token(nheads, seed, head_dim, causal, backend):
    nearly_all_of_a_token(nheads, seed, head_dim, causal, backend)


@WAYS
def test_a_single_token_is_its_own_sum(causal, way, backend, device):
    """Its w^2 / c is 1 whatever w is: two terms of the size of 1 / w cancel exactly, not to their rounding."""
    going(device, way)
    w = 1e-4 * tokens(4, 3, 1, 32)
    dw = outputs_and_gradients(call(causal, backend), w, temps(3))[2]
    exact = outputs_and_gradients(call(causal, "reference"), w.double(), temps(3).double())[2]
    assert (dw.double() - exact).abs().max() <= 8 * torch.finfo(torch.float32).eps * exact.abs().max()


@pytest.mark.parametrize(("draw", "causal"), DRAWN.values(), ids=DRAWN)
def test_a_token_that_is_all_of_its_sums(draw, causal, backend):
    drawn_within_tolerance(draw, causal, backend, seeds=(*range(12), 31))


FLOOR_WAYS = [
    pytest.param(causal, way, channel, id=f"{name}-{way}")
    for name, (causal, channel) in FLOORS.items()
    for way in (["block"] if causal else DEVICES)
]


@pytest.mark.parametrize("seqlen", [1, 75])
@pytest.mark.parametrize(("causal", "way", "channel"), FLOOR_WAYS)
def test_a_channel_below_the_floor_passes_no_gradient_to_its_energy(causal, way, channel, seqlen, backend, device):
    going(device, way)
    floored_within_tolerance(partial(tokens, 2, 3, seqlen, 16), causal, channel, backend)


@FORMS
def test_half_precision_survives_squares_that_overflow(causal, backend):
    case = testing.Case("tssa", f"overflow-{causal}", (1, 3, 65, 16), {"causal": causal}, magnitude=200.0)
    assert over_tolerance(case, torch.float16, backend, "cpu") == []


@WAYS
def test_any_backward_follows_any_forward(way, causal, backend, device):
    """What is saved is the op's: composite takes up what the kernels saved, and the other way round."""
    going(device, way)
    w, dout = (tokens(1, 3, 69, 32, seed=seed) for seed in (0, 1))
    more = (bias(3, 69),) if causal else ()
    inputs, options = (w, temps(3), *more), (None, None, 0, torch.tensor(11), 0.3, 0)
    forward, backward = (op.tssa_causal_fwd, op.tssa_causal_bwd) if causal else (op.tssa_fwd, op.tssa_bwd)
    saved = {name: forward(*inputs, *options, name) for name in ("composite", backend)}
    exact = [t.double() for t in inputs]
    exact_saved = forward(*exact, *options, "composite")[1:]

    def gradients(first, second):
        grads = backward(dout, saved[first][1], *inputs, *saved[first][1:], *options, second)
        return dict(zip(("dw", "dtemp", "ddenom_bias"), grads, strict=False))

    oracle = backward(dout.double(), exact_saved[0], *exact, *exact_saved, *options, "composite")
    oracle = dict(zip(("dw", "dtemp", "ddenom_bias"), oracle, strict=False))
    eager = gradients("composite", "composite")
    for first, second in itertools.product(saved, saved):
        measured = testing.measure(gradients(first, second), eager, oracle, torch.float32)
        assert [m for m in measured if not m.passed] == [], (first, second)


@WAYS
def test_dropout_drops_what_the_reference_drops(way, causal, backend, device):
    going(device, way)
    outs = []
    for name in (backend, "reference"):
        torch.manual_seed(5)
        outs.append(call(causal, name, dropout_p=0.4)(tokens(2, 3, 69, 32), temps(3))[0])
    assert torch.equal(outs[0] == 0, outs[1] == 0)
    assert 0.2 < (outs[0] == 0).double().mean() < 0.6


@WAYS
def test_not_a_number_stays_one(causal, way, backend, device):
    going(device, way)
    w = tokens(1, 3, 75, 32)
    w[0, 1, 20, 3] = torch.nan
    out, membership = call(causal, backend)(w, temps(3))
    assert membership[:, :, 20:].isnan().all()
    assert out[:, :, 20:].isnan().all()
    assert out[:, :, :20].isfinite().all() == causal
