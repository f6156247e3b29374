"""Building the extension: built once, with a reason if it fails, from PyTorch's stable headers only."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils.cpp_extension import include_paths

from crate_kernels._native import build as build_module
from crate_kernels._native import libraries as _libraries
from crate_kernels._native import ninja_build
from tests.native.common import SOURCES, assert_one_of_two_builds, files_left, needs_sources
from tests.ops.common import LEVELS

pytestmark = needs_sources


def test_parallel_first_use_builds_once(tmp_path, compiler):
    path, log = compiler
    assert_one_of_two_builds({"PATH": os.environ["PATH"], "HOME": str(tmp_path), "CXX": str(path)})
    assert log.read_text() == "link\n"


def test_a_failed_build_says_why_and_leaves_nothing(tmp_path, build):
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho no such flag >&2\nexit 1\n")
    broken.chmod(0o755)
    status, said = build(broken)
    assert status == 1
    assert "no such flag" in said
    assert files_left(tmp_path) == ["lock"]


def test_a_missing_compiler_is_said_to_be_missing(tmp_path, build):
    status, said = build(tmp_path / "nowhere")
    assert status == 1
    assert "no C++ compiler" in said
    assert "CXX" in said


def test_clang_is_told_the_level_of_each_file_as_gcc_reads_it(monkeypatch):
    sources = [path.relative_to(_libraries.source_folder()) for path in _libraries.source_folder().rglob("*.cpp")]
    monkeypatch.setattr(build_module.platform, "machine", lambda: "x86_64")
    options = build_module._level_options([str(path) for path in sources], "Debian clang version 14.0.6")
    assert {Path(source).stem.partition("_")[2] for source in options} == set(LEVELS) - {"portable"}
    for source, flags in options.items():
        header = _libraries.source_folder() / f"common/cpu/level_{Path(source).stem.partition('_')[2]}.h"
        targets = ",".join(re.findall(r'#pragma GCC target\("(.*)"\)', header.read_text()))
        assert set(targets.split(",")) == {flag.removeprefix("-m") for flag in flags}, source
    assert build_module._level_options([str(path) for path in sources], "g++ (Debian 12.2.0) 12.2.0") == {}
    monkeypatch.setattr(build_module.platform, "machine", lambda: "aarch64")
    assert build_module._level_options([str(path) for path in sources], "Debian clang version 14.0.6") == {}


COMPILERS = {
    "unbalanced quote": ("g++ -DNAME='x", "CXX cannot be read (No closing quotation): g++ -DNAME='x"),
    "options alone": ("-O2", "CXX must name a C++ compiler, got '-O2'"),
    "empty": ("", "CXX must name a C++ compiler, got ''"),
}


@pytest.mark.parametrize(("cxx", "message"), COMPILERS.values(), ids=COMPILERS)
def test_a_cxx_that_names_no_compiler_is_refused(cxx, message, build):
    assert build(cxx) == (1, f"build: {message}\n")


def test_a_compiler_that_fails_is_named(build):
    status, said = build("false")
    assert status == 1
    assert said.startswith("build: the C++ compiler failed with status 1: false --version\n")


def test_options_that_come_with_the_compiler_win(tmp_path, compiler, build):
    path, _ = compiler
    log = tmp_path / "commands"
    path.write_text(path.read_text().replace("PATH=", f'echo "$@" >> "{log}"\nPATH='))
    assert build(f"{path} -O1 -fsanitize=address")[0] == 0
    commands = [line.split() for line in log.read_text().splitlines() if "csrc" in line or "-shared" in line]
    assert all("-fsanitize=address" in words for words in commands)
    compiled = [words for words in commands if "-c" in words]
    assert compiled
    assert all(words.index("-O3") < words.index("-O1") for words in compiled)


# What changes between two builds: CXX, and what the compiler says of its version.
COMPILER_CHANGES = {
    "nothing": ("{path}", "2", False),
    "another-compiler": ("{path}-other", "2", True),
    "options": ("{path} -O1", "2", True),
    "version": ("{path}", "3", True),
    "no-compiler": ("{path}-missing", "2", False),
}


@pytest.mark.parametrize(("cxx", "version", "compiles"), COMPILER_CHANGES.values(), ids=COMPILER_CHANGES)
def test_a_library_of_another_compiler_is_made_anew(cxx, version, compiles, compiler, build):
    path, _ = compiler
    text = path.read_text()

    def said(cxx, version):
        path.write_text(text.replace("*--version*) exit;;", f"*--version*) echo cxx {version}; exit;;"))
        shutil.copy(path, f"{path}-other")
        status, said = build(cxx.format(path=path))
        assert status == 0, said
        return "compiled in" in said

    assert said("{path}", "2")
    assert said(cxx, version) == compiles
    assert not said(cxx, version)


def test_a_disk_without_room_is_said_to_be_full(tmp_path, monkeypatch, compiler, build):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ninja_build.os, "replace", full)
    status, said = build(compiler[0])
    assert (status, said.splitlines()[-1]) == (1, "build: [Errno 28] No space left on device")
    assert files_left(tmp_path) == ["lock"]


def test_without_sources_a_build_says_what_to_install(monkeypatch, build):
    monkeypatch.setattr(_libraries, "source_folder", lambda: None)
    status, said = build("c++")
    assert (status, said) == (
        1, "build: the C++ sources are not installed; install from a source distribution or a checkout\n"
    )  # fmt: skip


def test_a_pytorch_that_cannot_be_imported_is_named(monkeypatch, build):
    monkeypatch.setitem(sys.modules, "torch.utils.cpp_extension", None)
    monkeypatch.delattr("torch.utils.cpp_extension", raising=False)
    status, said = build("c++")
    assert status == 1
    assert said.startswith("build: PyTorch is not importable (")


STABLE = ("torch/csrc/stable/", "torch/headeronly/", "torch/csrc/inductor/aoti_torch/")


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_the_extension_includes_nothing_but_pytorchs_stable_headers():
    """Others refuse TORCH_TARGET_VERSION on some PyTorch, or are of one Python, and a floor that nobody runs breaks."""
    folders = include_paths()
    command = ["c++", *_libraries.FLAGS, "-DCRATE_SOURCES=0", *(f"-isystem{path}" for path in folders), "-M"]
    done = subprocess.run([*command, *map(str, SOURCES.rglob("*.cpp"))], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    words = {word for word in done.stdout.split() if word.endswith(".h")}
    names = {os.path.relpath(word, root) for root in folders for word in words if word.startswith(f"{root}/")}
    assert any(name.startswith("torch/csrc/stable/") for name in names)
    assert sorted(name for name in names if not name.startswith(STABLE)) == []
