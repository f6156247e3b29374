"""An extension that this PyTorch, or this system, cannot load is as good as none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from crate_kernels._native import extension, libraries
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


WITHOUT = {
    "load": extension.load,
    "info": extension.build_info,
    "level": extension.cpu_capability,
    "set": extension.set_cpu_capability,
    "operators": extension.Library,
}


@pytest.mark.parametrize("function", WITHOUT.values(), ids=WITHOUT)
def test_without_it_every_function_says_what_to_do(function, monkeypatch):
    monkeypatch.setattr(extension, "PATH", None)
    monkeypatch.setattr(extension, "MISSING", "the C++ extension is not built")
    with pytest.raises(
        ImportError, match=r"^crate_kernels: the C\+\+ extension is not built; python -m crate_kernels bu"
    ):
        function()


def test_what_does_not_load_says_why(monkeypatch):
    def refuse(path):
        raise OSError("could not load") from ValueError("undefined symbol: x")

    monkeypatch.setattr(extension, "_failures", [])
    monkeypatch.setattr(torch.ops, "load_library", refuse)
    assert not extension._loads(Path("/a/_cpu.so"))
    assert extension._failures == ["the C++ extension /a/_cpu.so cannot be loaded: undefined symbol: x"]
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    assert extension._loads(Path("/a/_cpu.so"))
    assert len(extension._failures) == 1


@pytest.mark.skipif(extension.PATH is None, reason="needs python -m crate_kernels build")
def test_a_level_is_another_kernel_and_operators_are_looked_up_once():
    assert extension.load() == extension.PATH
    assert {"sources", "compiler", "standard", "torch_abi", "cpu_capabilities"} <= extension.build_info().keys()
    best = extension.cpu_capability()
    try:
        extension.set_cpu_capability("portable")
        assert extension.cpu_capability() == "portable"
    finally:
        extension.set_cpu_capability()
    assert extension.cpu_capability() == best
    assert extension.library() is extension.library()
    name = "set_cpu_capability"
    found = getattr(extension.library(), name)
    assert found is getattr(torch.ops.crate_kernels_C, name).default
    assert vars(extension.library())[name] is found
