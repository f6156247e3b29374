"""Building and finding the C++ extension: once for all who ask, never from import, never an old one."""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from crate_kernels import _build

SOURCES = _build.source_folder()
pytestmark = pytest.mark.skipif(SOURCES is None, reason="no C++ sources")
SLOW_COMPILER = """#!/bin/sh
# Writes what it is asked to, and remembers that it was asked to link.
for last; do :; done
case "$*" in *-shared*) echo link >> "{log}"; sleep 0.3;; esac
echo object > "$last"
"""


@pytest.fixture
def compiler(tmp_path):
    """Return a stand-in compiler and its log of links: the real one takes a minute."""
    path, log = tmp_path / "cxx", tmp_path / "log"
    path.write_text(SLOW_COMPILER.format(log=log))
    path.chmod(0o755)
    return path, log


def build(home, compiler):
    root = str(Path(_build.__file__).parents[1])
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "CXX": str(compiler), "PYTHONPATH": root}
    command = [sys.executable, "-m", "crate_kernels", "build"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_parallel_first_use_builds_once(tmp_path, compiler):
    path, log = compiler
    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(lambda _: build(tmp_path, path), range(3)))
    assert [r.returncode for r in results] == [0, 0, 0], results
    assert log.read_text() == "link\n"
    assert sum("compiled in" in r.stdout for r in results) == 1
    assert sum("already there" in r.stdout for r in results) == 2


def test_a_failed_build_says_why_and_leaves_nothing(tmp_path):
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho no such flag >&2\nexit 1\n")
    broken.chmod(0o755)
    result = build(tmp_path, broken)
    assert result.returncode == 1
    assert "no such flag" in result.stdout
    assert [p.name for p in (tmp_path / ".cache").rglob("*") if p.is_file()] == ["lock"]


def test_a_missing_compiler_is_said_to_be_missing(tmp_path):
    result = build(tmp_path, tmp_path / "nowhere")
    assert result.returncode == 1
    assert "no C++ compiler" in result.stdout
    assert "CXX" in result.stdout


def test_options_that_come_with_the_compiler_win(tmp_path, compiler):
    path, _ = compiler
    log = tmp_path / "commands"
    path.write_text(path.read_text().replace("for last;", f'echo "$@" >> "{log}"; for last;'))
    assert build(tmp_path, f"{path} -O1 -fsanitize=address").returncode == 0
    commands = [line.split() for line in log.read_text().splitlines() if "csrc" in line or "-shared" in line]
    assert all("-fsanitize=address" in words for words in commands)
    compiled = [words for words in commands if "-c" in words]
    assert compiled
    assert all(words.index("-O3") < words.index("-O1") for words in compiled)


def test_a_change_of_the_sources_is_another_build(tmp_path):
    copy = tmp_path / "csrc"
    shutil.copytree(SOURCES, copy)
    before = _build.source_hash(copy)
    assert before == _build.source_hash(SOURCES)
    (copy / "library.cpp").write_text("// changed\n")
    assert _build.source_hash(copy) != before
    assert _build.cache_folder(before) != _build.cache_folder(_build.source_hash(copy))


def test_an_extension_of_other_sources_is_not_found(tmp_path, monkeypatch):
    monkeypatch.setattr(_build, "_PACKAGE", tmp_path)
    monkeypatch.setattr(_build, "source_folder", lambda: SOURCES)
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    beside = tmp_path / f"_C{_build._SUFFIX}"
    assert _build.find() is None
    beside.write_bytes(b"crate_kernels sources 0123456789abcdef\0")
    assert _build.find() is None
    beside.write_bytes(b"..." + _build._marker(_build.source_hash(SOURCES)) + b"...")
    assert _build.find() == beside


def test_the_users_own_build_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(_build, "_PACKAGE", tmp_path)
    monkeypatch.setattr(_build, "source_folder", lambda: SOURCES)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    cached = _build.cache_folder(_build.source_hash(SOURCES)) / f"_C{_build._SUFFIX}"
    cached.parent.mkdir(parents=True)
    cached.touch()
    assert _build.find() == cached
