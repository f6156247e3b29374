"""Products without a threshold by cuBLASLt: a stand-in multiplies on the CPU, Triton's interpreter does the rest."""

import warnings

import pytest
import torch

from crate_kernels import ista
from crate_kernels._triton.table import forced
from crate_kernels.ops.ista import lt
from crate_kernels.ops.ista.triton import tables
from tests.ops.common import NEEDS_EXTENSION, TURNS, kernels, randn
from tests.tools import lt as standin

if "triton" not in kernels("ista") or torch.cuda.is_available():
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

pytestmark = NEEDS_EXTENSION
HALF = torch.bfloat16
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


def product(left, right, **epilogue):
    from crate_kernels.ops.ista.triton import product

    return product.product(left, right, product.Epilogue(**epilogue))


@TURNS
@HALVES
@pytest.mark.parametrize("added", [False, True], ids=["alone", "added"])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("shape", [(1, 8, 128), (37, 24, 256)], ids=str)
def test_the_product_is_added_gated_and_rounded_once(shape, transposed, gated, added, dtype, cublaslt):
    rows, inner, columns = shape
    left, base = randn(rows, inner, dtype=dtype), randn(rows, columns, dtype=dtype, seed=1)
    right = randn(columns, inner, dtype=dtype, seed=2).t()
    right = right if transposed else right.contiguous()
    more = {"base": base} if added else {}
    more |= {"gate": randn(rows, columns, dtype=dtype, seed=3).relu()} if gated else {}
    for scale in (0.3, -1.0):
        exact = scale * (left.double() @ right.double()) + (base.double() if added else 0.0)
        exact = torch.where(more["gate"] == 0, 0.0, exact) if gated else exact
        actual = product(left, right, scale=scale, **more)
        assert ((actual.double() - exact).abs() <= torch.finfo(dtype).eps * exact.abs() + 1e-5).all()
    counts = {name: standin.number(cublaslt, name).value for name in ("multiplied", "gated", "searched")}
    assert counts == {"multiplied": 2, "gated": 2 * gated, "searched": 1}  # what was found for a shape is kept
    asked = standin.Asked.in_dll(cublaslt, "asked")
    assert (asked.workspace, asked.reductions, list(asked.alignment)) == (lt._WORKSPACE, 0, [16] * 4)


def test_steps_have_the_gradients_that_they_had(cublaslt):
    x, dout = (randn(80, 32, dtype=HALF, seed=seed) for seed in (0, 1))
    weight = randn(32, 32, dtype=HALF, seed=2) / 6

    def run(dtype, backend):
        inputs = [t.to(dtype).requires_grad_() for t in (x, weight)]
        out = ista(*inputs, backend=backend)
        return out.detach(), *torch.autograd.grad(out, inputs, dout.to(dtype))

    found = run(HALF, "triton")
    assert standin.number(cublaslt, "multiplied").value > 0
    for actual, expected in zip(found, run(torch.float64, "reference"), strict=True):
        assert (actual.double() - expected).norm() <= 0.02 * expected.norm()


def test_a_nan_stays_one(cublaslt):
    left, base = randn(16, 8, dtype=HALF), randn(16, 128, dtype=HALF, seed=1)
    right = randn(8, 128, dtype=HALF, seed=2)
    base[3, 4] = left[7, 0] = torch.nan
    gate = torch.ones_like(base)
    gate[7, 1], gate[7, 2] = 0, torch.nan  # a NaN is no zero
    for more, row in (({}, 128), ({"gate": gate}, 127)):
        nan = product(left, right, base=base, **more).isnan()
        assert (nan[3].sum().item(), nan[7].sum().item(), nan.sum().item()) == (1, row, 1 + row)


FAILING = {
    "creation": ("create_status", "it cannot be started"),
    "search": ("search_status", r"it has no algorithm for \(16, 8\) @ \(8, 8\)"),
}


@pytest.mark.parametrize(("name", "message"), FAILING.values(), ids=FAILING)
def test_where_it_fails_products_go_the_other_way_and_it_is_said_once(name, message, cublaslt):
    left, right = randn(16, 8, dtype=HALF), randn(8, 8, dtype=HALF, seed=2)
    standin.number(cublaslt, name).value = 1
    exact = left.double() + left.double() @ right.double()
    with pytest.warns(UserWarning, match=f"cuBLASLt does not multiply.*{message}"):
        actual = product(left, right, base=left)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        again = product(left, right, base=left)
    assert standin.number(cublaslt, "multiplied").value == 0
    assert torch.equal(actual, again)
    assert ((actual.double() - exact).abs() <= 2.0**-8 * exact.abs() + 1e-5).all()


OTHERS = {"sums": (16, 12, 8), "columns": (16, 8, 12)}


