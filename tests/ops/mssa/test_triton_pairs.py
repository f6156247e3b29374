"""mssa's pair form in Triton: both of its softmaxes, narrow last tiles, and the products that forms take."""

import pytest
import torch

from crate_kernels import mssa, testing
from crate_kernels._triton import launch
from tests.ops.common import home, kernels, over_budget, randn

if "triton" not in kernels("mssa"):
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

from crate_kernels.ops.mssa.triton import tables

DEVICE = home("triton")
INTERPRETED = DEVICE == "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Rows near each other in norm, and further apart than the weights of any dtype reach.
SPREADS = {"near": {}, "far": {"special": "mixed norms", "magnitude": 2.0}}


def tiles(rows, pairs=1, **changed):
    """Make every forward take tiles of so many rows."""
    config = {"BLOCK_M": rows, "BLOCK_N": rows, "num_warps": 4, "num_stages": 1, "BOUNDED": 0, "WHOLE": 1}
    return launch.forced(tables.FORWARD, {**config, "PAIRS": pairs, **changed})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize(
    ("seqlen", "head_dim", "rows"),
    [(1, 16, 32), (32, 16, 32), (33, 48, 32), (65, 16, 32), (80, 40, 32), (127, 16, 32), (128, 32, 32), (197, 64, 64)],
)
def test_triton_pairs_of_tiles_are_within_budget(seqlen, head_dim, rows, spread, dtype):
    case = testing.Case(
        "mssa", f"pairs-{spread}-{seqlen}", (2, 2, seqlen, head_dim), {"return_lse": True}, **SPREADS[spread]
    )
    with tiles(rows):
        assert over_budget(case, dtype, "triton", DEVICE) == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spread", SPREADS)
def test_triton_heads_far_from_the_range_take_the_online_softmax(spread, dtype):
    """It gives the bits of the row form; the one shift of a head has other roundings."""
    case = testing.Case("mssa", "pairs", (1, 4, 80, 16), **SPREADS[spread])
    w = testing.make_inputs(case, dtype, DEVICE).differentiable["w"]
    with tiles(32):
        out, lse = mssa(w, return_lse=True, backend="triton")
    with tiles(32, pairs=0):
        online, online_lse = mssa(w, return_lse=True, backend="triton")
    # The last rows of the row form are a narrower tile.
    assert torch.equal(out[:, :, :64], online[:, :, :64]) == (spread == "far")
    assert torch.equal(lse[:, :, :64], online_lse[:, :, :64]) == (spread == "far")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_triton_pairs_of_equal_tokens_of_any_norm(dtype):
    """A score and half the norms are then rounded to 64: their difference would overflow, or leave no weight."""
    w = (1e4 * randn(1, 8, 1, 64, dtype=torch.float32)).expand(1, 8, 64, 64).to(DEVICE, dtype)
    with tiles(32):
        out, lse = mssa(w, return_lse=True, backend="triton")
    torch.testing.assert_close(out, w, rtol=16 * torch.finfo(dtype).eps, atol=0.0)
    exact = mssa(w.double(), return_lse=True, backend="reference")[1]
    torch.testing.assert_close(lse.double(), exact, rtol=1e-6, atol=0.0)


def test_triton_heads_take_their_softmax_one_by_one():
    w = 0.5 * randn(1, 4, 80, 16, dtype=torch.float32, device=DEVICE)
    with tiles(32):
        near = mssa(w, backend="triton")
        w[:, 1] *= 2.0 ** torch.linspace(-3, 4, 80, device=DEVICE)[:, None]
        mixed = mssa(w, backend="triton")
    others = [0, 2, 3]
    assert torch.equal(near[:, others], mixed[:, others])
    exact = mssa(w[:, 1:2].double(), backend="reference")
    torch.testing.assert_close(mixed[:, 1:2].double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_triton_pairs_hide_no_bad_token(value):
    w = randn(1, 4, 80, 16, dtype=torch.float32, device=DEVICE)
    w[0, 1, 40, 3] = value
    with tiles(32):
        out = mssa(w, backend="triton")
    assert not out[0, 1, 40].isfinite().any()
    assert out[0, [0, 2, 3]].isfinite().all()


def multiplied(monkeypatch, call):
    """Return how many numbers the matrix products of ``call`` multiply, but for those of 16 columns or 64 of ones."""
    from triton.runtime import interpreter

    counted, product = [], interpreter.InterpreterBuilder.create_dot

    def create_dot(self, a, b, *rest):
        if not (a.data == 1).all() and not (b.data == 1).all():
            counted.append(a.data.shape[0] * a.data.shape[1] * b.data.shape[1])
        return product(self, a, b, *rest)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
    call()
    return sum(counted)


@pytest.mark.skipif(not INTERPRETED, reason="counts what Triton's interpreter makes: needs TRITON_INTERPRET=1")
@pytest.mark.parametrize(
    ("pairs", "causal", "expected"),
    [
        # Tiles of 64, 64, 64 and 16: each score and its transpose once, and each weight.
        (1, False, 6 * 64 * 64 + 3 * 64 * 16 + 16 * 16 + 208 * 208),
        (0, False, 2 * 208 * 208),
        (0, True, 2 * (64 * 64 + 64 * 128 + 64 * 192 + 16 * 256)),
    ],
    ids=["pairs", "rows", "causal"],
)
def test_triton_takes_as_many_products_as_its_form(pairs, causal, expected, monkeypatch):
    w = 0.5 * randn(1, 4, 197, 16, dtype=torch.float32)
    with tiles(64, pairs=pairs):
        counted = multiplied(monkeypatch, lambda: mssa(w, causal=causal, backend="triton"))
    assert counted == 4 * 16 * expected


@pytest.mark.skipif(not INTERPRETED, reason="counts what Triton's interpreter makes: needs TRITON_INTERPRET=1")
@pytest.mark.parametrize(
    ("causal", "expected"),
    # Five a tile; causal, four after the diagonal, three before it and five on it.
    [(False, 5 * 128 * 128), (True, 5 * 2 * 64 * 64 + 4 * 64 * 64 + 3 * 64 * 64)],
    ids=["full", "causal"],
)
def test_triton_takes_five_products_a_tile_back(causal, expected, monkeypatch):
    w = randn(1, 1, 128, 16, dtype=torch.float32).requires_grad_()
    out = mssa(w, causal=causal, backend="triton")
    config = {"BLOCK_J": 64, "BLOCK_I": 32, "num_warps": 4, "num_stages": 1, "DERIVED": 1}
    with launch.forced(tables.BACKWARD, config):
        counted = multiplied(monkeypatch, lambda: torch.autograd.grad(out, w, torch.randn_like(out)))
    # And g out^T of blocks of 32 rows, of which the diagonal is delta.
    assert counted == 16 * (expected + 4 * 32 * 32)
