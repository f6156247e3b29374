"""The stand-in for cuBLASLt."""

import pytest

from tests.tools import lt as standin


@pytest.fixture(scope="session")
def path_of_cublaslt(tmp_path_factory):
    return standin.compiled(tmp_path_factory.mktemp("lt"))


@pytest.fixture
def cublaslt(path_of_cublaslt, monkeypatch):
    """Take the stand-in for every product that it serves."""
    from crate_kernels._triton.table import forced
    from crate_kernels.ops.ista import lt
    from crate_kernels.ops.ista.triton import tables

    monkeypatch.setattr(lt, "_said", set())
    with standin.driving(path_of_cublaslt) as found, forced(tables.LINEAR, {"LT": 1}), forced(tables.GATED, {"LT": 1}):
        yield found
