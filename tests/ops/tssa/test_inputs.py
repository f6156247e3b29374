"""Token statistics of odd inputs: heads that are switched off, small numbers, channels below a floor."""

from functools import partial

import pytest
import torch

from crate_kernels import TokenStatsCache
from crate_kernels.ops.tssa import op
from tests.ops.common import FORMS, TURNS, backends, offsets, outputs_and_gradients, randn
from tests.ops.tssa.common import call
from tests.ops.tssa.sums import DRAWS, FLOORS, floored_within_tolerance, measured

BACKENDS, FUSED = backends("tssa"), backends("tssa", reference=False)
HEADS, SEQLEN, HEAD_DIM = 3, 21, 16
EACH = pytest.mark.parametrize(("backend", "device"), BACKENDS)
EACH_FUSED = pytest.mark.parametrize(("backend", "device"), FUSED)


def tokens(device="cpu", batch=2, seqlen=SEQLEN, seed=0):
    return randn(batch, seqlen, HEADS, HEAD_DIM, seed=seed, dtype=torch.float32, device=device).transpose(1, 2)


def temps(device="cpu"):
    return torch.tensor([0.8, 1.0, 1.3], device=device)


def biases(device="cpu", seqlen=SEQLEN):
    return 0.1 * randn(HEADS, seqlen, seed=3, dtype=torch.float32, device=device)


def pack(w):
    """Return a padded batch of equal lengths as packed sequences, and the options that say so."""
    lengths = (w.shape[2],) * w.shape[0]
    options = {"cu_seqlens": offsets(lengths).to(w.device), "max_seqlen": w.shape[2]}
    return w.transpose(1, 2).flatten(0, 1), options


# Of numpy, where it interprets Triton's kernels.
NUMPY = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
FAR = -1e4  # so far below the other heads that the membership is 0, without anything infinite
OFF = {
    "temp": (False, "temp", -torch.inf, slice(None)),
    "causal-temp": (True, "temp", -torch.inf, slice(None)),
    "bias": (True, "bias", -torch.inf, slice(None)),
    "bias-of-some-tokens": (True, "bias", -torch.inf, slice(5, 18)),
    "bias-times-head_dim-overflows": (True, "bias", -3e38, slice(None)),
}


@TURNS
@EACH
@pytest.mark.parametrize("way", ["padded", "packed", "decoded"])
@pytest.mark.parametrize(("causal", "argument", "value", "where"), OFF.values(), ids=OFF)
@NUMPY
def test_a_head_may_be_off(causal, argument, value, where, way, backend, device):
    """It has no membership, and the others, also of their gradients, nothing that is not finite."""
    if way == "decoded" and not causal:
        pytest.skip("needs a cache, and only the causal form decodes")

    def results(value):
        w, temp, bias = tokens(device), temps(device), biases(device)
        if argument == "temp":
            temp[1] = value
        else:
            bias[1, where] = value
        parameters = (temp, bias) if argument == "bias" else (temp,)
        if way == "decoded":
            cache = TokenStatsCache(2, HEADS, HEAD_DIM, device=device)
            steps = [call(True, backend, cache=cache)(part, *parameters) for part in w.split([10, 1, 10], 2)]
            return [*(t for step in steps for t in step), *cache._tensors()[:3]]
        w, options = pack(w) if way == "packed" else (w, {})
        out, membership, dw, *others = outputs_and_gradients(call(causal, backend, **options), w, *parameters)
        on = torch.tensor([0, 2], device=device)  # the gradients of a head that is off are eager's 0 * inf
        return [out, membership, dw.index_select(1, on), *(t.index_select(0, on) for t in others)]

    actual = results(value)
    assert all(t.isfinite().all() for t in actual)
    torch.testing.assert_close(actual, results(FAR), rtol=0, atol=0)


@EACH
@NUMPY
def test_not_a_number_stays_one_in_a_cache(backend, device):
    w, cache = tokens(device), TokenStatsCache(2, HEADS, HEAD_DIM, device=device)
    w[0, 1, 4, 3] = torch.nan
    steps = [call(True, backend, cache=cache)(part, temps(device)) for part in w.split([10, 1, 10], 2)]
    for results in zip(*steps, strict=True):
        result = torch.cat(results, 2)
        assert result[0, :, 4:].isnan().all()
        assert result[0, :, :4].isfinite().all()
        assert result[1].isfinite().all()


