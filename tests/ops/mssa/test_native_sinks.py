"""fp32 heads of few tokens, one of them long: its scores decide the rows of the others, and its own is huge."""

import functools
import math

import pytest
import torch

from crate_kernels import mssa
from tests.ops.common import LEVELS, NEEDS_EXTENSION, randn

pytestmark = NEEDS_EXTENSION

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


@functools.cache
def drawn(name):
    """List the draws of a case, for every level: tokens, gradient, options, exact results and their tolerances."""
    (nheads, head_dim, tokens, case_options), found = CASES[name], []
    for seed in range(DRAWS):
        options = dict(case_options)
        seqlen = tokens[seed % len(tokens)]
        w, dout = (randn(1, nheads, seqlen, head_dim, seed=2 * seed + i, dtype=torch.float32) for i in (0, 1))
        w[:, :, seed % seqlen] *= 30 + 70 * seed / DRAWS
        if options.pop("padded", False):
            options["key_padding_mask"] = torch.arange(seqlen)[None] % 3 != seed % 3
        exact = results(w.double(), dout.double(), "reference", **options)
        tolerances = {}
        for output, found_eager in results(w, dout, "reference", **options).items():
            usual = (found_eager.double() - exact[output]).abs().max().item()
            rounding = torch.finfo(torch.float32).eps * exact[output].abs().max().item()
            tolerances[output] = (3 if output == "dw" else 2) * (usual + rounding)
        found.append((w, dout, options, exact, tolerances))
    return found


def worst(name):
    shares = dict.fromkeys(("out", "lse", "dw"), 0.0)
    for w, dout, options, exact, tolerances in drawn(name):
        for output, value in results(w, dout, "cpp", **options).items():
            error = (value.double() - exact[output]).abs().max().item()
            shares[output] = max(shares[output], error / tolerances[output] if math.isfinite(error) else math.inf)
    return shares


@pytest.mark.parametrize("name", LEVELS)
@pytest.mark.parametrize("case", CASES)
def test_a_long_token_among_few(case, name, level):
    level(name)
    assert all(share < 1 for share in worst(case).values())


@pytest.mark.parametrize("name", LEVELS)
def test_a_later_long_token_changes_no_bit_of_a_causal_prefix(name, level):
    level(name)
    w = randn(1, 2, 9, 64, dtype=torch.float32)
    longer = torch.cat([w[:, :, :6], 60 * w[:, :, 6:]], 2)
    one, other = (mssa(x, causal=True, return_lse=True, backend="cpp") for x in (w, longer))
    assert all(torch.equal(a[:, :, :6], b[:, :, :6]) for a, b in zip(one, other, strict=True))
