"""The products that mssa's kernels in Triton take, and bad tokens in them."""

import pytest
import torch

from crate_kernels import mssa
from crate_kernels._triton.table import forced
from tests.ops.common import home, kernels, randn

if "triton" not in kernels("mssa"):
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

from crate_kernels.ops.mssa.triton import tables

DEVICE = home("triton")
INTERPRETED = DEVICE == "cpu"


def tiles(rows):
    """Make every forward take tiles of so many rows."""
    config = {"BLOCK_M": rows, "BLOCK_N": rows, "num_warps": 4, "num_stages": 1, "BOUNDED": 0}
    return forced(tables.FORWARD, config)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_triton_hides_no_bad_token(value):
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


@pytest.mark.usefixtures("unrepeated")
@pytest.mark.skipif(not INTERPRETED, reason="counts what Triton's interpreter makes: needs TRITON_INTERPRET=1")
@pytest.mark.parametrize(
    ("causal", "expected"),
    # Tiles of 64, 64, 64 and 16.
    [(False, 2 * 208 * 208), (True, 2 * (64 * 64 + 64 * 128 + 64 * 192 + 16 * 256))],
    ids=["full", "causal"],
)
def test_triton_takes_two_products_a_tile(causal, expected, monkeypatch):
    w = 0.5 * randn(1, 4, 197, 16, dtype=torch.float32)
    with tiles(64):
        counted = multiplied(monkeypatch, lambda: mssa(w, causal=causal, backend="triton"))
    assert counted == 4 * 16 * expected


@pytest.mark.usefixtures("unrepeated")
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
    with forced(tables.BACKWARD, config):
        counted = multiplied(monkeypatch, lambda: torch.autograd.grad(out, w, torch.randn_like(out)))
    # And g out^T of blocks of 32 rows, of which the diagonal is delta.
    assert counted == 16 * (expected + 4 * 32 * 32)
