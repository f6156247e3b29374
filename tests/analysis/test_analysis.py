"""Measurements of white-box models, against closed forms, autograd and the invariances they must have."""

import math
import re

import pytest
import torch
import torch.nn.functional as F

from crate_kernels import analysis

F64 = torch.float64


def _randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def _orthogonal(dim, seed=0):
    return torch.linalg.qr(_randn(dim, dim, seed=seed)).Q


def _subspaces(nsubspaces, head_dim, seed=0):
    """Mutually orthogonal subspaces that fill the space: (nsubspaces, nsubspaces * head_dim, head_dim)."""
    return _orthogonal(nsubspaces * head_dim, seed).unflatten(1, (nsubspaces, head_dim)).movedim(1, 0)


TOKENS = [
    pytest.param((12, 5), id="tall"),
    pytest.param((5, 12), id="wide"),
    pytest.param((7, 7), id="square"),
    pytest.param((1, 4), id="one-token"),
    pytest.param((2, 3, 9, 4), id="batched"),
]


@pytest.mark.parametrize("shape", TOKENS)
def test_coding_rate_is_the_sum_over_eigenvalues(shape):
    z, (seqlen, dim) = _randn(*shape), shape[-2:]
    squares = torch.linalg.svdvals(z) ** 2
    expected = 0.5 * torch.log(1 + dim / (seqlen * 0.25) * squares).sum(-1)
    torch.testing.assert_close(analysis.coding_rate(z, eps_squared=0.25), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("shape", TOKENS)
def test_coding_rate_factors_the_smaller_side(shape, monkeypatch):
    sizes, qr = [], torch.linalg.qr
    monkeypatch.setattr(torch.linalg, "qr", lambda a: sizes.append(a.shape[-2:]) or qr(a))
    analysis.coding_rate(_randn(*shape))
    assert sizes == [(sum(shape[-2:]), min(shape[-2:]))]


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e5, 1e6, 1e8])
@pytest.mark.parametrize("shape", [(12, 5), (5, 12), (40, 16)], ids=["tall", "wide", "many"])
def test_rates_of_equal_tokens(shape, size):
    """One singular value is all of them: beside its square, 1 is beyond float64."""
    (seqlen, dim), token = shape, size * _randn(shape[1])
    z, alpha = token.expand(shape), shape[1] / (shape[0] * 0.01)
    expected = 0.5 * torch.log1p(alpha * seqlen * token.square().sum())
    torch.testing.assert_close(analysis.coding_rate(z), expected, rtol=1e-12, atol=1e-14)
    subspaces = torch.eye(dim, dtype=F64)[None]
    torch.testing.assert_close(analysis.subspace_coding_rate(z, subspaces), expected, rtol=1e-12, atol=1e-14)
    reduction = analysis.rate_reduction(z, subspaces)
    torch.testing.assert_close(reduction, torch.zeros_like(reduction), rtol=0, atol=1e-12 * float(expected))


EQUAL = {
    "equal-values": 3 * torch.eye(6, dtype=F64)[:, :4],
    "zeros": torch.zeros(5, 3, dtype=F64),
    "equal-tokens": _randn(4).expand(9, 4),
    "equal-tokens-wide": _randn(9).expand(4, 9),
    "pairs": torch.block_diag(*[2 * torch.ones(2, 2, dtype=F64)] * 3),
}


@pytest.mark.parametrize("z", EQUAL.values(), ids=EQUAL)
def test_gradients_where_singular_values_are_equal(z):
    """Once against the closed form, a Z (I + a Z^T Z)^-1, and twice against differences."""
    z = z.clone().requires_grad_()
    alpha = z.shape[1] / (z.shape[0] * 0.5)
    (gradient,) = torch.autograd.grad(analysis.coding_rate(z, eps_squared=0.5), z)
    inverse = torch.linalg.inv(torch.eye(z.shape[1], dtype=F64) + alpha * z.mT @ z)
    torch.testing.assert_close(gradient, alpha * z @ inverse, rtol=1e-12, atol=1e-12)
    subspaces = torch.eye(z.shape[1], dtype=F64)[None]
    torch.testing.assert_close(analysis.rate_gradient(z, subspaces, eps_squared=0.5), gradient)
    assert torch.autograd.gradcheck(lambda z: analysis.rate_gradient(z, subspaces, eps_squared=0.5), z)
    assert torch.autograd.gradgradcheck(lambda z: analysis.coding_rate(z, eps_squared=0.5), z)


def test_coding_rate_of_orthogonal_tokens():
    rate = analysis.coding_rate(3 * torch.eye(6), eps_squared=0.5)
    assert rate.dtype == F64
    assert rate.item() == pytest.approx(0.5 * 6 * math.log(1 + 9 / 0.5), rel=1e-14)


