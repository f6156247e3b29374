"""The product of persistent programs: what it computes, where it is taken, and what its numbers become of NaN."""

import pytest
import torch

from crate_kernels import testing
from crate_kernels._triton.table import forced
from crate_kernels.ops.ista.triton import tables
from tests.ops.common import over_tolerance, randn
from tests.ops.ista.test_triton import EACH, EPILOGUES, expected

UNGATED = {name: options for name, options in EPILOGUES.items() if "gate" not in options}


@pytest.fixture
def streamed(monkeypatch):
    """Take the stream where it serves; return the shapes that it computed."""
    from crate_kernels.ops.ista.triton import stream

    shapes, product = [], stream.product

    def noted(left, right, out, *rest):
        shapes.append((*left.shape, out.shape[1]))
        product(left, right, out, *rest)

    monkeypatch.setattr(stream, "product", noted)
    with forced(tables.PRODUCT, tables.STREAM):
        yield shapes


@EACH
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("options", UNGATED.values(), ids=UNGATED)
@pytest.mark.parametrize("shape", [(1, 8, 8), (130, 72, 136), (700, 40, 264)], ids=str)
def test_the_product_is_what_it_says(shape, options, transposed, streamed, backend, device):
    from crate_kernels.ops.ista.triton.product import Epilogue, product

    (rows, inner, columns), dtype = shape, torch.float16
    left = randn(rows, inner, dtype=dtype, device=device)
    right = randn(columns, inner, dtype=dtype, device=device, seed=4).t()
    right = right if transposed else right.contiguous()
    tensors = {name: randn(rows, columns, dtype=dtype, device=device, seed=1) for name in ("base",) if name in options}
    exact = expected(left, right, **{**options, **tensors})
    actual = product(left, right, Epilogue(**{**options, **tensors}))
    assert streamed == [shape]
    bound = 4 * torch.finfo(torch.float32).eps * (inner**0.5 + 3) * inner**0.5 + torch.finfo(dtype).eps * exact.abs()
    assert ((actual.double() - exact).abs() <= bound).all()


ELSEWHERE = {
    "float32": ((40, 24, 24), torch.float32, {}),
    "odd-sums": ((40, 20, 24), torch.float16, {}),
    "odd-columns": ((40, 24, 20), torch.float16, {}),
    "gate": ((40, 24, 24), torch.float16, {"gate": 3}),
}


@EACH
@pytest.mark.parametrize(("shape", "dtype", "options"), ELSEWHERE.values(), ids=ELSEWHERE)
def test_what_it_does_not_serve_goes_the_other_way(shape, dtype, options, streamed, backend, device):
    from crate_kernels.ops.ista.triton.product import Epilogue, product

    rows, inner, columns = shape
    left, right = randn(rows, inner, dtype=dtype, device=device), randn(inner, columns, dtype=dtype, device=device)
    tensors = {name: randn(rows, columns, dtype=dtype, device=device, seed=seed) for name, seed in options.items()}
    exact = expected(left, right, **tensors)
    torch.testing.assert_close(product(left, right, Epilogue(**tensors)).double(), exact, rtol=2e-3, atol=1e-2)
    assert streamed == []


@EACH
@pytest.mark.parametrize("base", [True, False], ids=["base", "product"])
@pytest.mark.parametrize("nonnegative", [True, False], ids=["relu", "soft"])
def test_a_nan_stays_one_and_nothing_else_becomes_one(nonnegative, base, streamed, backend, device):
    from crate_kernels.ops.ista.triton.product import Epilogue, product

    left, right = (randn(140, 16, dtype=torch.float16, device=device, seed=s) for s in (0, 1))
    right = right[:16].contiguous()
    added = torch.zeros(140, 16, dtype=torch.float16, device=device)
    (added if base else left)[133, 3] = torch.nan
    out = product(left, right, Epilogue(0.1, added, threshold=0.2, nonnegative=nonnegative))
    wrong = torch.zeros_like(out, dtype=torch.bool)
    wrong[133, slice(3, 4) if base else slice(None)] = True
    assert torch.equal(out.isnan(), wrong)
    assert len(streamed) == 1


@EACH
@pytest.mark.parametrize("name", ["many-tokens", "two-sided", "two-steps", "tied"])
def test_steps_are_within_tolerance(name, streamed, backend, device):
    case = next(c for c in testing.cases("ista") if c.name == name)
    assert over_tolerance(case, torch.float16, backend, device) == []
    assert (not streamed) == bool(case.shape[-1] % 8 or case.shape[2] % 8)


@EACH
def test_no_table_takes_it(backend, device):
    """Until a GPU has timed it."""
    assert not any(row.config.get("PERSISTENT") for rows in tables.PRODUCT.rows.values() for row in rows)
    assert tables.STREAM in tables.PRODUCT.candidates
