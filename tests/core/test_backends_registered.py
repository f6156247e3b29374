"""Backends that others register."""

import types

import pytest
import torch

import crate_kernels
from crate_kernels._core import backends
from crate_kernels._core.backends import Backend

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
KERNELS = "crate_kernels.ops.{op}.composite"


@pytest.fixture
def registered():
    """Return a function that registers a backend for this test alone."""
    names = []

    def register(*args, **kwargs):
        backends.register(Backend(*args, **kwargs))
        names.append(args[0])

    yield register
    for name in names:
        backends.unregister(name)


def test_a_registered_backend_is_offered_until_it_is_unregistered():
    before = backends.names()
    backends.register(Backend("extra", KERNELS, remedy="wait"))
    try:
        assert backends.names() == (*before, "extra")
        assert backends.unavailable_reason("mssa", "extra") is None
        assert backends.resolve("mssa", "extra", CPU, torch.float64) == "extra"
        assert backends.kernel("tssa", "extra").__name__ == "crate_kernels.ops.tssa.composite"
    finally:
        backends.unregister("extra")
    assert backends.names() == before
    with pytest.raises(ValueError, match="got 'extra'"):
        backends.resolve("mssa", "extra", CPU, torch.float32)


def test_a_registered_backend_computes_what_is_asked_of_it(registered):
    registered("extra", KERNELS)
    w, temp = torch.randn(2, 3, 5, 8), torch.ones(3)
    torch.testing.assert_close(
        crate_kernels.tssa(w, temp, backend="extra"), crate_kernels.tssa(w, temp, backend="composite"), rtol=0, atol=0
    )


def test_a_backend_without_a_kernel_for_the_op_says_so(registered):
    registered("partial", "crate_kernels.{op}")
    assert backends.unavailable_reason("tssa", "partial") == "partial has no tssa kernel yet"
    with pytest.raises(RuntimeError, match=r"tssa: backend='partial' is unavailable: partial has no tssa kernel yet; "):
        crate_kernels.tssa(torch.randn(1, 1, 2, 4), torch.ones(1), backend="partial")


def test_a_backend_that_is_missing_keeps_its_reason_and_remedy(registered):
    registered("away", KERNELS, missing="no such driver", remedy="install the driver")
    assert backends.unavailable_reason("ista", "away") == "no such driver"
    with pytest.raises(RuntimeError, match=r"is unavailable: no such driver; install the driver$"):
        backends.resolve("ista", "away", CPU, torch.float32)


def test_registering_imports_no_kernel(registered, tmp_path, monkeypatch):
    (tmp_path / "kernels_on_disk").mkdir()
    (tmp_path / "kernels_on_disk" / "mssa.py").write_text("raise ImportError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    registered("disk", "kernels_on_disk.{op}")
    assert backends.unavailable_reason("mssa", "disk") is None
    assert backends.unavailable_reason("tssa", "disk") == "disk has no tssa kernel yet"
    with pytest.raises(ImportError, match=r"^imported$"):
        backends.kernel("mssa", "disk")


def test_a_kernel_is_imported_once(registered, monkeypatch):
    registered("once", KERNELS)
    imported = []
    monkeypatch.setattr(
        backends.importlib, "import_module", lambda name: imported.append(name) or types.ModuleType(name)
    )
    assert backends.kernel("mssa", "once") is backends.kernel("mssa", "once")
    assert imported == ["crate_kernels.ops.mssa.composite"]


def test_a_name_registered_again_gets_its_own_kernel():
    for package in ("composite", "reference"):
        backends.register(Backend("again", f"crate_kernels.ops.{{op}}.{package}"))
        try:
            assert backends.kernel("mssa", "again").__name__ == f"crate_kernels.ops.mssa.{package}"
        finally:
            backends.unregister("again")