@pytest.mark.parametrize("shape", TOKENS)
def test_rates_do_not_see_a_rotation(shape):
    z, dim = _randn(*shape), shape[-1]
    subspaces, rotation = _randn(3, dim, 2, seed=1), _orthogonal(dim, seed=2)
    torch.testing.assert_close(analysis.coding_rate(z @ rotation), analysis.coding_rate(z))
    torch.testing.assert_close(
        analysis.rate_reduction(z @ rotation, rotation.T @ subspaces), analysis.rate_reduction(z, subspaces)
    )


def test_rates_reproduce_the_published_measure():
    w = _randn(3, 4, 10, 6)
    unit = w / w.norm(dim=-1, keepdim=True)
    published = 0.5 * torch.logdet(torch.eye(10, dtype=F64) + 6 / (10 * 0.01) * unit @ unit.mT).sum(-1)
    torch.testing.assert_close(analysis.projected_coding_rate(F.normalize(w, dim=-1)), published)


@pytest.mark.parametrize("shape", TOKENS)
def test_projected_rate_is_the_subspace_rate_of_a_projection(shape):
    z, weight = _randn(*shape), _randn(6, shape[-1], seed=1)
    subspaces = analysis.projection_subspaces(weight, 3)
    w = F.linear(z, weight).unflatten(-1, (3, 2)).transpose(-3, -2)
    torch.testing.assert_close(
        analysis.subspace_coding_rate(z, subspaces), analysis.projected_coding_rate(w), rtol=1e-12, atol=0
    )


DEFAULTS = {
    "coding_rate": (_randn(9, 6),),
    "projected_coding_rate": (_randn(2, 9, 3),),
    "subspace_coding_rate": (_randn(9, 6), _subspaces(2, 3)),
    "rate_reduction": (_randn(9, 6), _subspaces(2, 3)),
    "rate_gradient": (_randn(9, 6), _subspaces(2, 3)),
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_the_distortion_is_by_default_the_published_one(name):
    measure, args = getattr(analysis, name), DEFAULTS[name]
    torch.testing.assert_close(measure(*args), measure(*args, eps_squared=0.01), rtol=0, atol=0)


def test_rate_reduction_vanishes_where_orthogonal_subspaces_are_coded_apart():
    # R of a block-diagonal Gram matrix is the sum over blocks; the remaining difference is dim against head_dim.
    nsubspaces, head_dim, seqlen = 3, 4, 30
    subspaces, labels = _subspaces(nsubspaces, head_dim), torch.arange(seqlen) % nsubspaces
    z = torch.stack([_randn(head_dim, seed=i) @ subspaces[k].T for i, k in enumerate(labels.tolist())])
    rate = analysis.coding_rate(z, eps_squared=0.1 * nsubspaces)
    torch.testing.assert_close(rate, analysis.subspace_coding_rate(z, subspaces, eps_squared=0.1))
    assert analysis.rate_reduction(z, subspaces, eps_squared=0.1) > 0


@pytest.mark.parametrize("shape", TOKENS)
@pytest.mark.parametrize("head_dim", [2, 6, "seqlen"])
def test_rate_gradient_is_autograds(shape, head_dim):
    z, head_dim = _randn(*shape).requires_grad_(), shape[-2] if head_dim == "seqlen" else head_dim
    subspaces = _randn(3, shape[-1], head_dim, seed=1)
    (expected,) = torch.autograd.grad(analysis.subspace_coding_rate(z, subspaces, eps_squared=0.3).sum(), z)
    gradient = analysis.rate_gradient(z, subspaces, eps_squared=0.3)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, F64], ids=str)
def test_rates_are_float64_under_any_dtype_and_autocast(dtype):
    z, subspaces = _randn(9, 6).to(dtype), _subspaces(2, 3).to(dtype)
    expected = analysis.rate_reduction(z.double(), subspaces.double())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(analysis.rate_reduction(z, subspaces), expected, rtol=1e-12, atol=0)


def test_sparsity_counts_nonzeros():
    z = torch.zeros(2, 4, 5)
    z[0, 1, 2], z[0, 3, 0], z[1, :, 0] = 1e-30, -2.0, 7.0
    torch.testing.assert_close(analysis.sparsity(z), torch.tensor([2 / 20, 4 / 20], dtype=F64))


