"""Subspace self-attention: loops = reference = every backend, and what the named cases do not show."""

import math

import pytest
import torch
import torch.nn.functional as F

from crate_kernels import mssa, testing
from crate_kernels._core import checks
from crate_kernels.ops.mssa import logsumexp
from tests.ops.common import (
    DTYPES,
    EXACT,
    backends,
    channels_in_order,
    keep_mask,
    offsets,
    outputs_and_gradients,
    over_budget,
    padding,
    randn,
)
from tests.ops.mssa.naive import mssa_loop

BACKENDS, FUSED = backends("mssa"), backends("mssa", reference=False)
BATCH, HEADS, SEQLEN, HEAD_DIM = 3, 2, 7, 3
LOOPS = {
    "plain": {},
    "causal": {"causal": True},
    "scale": {"scale": 0.7},
    "negative-scale": {"scale": -0.4, "causal": True},
    "pad-right": {"pad": "right"},
    "pad-scattered": {"pad": "scattered"},
    "pad-row": {"pad": "row"},
    "causal-pad-left": {"pad": "left", "causal": True},
    "causal-pad-scattered": {"pad": "scattered", "causal": True},
    "causal-pad-row": {"pad": "row", "causal": True},
    "dropout": {"dropout_p": 0.4},
    "dropout-causal-pad": {"dropout_p": 0.4, "causal": True, "pad": "left"},
    "threshold": {"phi": "threshold", "threshold": 0.3},
    "threshold-causal-pad-row": {"phi": "threshold", "threshold": 0.3, "causal": True, "pad": "row"},
    "threshold-dropout": {"phi": "threshold", "threshold": 0.2, "dropout_p": 0.4},
    "relu": {"phi": "relu"},
    "relu-causal-pad-row": {"phi": "relu", "causal": True, "pad": "row"},
    "relu-dropout": {"phi": "relu", "dropout_p": 0.4},
    "identity": {"phi": "identity"},
    "identity-pad-row": {"phi": "identity", "pad": "row"},
    "identity-causal-pad": {"phi": "identity", "causal": True, "pad": "left"},
}


def tokens(*shape, dtype=torch.float64, device="cpu", seed=0):
    """Heads cut from a projection, as a model has them."""
    batch, heads, seqlen, head_dim = shape or (BATCH, HEADS, SEQLEN, HEAD_DIM)
    return randn(batch, seqlen, heads, head_dim, dtype=dtype, device=device, seed=seed).transpose(1, 2)


@pytest.mark.parametrize("options", LOOPS.values(), ids=LOOPS)
def test_reference_is_the_loop(options):
    w, options = tokens(), dict(options)
    options["key_padding_mask"] = padding(options.pop("pad", ""), BATCH, SEQLEN)
    has_lse = options.get("phi", "softmax") in ("softmax", "threshold")
    keep = None
    if "dropout_p" in options:
        keep = keep_mask(5, options["dropout_p"], BATCH * HEADS, SEQLEN, SEQLEN).view(BATCH, HEADS, SEQLEN, SEQLEN)

    def loop(w):
        out, lse = mssa_loop(w, keep=keep, **options)
        return (out, lse) if has_lse else out

    expected = outputs_and_gradients(loop, w)
    actual = outputs_and_gradients(lambda w: mssa(w, **options, return_lse=has_lse, backend="reference"), w)
    torch.testing.assert_close(actual, expected, **EXACT)


@pytest.mark.parametrize("name", ["plain", "causal", "dropout", "threshold", "relu", "relu-dropout", "identity"])
def test_packed_reference_is_the_loop_on_each_sequence(name):
    lengths, options = (3, 0, 5, 1), LOOPS[name]
    has_lse = options.get("phi", "softmax") in ("softmax", "threshold")
    keep = keep_mask(5, 0.4, len(lengths) * HEADS, 5, 5) if "dropout_p" in options else None

    def loop(w):
        outs, lses = [], []
        for b, one in enumerate(w.split(lengths)):
            kept = None if keep is None else keep[None, b * HEADS : (b + 1) * HEADS]
            if len(one):
                out, lse = mssa_loop(one.transpose(0, 1)[None], keep=kept, **options)
                outs.append(out[0].transpose(0, 1))
                lses += [] if lse is None else [lse[0]]
        return (torch.cat(outs), torch.cat(lses, 1)) if has_lse else torch.cat(outs)

    def packed(w):
        packing = {"cu_seqlens": offsets(lengths), "max_seqlen": 5}
        return mssa(w, **packing, **options, return_lse=has_lse, backend="reference")

    w = randn(sum(lengths), HEADS, HEAD_DIM)
    torch.testing.assert_close(outputs_and_gradients(packed, w), outputs_and_gradients(loop, w), **EXACT)


