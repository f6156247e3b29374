"""fp32 heads of few tokens, one of them long: its scores decide the rows of the others, and its own is huge."""

import math

import pytest
import torch

from crate_kernels import mssa
from crate_kernels._native import extension
from tests.ops.common import LEVELS, randn

pytestmark = pytest.mark.skipif(extension.PATH is None, reason="needs python -m crate_kernels build")

# (nheads, head_dim, tokens, options)
CASES = {
    "few": (1, 64, (3, 4, 5, 6, 7, 8), {}),
    "wide": (1, 128, (3, 4, 5, 6, 7, 8), {}),
    "heads": (8, 64, (3, 5, 8), {}),
    "more": (1, 64, (12, 20, 32), {}),
    "causal": (1, 64, (3, 5, 8), {"causal": True}),
    "negative-scale": (1, 64, (3, 5, 8), {"scale": -0.125}),
    "padded": (1, 64, (4, 8, 16), {"padded": True}),
}
DRAWS = 40


def results(w, dout, backend, **options):
    leaf = w.detach().requires_grad_()
    out, lse = mssa(leaf, backend=backend, return_lse=True, **options)
    (dw,) = torch.autograd.grad(out, leaf, dout)
    return {"out": out.detach(), "lse": lse.detach(), "dw": dw}


def worst(nheads, head_dim, tokens, padded=False, **options):
    """Return the largest errors in budgets."""
    found = dict.fromkeys(("out", "lse", "dw"), 0.0)
    for seed in range(DRAWS):
        seqlen = tokens[seed % len(tokens)]
        w, dout = (randn(1, nheads, seqlen, head_dim, seed=2 * seed + i, dtype=torch.float32) for i in (0, 1))
        w[:, :, seed % seqlen] *= 30 + 70 * seed / DRAWS
        if padded:
            options["key_padding_mask"] = torch.arange(seqlen)[None] % 3 != seed % 3
        exact = results(w.double(), dout.double(), "reference", **options)
        eager, own = (results(w, dout, backend, **options) for backend in ("reference", "cpp"))
        for name, truth in exact.items():
            usual, error = ((x[name].double() - truth).abs().max().item() for x in (eager, own))
            budget = (3 if name == "dw" else 2) * (usual + torch.finfo(torch.float32).eps * truth.abs().max().item())
            found[name] = max(found[name], error / budget if math.isfinite(error) else math.inf)
    return found


@pytest.mark.parametrize("name", LEVELS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_long_token_among_few(case, name, level):
    level(name)
    nheads, head_dim, tokens, options = case
    assert all(share < 1 for share in worst(nheads, head_dim, tokens, **options).values())


@pytest.mark.parametrize("name", LEVELS)
def test_a_later_long_token_changes_no_bit_of_a_causal_prefix(name, level):
    level(name)
    w = randn(1, 2, 9, 64, dtype=torch.float32)
    longer = torch.cat([w[:, :, :6], 60 * w[:, :, 6:]], 2)
    one, other = (mssa(x, causal=True, return_lse=True, backend="cpp") for x in (w, longer))
    assert all(torch.equal(a[:, :, :6], b[:, :, :6]) for a, b in zip(one, other, strict=True))