def test_snr_of_known_parts():
    subspaces = torch.eye(4).unflatten(1, (2, 2)).movedim(1, 0)
    z = torch.tensor([[3.0, 0, 0, 1], [0, 4, 2, 0], [1, 0, 0, 2], [9, 9, 9, 9]])
    labels = torch.tensor([0, 0, 1, -1])
    torch.testing.assert_close(analysis.snr(z, subspaces, labels), torch.tensor([5**0.5, 2.0], dtype=F64))
    torch.testing.assert_close(analysis.snr(z[:2], subspaces), torch.tensor([5**0.5, 5**-0.5], dtype=F64))
    assert analysis.snr(torch.eye(4)[:1], subspaces).tolist() == [math.inf, 0.0]


def test_snr_grows_as_theorem_3_1_of_aot_says():
    seqlen, nsubspaces, head_dim, noise, tau, step, nlayers = 128, 2, 32, 0.03, 0.6, 0.5, 4
    subspaces, labels = _subspaces(nsubspaces, head_dim), torch.arange(seqlen) % nsubspaces
    scale = torch.where(labels[None] == torch.arange(nsubspaces)[:, None], 1.0, noise).unsqueeze(-1)
    z = ((scale * _randn(nsubspaces, seqlen, head_dim, seed=1)) @ subspaces.mT).sum(0)
    ratios = [analysis.snr(z, subspaces, labels)]
    for _ in range(nlayers):
        w = z @ subspaces
        selected = tau * (analysis.attention_maps(w, scale=1.0) > tau).to(F64)
        z = z + step * (selected @ w @ subspaces.mT).sum(0)
        ratios.append(analysis.snr(z, subspaces, labels))
    growth = torch.stack(ratios[1:]) / torch.stack(ratios[:-1])
    torch.testing.assert_close(growth, torch.full_like(growth, 1 + step * tau), rtol=1e-12, atol=0)


def test_attention_maps_are_the_softmax_of_pairwise_products():
    w = _randn(2, 3, 7, 5)
    torch.testing.assert_close(analysis.attention_maps(w), ((w @ w.mT) / 5**0.5).softmax(-1))
    causal = analysis.attention_maps(w, causal=True, scale=2.0)
    torch.testing.assert_close(causal[0, 1, 3, :4], (2 * w[0, 1, 3] @ w[0, 1, :4].T).softmax(0))
    assert not causal.triu(1).any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_attention_maps_of_half_precision_tokens_are_float32(dtype):
    w = (300 * _randn(5, 8)).to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        maps = analysis.attention_maps(w)
    assert maps.dtype == torch.float32
    torch.testing.assert_close(maps, analysis.attention_maps(w.float()), rtol=0, atol=0)


def test_coherence_of_orthogonal_equal_nested_and_zero_heads():
    basis, mix = _orthogonal(12), _randn(2, 2, seed=1)
    first, second = basis[:2], basis[2:4]
    rank_one = torch.stack([basis[0], 2 * basis[0]])
    weight = torch.cat([first, mix @ first, second, rank_one, torch.zeros_like(first)])
    expected = [[1, 1, 0, 1, 0], [1, 1, 0, 1, 0], [0, 0, 1, 0, 0], [1, 1, 0, 1, 0], [0, 0, 0, 0, 0]]
    torch.testing.assert_close(analysis.subspace_coherence(weight, 5), torch.tensor(expected, dtype=F64))


@pytest.mark.parametrize("size", [2.0**-30, 1.0, 2.0**30], ids=["small", "unit", "large"])
@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
def test_a_direction_counts_in_the_coherence_as_it_does_in_the_rank(dtype, size):
    """Just above and just below the tolerance of ``matrix_rank``; the second head has the same first direction."""
    basis, tolerance = size * _orthogonal(8), 8 * torch.finfo(dtype).eps
    for factor, rank in ((4.0, 2), (0.25, 1)):
        head = torch.stack([basis[0], factor * tolerance * basis[1]]).to(dtype)
        assert torch.linalg.matrix_rank(head) == rank
        weight = torch.cat([head, torch.stack([basis[1], basis[2]]).to(dtype)])
        expected = (rank - 1) / rank
        assert analysis.subspace_coherence(weight, 2)[0, 1].item() == pytest.approx(expected, abs=0.02)


def test_coherence_is_the_mean_squared_cosine_of_principal_angles():
    angle = torch.tensor(0.3)
    weight = torch.tensor([[1.0, 0, 0], [0, 1, 0], [1, 0, 0], [0, angle.cos(), angle.sin()]])
    expected = (1 + angle.cos().item() ** 2) / 2
    assert analysis.subspace_coherence(weight, 2)[0, 1].item() == pytest.approx(expected, rel=1e-6)


def test_subspace_gram_is_the_cosine_between_directions():
    weight = torch.tensor([[2.0, 0], [-3, 3], [0, 0]])
    expected = torch.tensor([[1, 0.5**0.5, 0], [0.5**0.5, 1, 0], [0, 0, 0]], dtype=F64)
    torch.testing.assert_close(analysis.subspace_gram(weight), expected)


