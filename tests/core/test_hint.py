"""None without the C++ extension: one log record says what would be faster, and none where nothing can be done."""

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import crate_kernels
from crate_kernels._core import backends

SAID = (
    "crate_kernels: on this CPU, backend=None takes 'composite', PyTorch's own operators: "
    "the C++ extension is not built (python -m crate_kernels build)"
)
MISSING = "the C++ extension is not built (python -m crate_kernels build)"
X, WEIGHT = torch.randn(3, 8), torch.randn(8, 8)


@pytest.fixture
def log(monkeypatch, caplog):
    """Return a function that lists the records of a process without the extension, but with a compiler."""
    monkeypatch.setattr(backends, "shutil", SimpleNamespace(which=lambda name: f"/usr/bin/{name}"))
    monkeypatch.setitem(backends._BACKENDS, "cpp", replace(backends._BACKENDS["cpp"], missing=MISSING))
    backends._hint.cache_clear()
    caplog.set_level(logging.DEBUG, logger="crate_kernels")
    yield lambda: [each for each in caplog.records if each.name.startswith("crate_kernels")]
    backends._hint.cache_clear()


def test_a_record_once(log):
    for _ in range(2):
        crate_kernels.ista(X, WEIGHT)
        crate_kernels.mssa(X[None, None])
    assert [(each.name, each.levelname, each.getMessage()) for each in log()] == [("crate_kernels", "WARNING", SAID)]


SILENT = {
    "built": lambda patch: patch.setitem(backends._BACKENDS, "cpp", replace(backends._BACKENDS["cpp"], missing=None)),
    "no-compiler": lambda patch: patch.setattr(backends, "shutil", SimpleNamespace(which=lambda name: None)),
    "no-sources": lambda patch: patch.setattr(backends.libraries, "source_folder", lambda: None),
}


@pytest.mark.parametrize("change", SILENT.values(), ids=SILENT)
def test_no_record_where_nothing_is_missing_or_can_be_built(change, log, monkeypatch):
    change(monkeypatch)
    assert backends.resolve("ista", None, torch.device("cpu"), torch.float32) in ("cpp", "composite")
    assert not log()


CALLS = {
    "named": lambda: crate_kernels.ista(X, WEIGHT, backend="composite"),
    "double": lambda: crate_kernels.ista(X.double(), WEIGHT.double()),  # which no kernel takes
    "meta": lambda: crate_kernels.ista(X.to("meta"), WEIGHT.to("meta")),
    "compiled": lambda: torch.compile(crate_kernels.ista, fullgraph=True, backend="eager")(X, WEIGHT),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_no_record_where_the_extension_would_not_run(call, log):
    call()
    assert not log()
