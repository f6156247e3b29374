"""Subspace self-attention: loops = reference = every backend, and what the named cases do not show."""

import pytest
import torch

from crate_kernels import SubspaceCache, mssa, testing
from crate_kernels.ops.mssa import composite, logsumexp
from tests.ops.common import (
    DTYPES,
    EXACT,
    FORMS,
    TURNS,
    backends,
    cases_by_dtype,
    interpreted,
    keep_mask,
    offsets,
    outputs_and_gradients,
    over_tolerance,
    padding,
    randn,
)
from tests.ops.mssa.naive import mssa_loop

BACKENDS, FUSED = backends("mssa"), backends("mssa", reference=False)
# Of PyTorch's attention, which composite is made of, docs/numerics.md says how wrong gradients may be.
KERNELS = [p for p in FUSED if p.values[0] != "composite"]
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
@pytest.mark.parametrize(("case", "dtype"), cases_by_dtype("mssa"))
def test_within_tolerance(case, dtype, backend, device):
    assert over_tolerance(case, dtype, backend, device) == []


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
def test_very_different_norms_are_within_tolerance(case, dtype, backend, device):
    assert over_tolerance(case, dtype, backend, device) == []


def wrong(w, options, backend, mask=None):
    """Return what ``backend`` gets wrong of tokens that no case draws."""
    case, inputs = testing.Case("mssa", "own", w.shape, options), testing.Inputs({"w": w}, {"key_padding_mask": mask})
    eager, exact = (testing.run(case, one, "reference") for one in (inputs, inputs.to(torch.float64)))
    actual = testing.run(case, inputs, backend)
    return [m for m in testing.measure(actual, eager, exact, w.dtype) if not m.passed]


ALONE = {
    "full": {},
    "causal": {"causal": True},
    "lse": {"return_lse": True},
    "dropout": {"dropout_p": 0.3},
    "padded-dropout": {"dropout_p": 0.3, "longer": 30.0},
}


@TURNS
@pytest.mark.parametrize(("backend", "device"), KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("height", [3.0, 15.0, 50.0])
@pytest.mark.parametrize("options", ALONE.values(), ids=ALONE)
def test_a_token_alone_among_its_opposites(options, height, dtype, backend, device):
    """One weight is all: of an own score of 15 though the lse is exact enough to take, of 50 though it is not."""
    options = dict(options)
    longer = options.pop("longer", 1.0)
    # Of few channels, whose roundings do not average out.
    nheads = 4 if interpreted(backend, device) else 16
    axes = torch.eye(4).repeat(nheads, 1, 1)[None] + 0.1 * randn(1, nheads, 4, 4, dtype=torch.float32)
    w = torch.cat([axes, -axes, longer * axes], dim=2)[:, :, : 12 if longer > 1.0 else 8]
    w *= (height * torch.linspace(0.7, 1.0, w.shape[2])[:, None] / 0.5).sqrt() / axes.norm(dim=-1).mean()
    # Padded queries may be far longer than every key.
    mask = None if longer == 1.0 else (torch.arange(12, device=device) < 8)[None]
    assert wrong(w.to(device, dtype), options, backend, mask) == []


@TURNS
@pytest.mark.parametrize(("backend", "device"), KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("height", [0.1, 1.0])
@FORMS
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_the_only_token_has_weight_1_and_its_score_is_lse(packed, causal, height, dtype, backend, device):
    w = (height * randn(2, 3, 34, device=device)).to(dtype).requires_grad_()
    options = {"cu_seqlens": offsets([1, 1]).to(device), "max_seqlen": 2} if packed else {}
    tokens = w if packed else w[:, :, None]
    out, lse = mssa(tokens, causal=causal, return_lse=True, backend=backend, **options)
    g = randn(2, 3, 34, seed=1, dtype=dtype, device=device)
    assert torch.equal(out.view_as(w), w)
    assert torch.equal(torch.autograd.grad(out, w, g.view_as(out))[0], g)
    expected = w.double().square().sum(-1) * 34**-0.5
    actual = lse.T if packed else lse[:, :, 0]
    torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize(("backend", "device"), KERNELS)
@pytest.mark.parametrize("seed", range(4))
def test_few_keys_of_which_one_has_all_the_weight(seed, backend, device):
    """A difference to a delta of a rounded out would be multiplied by scores of hundreds."""
    w = 10 * randn(1, 3, 8, 9, seed=seed, dtype=torch.float32, device=device)
    assert wrong(w, {}, backend) == []


# Triton's interpreter also casts rows past the end, which are not stored.
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize(("backend", "device"), KERNELS)
def test_large_tokens_around_one_mean_by_a_tiny_scale(backend, device):
    """The gradient of their scores is subnormal in fp16, and delta of a rounded out mostly that rounding."""
    mean = 1e4 * torch.nn.functional.normalize(randn(2, 1, 33, seed=1), dim=-1)
    w = (randn(1, 2, 39, 33) + mean).to(device, torch.float16)
    assert wrong(w, {"scale": 1e-6}, backend) == []


@pytest.mark.parametrize(("backend", "device"), FUSED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("magnitude", [30.0, 1e4])
def test_nearly_equal_tokens_of_any_norm(magnitude, dtype, backend, device):
    """Of 1e4, a score and half the norms are rounded to 64: what only their difference bounds would overflow."""
    if backend == "composite" and dtype == torch.float32:
        pytest.skip("needs better gradients of PyTorch's attention: docs/numerics.md says how wrong they are there")
    last_bit = torch.randint(-1, 2, (1, 2, 70, 64), generator=torch.Generator().manual_seed(0)) * 2.0**-23
    w = magnitude * randn(1, 2, 1, 64, dtype=torch.float32) * (1 + last_bit)
    assert wrong(w.to(device, dtype), {"return_lse": True}, backend) == []


@pytest.mark.parametrize(("backend", "device"), FUSED)
@FORMS
def test_half_precision_survives_scores_that_overflow(causal, backend, device):
    exact = "AVX512" in torch.backends.cpu.get_cpu_capability() and not torch.cpu._is_amx_fp16_supported()
    if backend == "composite" and device == "cpu" and not exact:
        pytest.skip("needs PyTorch's attention of AVX-512 without AMX: docs/numerics.md says how wrong others are")
    case = testing.Case("mssa", f"overflow-{causal}", (1, 2, 65, 16), {"causal": causal}, magnitude=100.0)
    w = testing.make_inputs(case, torch.float16, device).differentiable["w"]
    assert w.double().square().sum(-1).max() > torch.finfo(torch.float16).max
    assert mssa(w, causal=causal, backend="reference").isnan().any(), "published code has become finite"
    assert over_tolerance(case, torch.float16, backend, device) == []


@pytest.mark.parametrize(("before", "masked"), [(0, False), (3, True)], ids=["the-first", "later"])
def test_the_first_tokens_of_a_cache_are_attended_to_without_a_mask(before, masked, monkeypatch):
    """PyTorch's attention is faster so: with a mask it leaves its fused causal kernels."""
    masks, attend = [], composite._attend
    monkeypatch.setattr(composite, "_attend", lambda *args: masks.append(args[2]) or attend(*args))
    cache = SubspaceCache(1, 2, 12, 8)
    with torch.no_grad():
        for tokens in (before, 5):
            mssa(randn(1, 2, tokens, 8, dtype=torch.float32), causal=True, cache=cache, backend="composite")
    assert (masks[-1] is not None) == masked