@pytest.mark.parametrize("name", ["plain", "causal-pad-left", "relu", "identity"])
def test_gradcheck(name):
    options = dict(LOOPS[name])
    mask = padding(options.pop("pad", ""), 2, 3)
    w = tokens(2, 1, 3, 2).requires_grad_()
    assert torch.autograd.gradcheck(lambda w: mssa(w, key_padding_mask=mask, **options, backend="reference"), w)


def test_second_derivatives_of_the_reference():
    w = tokens(1, 1, 3, 2).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda w: mssa(w, causal=True, return_lse=True, backend="reference"), w)


@pytest.mark.parametrize(("backend", "device"), FUSED)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", testing.cases("mssa"), ids=str)
def test_within_budget(case, dtype, backend, device):
    with channels_in_order(backend, device):
        assert over_budget(case, dtype, backend, device) == []


@pytest.mark.parametrize("name", ["pad-scattered", "causal-pad-row"])
def test_logsumexp_in_chunks_of_rows_is_that_of_all(name, monkeypatch):
    options = dict(LOOPS[name])
    mask = padding(options.pop("pad"), BATCH, SEQLEN)

    def lse(w):
        return mssa(w, key_padding_mask=mask, **options, return_lse=True, backend="composite")[1]

    whole = outputs_and_gradients(lse, tokens())
    monkeypatch.setattr(logsumexp, "_CHUNK_ELEMENTS", 2 * BATCH * HEADS * SEQLEN)  # two rows of seven
    torch.testing.assert_close(outputs_and_gradients(lse, tokens()), whole, **EXACT)


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
@pytest.mark.parametrize(("threshold", "selected"), [(0.5, 0), (0.25, 2)], ids=["tie", "above"])
def test_threshold_is_strict(threshold, selected, backend, device):
    w = torch.ones(1, 1, 2, 16, device=device)  # equal tokens: every probability is one half, exactly
    out = mssa(w, phi="threshold", threshold=threshold, backend=backend)
    assert torch.equal(out, selected * threshold * w)


NORMS = [
    testing.Case("mssa", "wide-norms", (1, 2, 65, 16), {"return_lse": True}, magnitude=4.0, special="mixed norms"),
    testing.Case("mssa", "tiny", (1, 2, 65, 16), {"return_lse": True}, magnitude=1e-3),
]


@pytest.mark.parametrize(("backend", "device"), FUSED)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", NORMS, ids=str)
def test_very_different_norms_are_within_budget(case, dtype, backend, device):
    assert over_budget(case, dtype, backend, device) == []


def wrong(w, options, backend, mask=None):
    """Return what ``backend`` gets wrong of tokens that no case draws."""
    case, inputs = testing.Case("mssa", "own", w.shape, options), testing.Inputs({"w": w}, {"key_padding_mask": mask})
    eager, exact = (testing.run(case, one, "reference") for one in (inputs, inputs.to(torch.float64)))
    with channels_in_order(backend, w.device):
        actual = testing.run(case, inputs, backend)
    return [m for m in testing.measure(actual, eager, exact, w.dtype) if not m.passed]


ALONE = {
    "full": {},
    "causal": {"causal": True},
    "lse": {"return_lse": True},
    "dropout": {"dropout_p": 0.3},
    "padded-dropout": {"dropout_p": 0.3, "longer": 30.0},
}


