"""An extension that this PyTorch, or this system, cannot load is as good as none."""

import os
import subprocess
import sys
from pathlib import Path

from crate_kernels._native import libraries
from tests.native.common import SOURCES, needs_sources

SCRIPT = """
import pytest, torch
import crate_kernels as ck
from crate_kernels import nn
from crate_kernels._core import plan

w = torch.randn(1, 2, 5, 16, requires_grad=True)
for call in (ck.mssa, lambda w: ck.tssa(w, torch.ones(2)), lambda w: ck.ista(w, torch.eye(16)), nn.ISTA(16)):
    for _ in range(4):
        call(w).sum().backward()
assert not plan.available() and plan.counts() == (0, 0, 0)
with pytest.raises(RuntimeError, match="'cpp' is unavailable: the C.. extension .*_cpu.so cannot be loaded: .*build"):
    ck.mssa(w, backend="cpp")
"""


@needs_sources
def test_calls_run_in_python_where_the_extension_cannot_be_loaded(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    sources = libraries.source_hash(SOURCES)  # pyright: ignore[reportArgumentType]
    path = libraries.cache_folder(sources) / libraries.EXTENSION
    path.parent.mkdir(parents=True)
    path.write_bytes(libraries.marker(sources))
    root = str(Path(libraries.__file__).parents[2])
    command = [sys.executable, "-W", "error", "-c", SCRIPT]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": root}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