Z, U, W = torch.ones(5, 4), torch.eye(4)[None, :, :2], torch.ones(6, 4)
BASES = "subspaces must be (nsubspaces, dim, head_dim) with dim = 4"
WEIGHT = "weight must be (nheads * head_dim, dim)"
NAN = float("nan")
ERRORS = {
    "one-axis": ("coding_rate", (W[0],), {}, ValueError, "z must be (..., seqlen, dim), got (4,)"),
    "empty": ("coding_rate", (W[:0],), {}, ValueError, "z must be (..., seqlen, dim), got (0, 4)"),
    "list": ("coding_rate", ([[1.0]],), {}, TypeError, "z must be a Tensor (..., seqlen, dim), got list"),
    "eps-nan": ("coding_rate", (Z,), {"eps_squared": NAN}, ValueError, "eps_squared must be finite, got nan"),
    "eps-zero": ("rate_gradient", (Z, U), {"eps_squared": 0}, ValueError, "eps_squared must be > 0, got 0.0"),
    "eps-type": ("rate_reduction", (Z, U), {"eps_squared": "1"}, TypeError, "eps_squared must be a number"),
    "subspace-dim": ("rate_reduction", (Z, U[:, :3]), {}, ValueError, f"{BASES}, got (1, 3, 2)"),
    "subspace-axes": ("subspace_coding_rate", (Z, U[0]), {}, ValueError, f"{BASES}, got (4, 2)"),
    "no-heads": ("projected_coding_rate", (Z,), {}, ValueError, "w must be (..., nheads, seqlen, head_dim)"),
    "integer": ("sparsity", (Z.long(),), {}, ValueError, "z must have a floating dtype, got torch.int64"),
    "device": ("snr", (Z, U.to("meta")), {}, ValueError, "subspaces must be on z's device cpu, got meta"),
    "subspace-int": ("snr", (Z, U.long()), {}, ValueError, "subspaces must have a floating dtype"),
    "subspace-list": ("snr", (Z, [1]), {}, TypeError, "subspaces must be a Tensor"),
    "not-orthonormal": ("snr", (Z, 2 * U), {}, ValueError, "subspaces must have orthonormal columns"),
    "label-length": ("snr", (Z, U, Z[:4, 0].long()), {}, ValueError, "labels must broadcast to"),
    "label-dtype": ("snr", (Z, U, Z[:, 0]), {}, ValueError, "labels must have an integer dtype"),
    "label-list": ("snr", (Z, U, [0] * 5), {}, TypeError, "labels must be a Tensor, got list"),
    "heads-float": ("projection_subspaces", (W, 2.0), {}, TypeError, "nheads must be an int, got float"),
    "heads-odd": ("subspace_coherence", (W, 4), {}, ValueError, "nheads must divide weight's 6 rows, got 4"),
    "weight-axes": ("subspace_gram", (W[0],), {}, ValueError, f"{WEIGHT}, got (4,)"),
    "weight-empty": ("subspace_gram", (W[:0],), {}, ValueError, f"{WEIGHT}, got (0, 4)"),
    "w-axes": ("attention_maps", (W[0],), {}, ValueError, "w must be (..., seqlen, head_dim), got (4,)"),
    "scale-nan": ("attention_maps", (Z,), {"scale": NAN}, ValueError, "scale must be finite, got nan"),
    "causal-int": ("attention_maps", (Z,), {"causal": 1}, TypeError, "causal must be a bool, got int"),
}


@pytest.mark.parametrize(("name", "args", "kwargs", "error", "message"), ERRORS.values(), ids=ERRORS.keys())
def test_errors(name, args, kwargs, error, message):
    with pytest.raises(error, match="^" + re.escape(f"{name}: {message}")):
        getattr(analysis, name)(*args, **kwargs)


RATES = {
    "coding_rate": ((NAN * Z,), "z"),
    "projected_coding_rate": ((NAN * Z[None],), "w"),
    "subspace_coding_rate": ((NAN * Z, U), "z @ subspaces"),
    "rate_reduction": ((NAN * Z, U), "z @ subspaces"),
    "rate_gradient": ((Z, math.inf * U), "z @ subspaces"),
}


@pytest.mark.parametrize("name", RATES)
def test_a_rate_of_tokens_that_are_not_finite_is_an_error(name):
    args, argument = RATES[name]
    with pytest.raises(torch.linalg.LinAlgError, match=f"^{name}: {argument} must be finite$"):  # pyright: ignore[reportPrivateImportUsage]
        getattr(analysis, name)(*args)
