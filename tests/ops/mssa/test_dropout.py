"""Dropout of subspace self-attention: its rate, its mask and its seed."""

import math

import pytest
import torch

from crate_kernels import mssa
from tests.ops.common import backends, keep_mask, kernels, randn

BACKENDS = backends("mssa")


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
    assert factors.var().item() == pytest.approx(p / (1 - p), rel=0.05)
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
        pytest.skip("needs kernels with phi='relu' and 'identity': composite alone has them, and runs these cases")
    p, w = 0.3, torch.ones(4, 2, 64, 16, device=device)  # equal tokens: 64 equal weights a query
    kept = mssa(w, dropout_p=p, **options, backend=backend) / mssa(w, **options, backend=backend) * (1 - p)
    # Five standard deviations of the mean over 512 rows, and of the deviation measured on them.
    deviation = math.sqrt(p * (1 - p) / 64)
    assert abs(kept[..., 0].mean() - (1 - p)) < 5 * deviation / math.sqrt(4 * 2 * 64)
    assert kept[..., 0].std().item() == pytest.approx(deviation, rel=5 / math.sqrt(2 * 4 * 2 * 64))


@pytest.mark.parametrize(("backend", "device"), [p for p in BACKENDS if p.values[0] != "composite"])
def test_dropout_mask_is_philox(backend, device):
    if device == "cuda":
        pytest.skip("needs the CPU's generator: the CUDA one draws another seed")
    expected = keep_mask(3, 0.3, 2, 16, 16)
    assert torch.equal(dropout_factors(0.3, backend, device, 1, 2, 16)[0] > 0.5, expected)


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
def test_dropout_repeats_with_the_seed(backend, device):
    w = randn(2, 3, 9, 16, dtype=torch.float32, device=device)
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(mssa(w, dropout_p=0.5, backend=backend))
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("backend", [name for name in kernels("mssa") if name == "cpp"])
def test_compiled_dropout_repeats_the_eager_mask_where_the_seed_is_of_torchs_generator(backend):
    from torch._inductor import config  # importing it takes a second

    def attend(w):
        torch.manual_seed(3)
        return mssa(w, dropout_p=0.5, backend=backend)

    w = randn(1, 2, 8, 16, dtype=torch.float32)
    with config.patch(fallback_random=True):
        torch.testing.assert_close(torch.compile(attend)(w), attend(w), rtol=0, atol=0)
