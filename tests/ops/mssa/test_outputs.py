"""What subspace self-attention returns: its lse, dtypes, layout, and what padding, packing and later tokens change."""

import math

import pytest
import torch
import torch.nn.functional as F

from crate_kernels import mssa, testing
from crate_kernels._core import checks
from tests.ops.common import DTYPES, EXACT, FORMS, backends, offsets, outputs_and_gradients, padding, randn

BACKENDS, FUSED = backends("mssa"), backends("mssa", reference=False)


def tokens(batch, heads, seqlen, head_dim, dtype=torch.float64, device="cpu"):
    """Heads cut from a projection, as a model has them."""
    return randn(batch, seqlen, heads, head_dim, dtype=dtype, device=device).transpose(1, 2)


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
    out, lse = mssa(tokens(3, 2, 7, 3), return_lse=True, backend=backend)
    assert out.dtype == lse.dtype == torch.float64


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
@pytest.mark.parametrize("which", [0, 1], ids=["out", "lse"])
@FORMS
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
        out = mssa(tokens(3, 2, 7, 3), backend=backend)
    assert out.dtype == torch.float64
    if backend != "reference":  # whose products autocast may round
        torch.testing.assert_close(out, mssa(tokens(3, 2, 7, 3), backend=backend), **EXACT)


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
    monkeypatch.setattr(checks, "_readable", lambda tensor: None)
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
        pytest.skip("needs kernels with phi='relu' and 'identity': composite alone has them, and runs these cases")
    options = dict(options)
    mask = padding(options.pop("pad", ""), 2, 9)
    w = tokens(2, 3, 9, 16, dtype=torch.float32, device=device).requires_grad_()
    out = mssa(w, key_padding_mask=None if mask is None else mask.to(device), **options, backend=backend)
    assert out.transpose(1, 2).flatten(2).data_ptr() == out.data_ptr()


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
@FORMS
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
