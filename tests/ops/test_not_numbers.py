"""NaN and infinity stay in the sequence that has them, in a batch and packed."""

import pytest
import torch

from crate_kernels import mssa, tssa
from tests.ops.common import backends, offsets, outputs_and_gradients, randn

NHEADS, HEAD_DIM, LENGTHS = 2, 16, (3, 20, 0, 5, 33)
# NumPy warns where Triton's interpreter computes with inf and NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
CALLS = [
    pytest.param(op, causal, *p.values, id=f"{op}-{'causal' if causal else 'full'}-{p.id}", marks=p.marks)
    for op in ("mssa", "tssa")
    for causal in (False, True)
    for p in backends(op)
]


def attend(op, w, backend, **options):
    """Return (out, lse) or (out, membership), tokens first."""
    if op == "mssa":
        out, statistic = mssa(w, return_lse=True, backend=backend, **options)
    else:
        out, statistic = tssa(
            w, torch.ones(NHEADS, device=w.device), return_membership=True, backend=backend, **options
        )
    return out, statistic.movedim(1, -1) if w.dim() == 4 else statistic.t()


@pytest.mark.parametrize(("op", "causal", "backend", "device"), CALLS)
def test_packed_sequences_do_not_see_what_others_hold(op, causal, backend, device):
    packing = {"cu_seqlens": offsets(LENGTHS).to(device), "max_seqlen": max(LENGTHS), "causal": causal}
    w = randn(sum(LENGTHS), NHEADS, HEAD_DIM, dtype=torch.float32, device=device)
    sequence = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)).to(device)
    others, results = sequence % 2 == 0, []
    for held in (0.0, torch.nan):
        tokens = torch.where(others[:, None, None], w, held)
        found = outputs_and_gradients(lambda x: attend(op, x, backend, **packing), tokens)
        results.append([x[others] for x in found])
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


@pytest.mark.parametrize(("op", "causal", "backend", "device"), CALLS)
def test_sequences_of_a_batch_do_not_see_what_others_hold(op, causal, backend, device):
    w = randn(3, NHEADS, 33, HEAD_DIM, dtype=torch.float32, device=device)
    results = []
    for held in (0.0, torch.inf):
        tokens = w.clone()
        tokens[1] = held
        found = outputs_and_gradients(lambda x: attend(op, x, backend, causal=causal), tokens)
        results.append([x[::2] for x in found])
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
