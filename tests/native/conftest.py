"""Fixtures that install a stand-in compiler."""

from pathlib import Path

import pytest

from crate_kernels.cli import main
from tests.native.common import SLOW_COMPILER, WRITE


@pytest.fixture
def compiler(tmp_path):
    """Return a stand-in compiler and its log of links: the real one takes a minute."""
    path, log = tmp_path / "cxx", tmp_path / "log"
    path.write_text(SLOW_COMPILER.format(log=log, write=WRITE))
    path.chmod(0o755)
    return path, log


@pytest.fixture
def build(tmp_path, monkeypatch, capsys):
    """Return a function that builds with a compiler into an empty home, and returns the status and the output."""

    def run(compiler):
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr(Path, "home", lambda: tmp_path)
        monkeypatch.setenv("CXX", str(compiler))
        return main(["build"]), capsys.readouterr().out

    return run