@pytest.mark.parametrize(("backend", "device"), FUSED)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("height", [3.0, 15.0, 50.0])
@pytest.mark.parametrize("options", ALONE.values(), ids=ALONE)
def test_a_token_alone_among_its_opposites(options, height, dtype, backend, device):
    """One weight is all: of an own score of 15 though the lse is exact enough to take, of 50 though it is not."""
    if backend == "composite":
        pytest.skip("PyTorch's attention: docs/mssa.md says how wrong its gradients are there")
    options = dict(options)
    longer = options.pop("longer", 1.0)
    # Of few channels, whose roundings do not average out.
    axes = torch.eye(4).repeat(16, 1, 1)[None] + 0.1 * randn(1, 16, 4, 4, dtype=torch.float32)
    w = torch.cat([axes, -axes, longer * axes], dim=2)[:, :, : 12 if longer > 1.0 else 8]
    w *= (height * torch.linspace(0.7, 1.0, w.shape[2])[:, None] / 0.5).sqrt() / axes.norm(dim=-1).mean()
    # Padded queries may be far longer than every key.
    mask = None if longer == 1.0 else (torch.arange(12, device=device) < 8)[None]
    assert wrong(w.to(device, dtype), options, backend, mask) == []


@pytest.mark.parametrize(("backend", "device"), FUSED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("magnitude", [30.0, 1e4])
def test_nearly_equal_tokens_of_any_norm(magnitude, dtype, backend, device):
    """Of 1e4, a score and half the norms are rounded to 64: what only their difference bounds would overflow."""
    if backend == "composite" and dtype == torch.float32:
        pytest.skip("PyTorch's attention: docs/mssa.md says how wrong its gradients are there")
    last_bit = torch.randint(-1, 2, (1, 2, 70, 64), generator=torch.Generator().manual_seed(0)) * 2.0**-23
    w = magnitude * randn(1, 2, 1, 64, dtype=torch.float32) * (1 + last_bit)
    assert wrong(w.to(device, dtype), {"return_lse": True}, backend) == []


@pytest.mark.parametrize(("backend", "device"), FUSED)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_half_precision_survives_scores_that_overflow(causal, backend, device):
    case = testing.Case("mssa", f"overflow-{causal}", (1, 2, 65, 16), {"causal": causal}, magnitude=100.0)
    w = testing.make_inputs(case, torch.float16, device).differentiable["w"]
    assert w.double().square().sum(-1).max() > torch.finfo(torch.float16).max
    assert mssa(w, causal=causal, backend="reference").isnan().any(), "published code has become finite"
    assert over_budget(case, torch.float16, backend, device) == []


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_lse_is_the_logsumexp_of_the_scaled_scores(backend, device, dtype):
    w = tokens(2, 3, 5, 16, dtype=dtype, device=device)
    mask = torch.tensor([[True, True, False, True, False], [False] * 5], device=device)
    out, lse = mssa(w, scale=0.3, key_padding_mask=mask, return_lse=True, backend=backend)
    scores = 0.3 * (w.double() @ w.double().transpose(-1, -2))
    expected = scores.masked_fill(~mask[:, None, None], -math.inf).logsumexp(-1)
    assert (lse.dtype, tuple(lse.shape), out.dtype) == (torch.float32, (2, 3, 5), dtype)
    assert lse[1].eq(-math.inf).all()
    assert not out[1].any()
    tolerance = 4 * torch.finfo(dtype if backend == "reference" else torch.float32).eps
    torch.testing.assert_close(lse.double(), expected, rtol=tolerance, atol=tolerance * scores.abs().max().item())


@pytest.mark.parametrize("backend", ["reference", "composite"])
def test_float64_stays_float64(backend):
    out, lse = mssa(tokens(), return_lse=True, backend=backend)
    assert out.dtype == lse.dtype == torch.float64


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
@pytest.mark.parametrize("which", [0, 1], ids=["out", "lse"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_a_loss_may_be_of_one_output_alone(causal, which, backend, device):
    w = randn(2, 3, 9, 8, dtype=torch.float32, device=device)

    def one(backend):
        return lambda w: mssa(w, causal=causal, return_lse=True, backend=backend)[which]

    exact = outputs_and_gradients(one("reference"), w.double())
    assert exact[1].any()
    torch.testing.assert_close(
        [t.double() for t in outputs_and_gradients(one(backend), w)], exact, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("backend", ["reference", "composite"])
def test_autocast_leaves_float64_alone(backend):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = mssa(tokens(), backend=backend)
    assert out.dtype == torch.float64
    if backend != "reference":  # whose products autocast may round
        torch.testing.assert_close(out, mssa(tokens(), backend=backend), **EXACT)


def test_autocast_leaves_the_sums_of_identity_alone():
    case = next(c for c in testing.cases("mssa") if c.name == "identity-large")
    w = testing.make_inputs(case, torch.float16).differentiable["w"]
    options = {"phi": "identity", "scale": case.options["scale"], "backend": "composite"}

    def cast(x):
        with torch.autocast("cpu", dtype=torch.float16):
            return mssa(x, **options)

    expected, actual = outputs_and_gradients(lambda x: mssa(x, **options), w), outputs_and_gradients(cast, w)
    assert all(t.isfinite().all() for t in expected)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
def test_packed_lse_is_heads_by_total(backend, device):
    packing = {"cu_seqlens": offsets((2, 3)).to(device), "max_seqlen": 3}
    out, lse = mssa(randn(5, 4, 16, dtype=torch.float32, device=device), **packing, return_lse=True, backend=backend)
    assert (out.shape, lse.shape) == ((5, 4, 16), (4, 5))


@pytest.mark.parametrize(("backend", "device"), [p for p in FUSED if p.values[0] != "composite"])
def test_rows_of_no_sequence_are_zero(backend, device, monkeypatch):
    """There are some where offsets are read by kernels alone, which take them as they are."""
    monkeypatch.setattr(checks, "_values_readable", lambda tensor: False)
    w = randn(9, 2, 16, dtype=torch.float32, device=device)

    def packed(w, *bounds):
        options = {"cu_seqlens": torch.tensor(bounds, dtype=torch.int32, device=device), "max_seqlen": 3}
        return outputs_and_gradients(lambda w: mssa(w, **options, return_lse=True, backend=backend), w)

    out, lse, dw = packed(w, 0, 2, 5)
    assert not out[5:].any()
    assert not lse[:, 5:].any()
    assert not dw[5:].any()
    expected, expected_lse, _ = packed(w[:5], 0, 2, 5)
    torch.testing.assert_close((out[:5], lse[:, :5]), (expected, expected_lse))


LAYOUTS = {
    "plain": {},
    "causal": {"causal": True},
    "pad": {"pad": "right"},
    "causal-pad": {"causal": True, "pad": "row"},
    "dropout": {"dropout_p": 0.5},
    "threshold": {"phi": "threshold", "threshold": 0.1},
    "identity": {"phi": "identity"},
    "relu": {"phi": "relu"},
}


@pytest.mark.parametrize(("backend", "device"), FUSED)
@pytest.mark.parametrize("options", LAYOUTS.values(), ids=LAYOUTS)
def test_merging_the_heads_of_the_output_is_a_view(options, backend, device):
    if options.get("phi") in ("relu", "identity") and backend != "composite":
        pytest.skip("kernels have no phi='relu' or 'identity'; composite runs these cases")
    options = dict(options)
    mask = padding(options.pop("pad", ""), 2, 9)
    w = tokens(2, 3, 9, 16, dtype=torch.float32, device=device).requires_grad_()
    out = mssa(w, key_padding_mask=None if mask is None else mask.to(device), **options, backend=backend)
    assert out.transpose(1, 2).flatten(2).data_ptr() == out.data_ptr()


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_right_padding_equals_no_padding(backend, device, causal):
    w = tokens(2, 3, 9, 16, dtype=torch.float32, device=device)
    lengths = (4, 9)
    mask = torch.arange(9, device=device) < torch.tensor(lengths, device=device)[:, None]
    out = mssa(w, causal=causal, key_padding_mask=mask, backend=backend)
    for b, length in enumerate(lengths):
        alone = mssa(w[b : b + 1, :, :length], causal=causal, backend=backend)
        torch.testing.assert_close(out[b : b + 1, :, :length], alone)


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
@pytest.mark.parametrize("seqlen", [9, 130])
def test_causal_prefixes_do_not_depend_on_the_future(backend, device, seqlen):
    """Bit for bit: the same shape, so the same blocks, and only masked places differ."""
    w = tokens(1, 2, seqlen, 16, dtype=torch.float32, device=device)
    other = torch.cat([w[:, :, : seqlen // 2], 5 * w[:, :, seqlen // 2 :]], dim=2)
    out, lse = mssa(w, causal=True, return_lse=True, backend=backend)
    out_other, lse_other = mssa(other, causal=True, return_lse=True, backend=backend)
    assert torch.equal(out[:, :, : seqlen // 2], out_other[:, :, : seqlen // 2])
    assert torch.equal(lse[:, :, : seqlen // 2], lse_other[:, :, : seqlen // 2])


def dropout_factors(dropout_p, backend, device, batch=4, nheads=2, seqlen=64):
    """Read the factor of every weight: orthogonal tokens so short that all weights are 1 / seqlen."""
    w = (1e-3 * torch.eye(seqlen, device=device)).expand(batch, nheads, seqlen, seqlen)
    return mssa(w, dropout_p=dropout_p, backend=backend) * (seqlen / 1e-3)


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
def test_dropout_keeps_the_expectation(backend, device):
    p = 0.3
    factors = dropout_factors(p, backend, device)
    kept = factors > 0.5 / (1 - p)
    torch.testing.assert_close(factors[kept], torch.full_like(factors[kept], 1 / (1 - p)), rtol=1e-4, atol=0.0)
    assert factors[~kept].abs().max() < 1e-4
    # Five standard deviations of a binomial, of each weight's mean and of the whole.
    assert abs(kept.double().mean() - (1 - p)) < 5 * math.sqrt(p * (1 - p) / kept.numel())
    assert factors.var() == pytest.approx(p / (1 - p), rel=0.05)
    for dim in (1, 2, 3):
        counts = kept.double().sum(dim)
        assert counts.std() > 0.5 * math.sqrt(kept.shape[dim] * p * (1 - p)), "one mask value for all"


PHI_DROPOUT = {
    "threshold": {"phi": "threshold", "threshold": 0.5 / 64},
    "relu": {"phi": "relu"},
    "identity": {"phi": "identity"},
}


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
@pytest.mark.parametrize("options", PHI_DROPOUT.values(), ids=PHI_DROPOUT)
def test_every_phi_drops_weights(options, backend, device):
    if options["phi"] != "threshold" and backend not in ("reference", "composite"):
        pytest.skip("kernels have no phi='relu' or 'identity'; composite runs these cases")
    p, w = 0.3, torch.ones(4, 2, 64, 16, device=device)  # equal tokens: 64 equal weights a query
    kept = mssa(w, dropout_p=p, **options, backend=backend) / mssa(w, **options, backend=backend) * (1 - p)
    # Five standard deviations of the mean over 512 rows, and of the deviation measured on them.
    deviation = math.sqrt(p * (1 - p) / 64)
    assert abs(kept[..., 0].mean() - (1 - p)) < 5 * deviation / math.sqrt(4 * 2 * 64)
    assert kept[..., 0].std() == pytest.approx(deviation, rel=5 / math.sqrt(2 * 4 * 2 * 64))


@pytest.mark.parametrize(("backend", "device"), [p for p in BACKENDS if p.values[0] != "composite"])
def test_dropout_mask_is_philox(backend, device):
    if device == "cuda":
        pytest.skip("the CUDA generator draws another seed")
    expected = keep_mask(3, 0.3, 2, 16, 16)
    assert torch.equal(dropout_factors(0.3, backend, device, 1, 2, 16)[0] > 0.5, expected)


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
def test_dropout_repeats_with_the_seed(backend, device):
    w = tokens(2, 3, 9, 16, dtype=torch.float32, device=device)
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(mssa(w, dropout_p=0.5, backend=backend))
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_autocast_casts_as_attention_does(backend, device, dtype):
    w = tokens(2, 3, 9, 16, dtype=dtype, device=device).requires_grad_()
    with torch.autocast(device, dtype=torch.bfloat16):
        cast = F.scaled_dot_product_attention(w, w, w).dtype
        out, lse = mssa(w, return_lse=True, backend=backend)
    expected_out, expected_lse = mssa(w.to(cast), return_lse=True, backend=backend)
    assert (out.dtype, lse.dtype) == (cast, torch.float32)
    if backend != "reference":  # whose products autocast rounds, lse's too
        torch.testing.assert_close((out, lse), (expected_out, expected_lse), rtol=0, atol=0)
    (dw,) = torch.autograd.grad(out.float().sum() + lse.sum(), w)
    assert dw.dtype == dtype
    assert dw.isfinite().all()