@pytest.mark.parametrize("shape", OTHERS.values(), ids=OTHERS)
def test_rows_that_are_no_whole_16_bytes_are_not_its(shape, cublaslt):
    rows, inner, columns = shape
    left, right, base = (randn(*s, dtype=HALF) for s in ((rows, inner), (inner, columns), (rows, columns)))
    with pytest.warns(UserWarning, match="rows must be whole 16 bytes"):
        product(left, right, base=base)


def test_a_gate_of_no_whole_16_bytes_is_not_its(cublaslt):
    left, right, base = (randn(*s, dtype=HALF) for s in ((16, 8), (8, 64), (16, 64)))
    with pytest.warns(UserWarning, match="a gate must have rows of whole 128 numbers"):
        actual = product(left, right, base=base, gate=base)
    exact = torch.where(base == 0, 0.0, base.double() + left.double() @ right.double())
    assert ((actual.double() - exact).abs() <= 2.0**-8 * exact.abs() + 1e-5).all()
    assert standin.number(cublaslt, "multiplied").value == 0


def test_float32_stays_the_librarys_own(cublaslt):
    left, right = randn(16, 8, dtype=torch.float32), randn(8, 8, dtype=torch.float32)
    torch.testing.assert_close(product(left, right, base=left), left + left @ right)
    assert standin.number(cublaslt, "searched").value == 0


def test_a_product_that_fails_later_says_so(cublaslt):
    left, right = randn(16, 8, dtype=HALF), randn(8, 8, dtype=HALF, seed=2)
    standin.number(cublaslt, "multiply_status").value = 13
    with pytest.raises(RuntimeError, match="lt_product: cuBLASLt failed with status 13"):
        product(left, right, base=left)


def freed():
    """Return tokens whose memory was given back."""
    t = torch.zeros(16, 8, dtype=HALF)
    t.untyped_storage().resize_(0)
    return t


BAD = {
    "sizes": ({"right": torch.zeros(16, 128, dtype=HALF)}, "sizes must agree"),
    "dtype": ({"base": torch.zeros(16, 128)}, "tensors must have one dtype"),
    "workspace": ({"workspace": torch.zeros(5, dtype=torch.uint8)}, "workspace must be 4096 bytes"),
    "device": ({"out": torch.zeros(16, 128, dtype=HALF, device="meta")}, "tensors must be on a CUDA device"),
    "memory": ({"left": freed()}, "one was freed or cut"),
    "strides": ({"left": torch.zeros(8, 16, dtype=HALF).t()}, "tensors must be contiguous"),
    "bits": ({"gate": torch.zeros(15 * 16, dtype=torch.uint8)}, "gate must be 256 bytes"),
    "place of bits": ({"gate": torch.zeros(8 + 256, dtype=torch.uint8)[8:]}, "from a multiple of 16"),
    "dtype of bits": ({"gate": torch.zeros(256, dtype=torch.int32)}, "gate must be 256 bytes"),
}


@pytest.mark.parametrize(("changed", "message"), BAD.values(), ids=BAD)
def test_the_op_refuses_what_it_would_read_as_wrong_numbers(changed, message, cublaslt):
    options = {
        "left": torch.zeros(16, 8, dtype=HALF),
        "right": torch.zeros(8, 128, dtype=HALF),
        "base": torch.zeros(16, 128, dtype=HALF),
        "gate": None,
        "workspace": torch.zeros(4096, dtype=torch.uint8),
        "scale": 1.0,
        "out": torch.zeros(16, 128, dtype=HALF),
    }
    with pytest.raises(RuntimeError, match=message):
        torch.ops.crate_kernels_C.lt_product(*(options | changed).values())


def test_plans_repeat_it(cublaslt, repeated_calls):
    """The check of every plan compares the replay, which calls it again, with the bits of the first call."""
    x, weight = randn(80, 32, dtype=HALF).requires_grad_(), randn(32, 32, dtype=HALF, seed=2) / 6
    out = ista(x, weight, backend="triton")
    before = repeated_calls.repeated
    torch.autograd.grad(out, x, torch.ones_like(out))
    assert (repeated_calls.repeated, repeated_calls.refused) == (before + 1, [])
    assert standin.number(cublaslt, "multiplied").value == 2


def test_a_product_on_a_cpu_goes_the_other_way(monkeypatch):
    monkeypatch.setattr(lt, "_said", set())
    left, right = randn(16, 8, dtype=HALF), randn(8, 8, dtype=HALF, seed=2)
    # PyTorch for CUDA has loaded it, on machines without a GPU too.
    reason = "tensors must be on a CUDA device" if torch.version.cuda else "PyTorch has loaded no cuBLASLt"
    with forced(tables.LINEAR, {"LT": 1}), pytest.warns(UserWarning, match=reason):
        product(left, right, base=left)


def test_no_table_takes_it():
    """Until a GPU has timed it."""
    every = [*tables.LINEAR.rows.values(), *tables.GATED.rows.values()]
    assert not any(row.config["LT"] for rows in every for row in rows)