SMALL = {"tokens": (1e-14, 1.0), "gradients": (1e-11, 1e-13), "gradients-of-one-channel": (1.0, 1e-13)}


@TURNS
@EACH_FUSED
@FORMS
@pytest.mark.parametrize("seqlen", [2, SEQLEN])
@pytest.mark.parametrize(("size", "gradient"), SMALL.values(), ids=SMALL)
def test_small_numbers_do_not_underflow_in_the_gradient(size, gradient, seqlen, causal, backend, device):
    """A gradient times w^2 would, for channels that c itself still holds."""
    draws = [(size * tokens(seqlen=seqlen, seed=n), gradient * tokens(seqlen=seqlen, seed=n + 1)) for n in DRAWS]
    if size == 1.0:
        for w, _ in draws:
            w[..., 5] *= 1e-11
    assert [m for m in measured(causal, backend, device, *draws) if not m.passed] == []


@FORMS
@pytest.mark.parametrize("seqlen", [2, SEQLEN])
def test_a_token_that_has_all_of_a_channel_moves_nothing_there(seqlen, causal):
    """Its w^2 / c is 1, and the gradient of its w cancels. Kernels multiply by 1 / c, which leaves more.

    docs/numerics.md says how much.
    """
    draws = [(tokens(seqlen=seqlen, seed=n), 1e-13 * tokens(seqlen=seqlen, seed=n + 1)) for n in DRAWS]
    for w, _ in draws:
        w[..., 5] *= 1e-11
        w[:, :, 1:, 5] *= 1e-5
    assert [m for m in measured(causal, "composite", "cpu", *draws) if not m.passed] == []


@EACH_FUSED
@FORMS
def test_what_all_heads_have_in_common_moves_nothing(causal, backend, device):
    """The membership of a token adds up to 1: a gradient that its heads share is all mean, however large it is."""
    upstream = (randn(2, HEADS, SEQLEN, seed=2) * 64).round() / 64  # exact beside 2^16, too

    def gradients(common):
        leaves = [t.requires_grad_() for t in (tokens(device), temps(device), *((biases(device),) * causal))]
        _, membership = call(causal, backend)(*leaves)
        return torch.autograd.grad(membership, leaves, (upstream + common).to(device, torch.float32))

    torch.testing.assert_close(gradients(65536.0), gradients(0.0), rtol=1e-5, atol=1e-5)


@TURNS
@EACH_FUSED
@pytest.mark.parametrize("seqlen", [1, SEQLEN])
@pytest.mark.parametrize(("causal", "channel"), FLOORS.values(), ids=FLOORS)
def test_a_channel_below_the_floor_passes_no_gradient_to_its_energy(causal, channel, seqlen, backend, device):
    floored_within_tolerance(partial(tokens, seqlen=seqlen), causal, channel, backend, device)


@EACH_FUSED
@FORMS
@pytest.mark.parametrize("bounds", [(-7, 9, 300, 40), (30, 10, 33, 33), (50, 90, 90)], ids=str)
def test_offsets_are_clamped_to_what_exists(bounds, causal, backend, device):
    """What such offsets mean is nobody's concern, but nothing outside a tensor is touched."""
    w, dout = (randn(33, HEADS, HEAD_DIM, dtype=torch.float32, device=device, seed=seed) for seed in (0, 1))
    inputs = (w, temps(device)) + ((None,) if causal else ())
    options = None, torch.tensor(bounds, dtype=torch.int32, device=device), 40, None, 0.0, 0, backend
    forward, backward = (op.tssa_causal_fwd, op.tssa_causal_bwd) if causal else (op.tssa_fwd, op.tssa_bwd)
    out, *saved = forward(*inputs, *options)
    assert out.isfinite().all()
    assert backward(dout, None, *inputs, *saved, *options)[0].isfinite().all()


@pytest.mark.parametrize(("backend", "device"), [p for p in FUSED if p.values[0] != "composite"])  # it rounds as eager
@FORMS
def test_a_single_token_is_its_own_sum(causal, backend, device):
    """Its w^2 / c is 1 whatever w is: two terms of the size of 1 / w cancel exactly, not to their rounding."""
    w = 1e-4 * tokens(device, seqlen=1)
    dw = outputs_and_gradients(call(causal, backend), w, temps(device))[2]
    exact = outputs_and_gradients(call(causal, "reference"), w.double(), temps(device).double())[2]
    assert (dw.double() - exact).abs().max() <= 8 * torch.finfo(torch.float32).eps * exact.abs().max()
