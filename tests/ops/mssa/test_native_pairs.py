"""Heads on a CPU whose backward goes by pairs of tokens, though norms spread or the scale is negative."""

import pytest
import torch

from crate_kernels import mssa, testing
from crate_kernels._core.spec import Inputs
from tests.ops.common import NEEDS_EXTENSION, randn

pytestmark = NEEDS_EXTENSION

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def tokens_of_scores(scores, head_dim=16):
    """Return tokens in any directions that have these scores with themselves where the scale is 1."""
    w = randn(1, 2, len(scores), head_dim)
    return w / w.norm(dim=-1, keepdim=True) * scores.sqrt()[:, None]


ALL_HEIGHTS = torch.linspace(1.0, 122.0, 200, dtype=torch.float64)
# name: (tokens, scale). Half the scores spread by more than 60, and lse by less than 120, or by more.
FAR_APART = {
    "lse-near": (tokens_of_scores(ALL_HEIGHTS), 1.0),
    "lse-far": (tokens_of_scores(1.2 * ALL_HEIGHTS), 1.0),
    "small": (tokens_of_scores(torch.where(ALL_HEIGHTS > 121.5, ALL_HEIGHTS, 0.1)), 1.0),
    "negative": (tokens_of_scores(0.05 * ALL_HEIGHTS), -1.0),
    "negative-tall": (tokens_of_scores(ALL_HEIGHTS), -1.0),
    "negative-far": (tokens_of_scores(2 * ALL_HEIGHTS), -1.0),
    # Scores of -200: lse is as far below 0, and the padding of the last pair of rows would have an infinite weight.
    "negative-alike": (200**0.5 * torch.nn.functional.normalize(1 + 0.1 * randn(1, 2, 201, 16), dim=-1), -1.0),
}


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(("tokens", "scale"), FAR_APART.values(), ids=FAR_APART)
def test_norms_that_spread_and_negative_scales(tokens, scale, dtype, parts, threads):
    threads(2 * parts)
    case = testing.Case("mssa", "apart", tuple(tokens.shape), {"scale": scale, "return_lse": True})
    inputs = Inputs({"w": tokens.to(dtype)}, {})
    eager, exact = testing.run(case, inputs, "reference"), testing.run(case, inputs.to(torch.float64), "reference")
    wrong = [m for m in testing.measure(testing.run(case, inputs, "cpp"), eager, exact, dtype) if not m.passed]
    assert wrong == []


# name: (scale, the score of one token with itself, or of two with each other; whether pairs of tokens share a weight)
SHARED_WEIGHTS = {
    "norms": (1.0, 115.0, True),
    "lse": (1.0, 122.0, True),
    "neither": (1.0, 130.0, False),
    "negative": (-1.0, 115.0, True),
    "negative-lse": (-1.0, 130.0, False),
}


@pytest.mark.parametrize("name", ["avx512_bf16", "amx"])
@pytest.mark.parametrize(("scale", "score", "shared"), SHARED_WEIGHTS.values(), ids=SHARED_WEIGHTS)
def test_pairs_share_a_weight_while_norms_or_lse_are_near(scale, score, shared, name, level, threads):
    """One row has a gradient, and 200 equal weights. In bf16 the gradient is rounded as divided, or the weights are."""
    level(name)
    threads(1)
    w, g = torch.zeros(1, 1, 200, 16), torch.zeros(1, 1, 200, 16)
    w[0, 0, 40, 0] = score**0.5
    if scale < 0:
        w[0, 0, 41, 0] = -(score**0.5)
    g[0, 0, 7, 1:] = randn(15, dtype=torch.bfloat16).float()
    w, g = w.bfloat16().requires_grad_(), g.bfloat16()
    (dw,) = torch.autograd.grad(mssa(w, scale=scale, backend="cpp"), w, g)
    divided, weighted = (
        (g.float() * 1.28).bfloat16() / 256,
        (g.float() * torch.tensor(1.28).bfloat16() / 256).bfloat16(),
    )
    assert not torch.equal(divided, weighted)
    torch.testing.assert_close(dw, (divided if shared else weighted)[:, :, 7:8].expand_as(dw), rtol=0, atol=0)
