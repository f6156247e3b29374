"""Finding the compiled libraries: those of these sources, whole, in the package or in the user's cache."""

import re
import shutil
from pathlib import Path

import pytest
import torch

from crate_kernels._native import extension as _extension
from crate_kernels._native import libraries as _libraries
from crate_kernels._triton import table
from crate_kernels.cli import main
from tests.native.common import SOURCES, needs_sources

pytestmark = needs_sources


def test_a_change_of_the_sources_is_another_build(tmp_path):
    copy = tmp_path / "csrc"
    shutil.copytree(SOURCES, copy)
    before = _libraries.source_hash(copy)
    assert before == _libraries.source_hash(SOURCES)
    (copy / "library.cpp").write_text("// changed\n")
    assert _libraries.source_hash(copy) != before
    assert _libraries.cache_folder(before) != _libraries.cache_folder(_libraries.source_hash(copy))


def test_a_build_is_of_its_flags_its_pytorch_and_its_kind_of_machine(monkeypatch):
    def identity():
        return _libraries.source_hash(SOURCES), _libraries.cache_folder("0")

    def changed(*changes):
        before = identity()
        with monkeypatch.context() as patch:
            patch.setattr(*changes)
            return [a != b for a, b in zip(identity(), before, strict=True)]

    assert changed(_libraries, "FLAGS", (*_libraries.FLAGS, "-g")) == [True, False]
    assert changed(torch, "__version__", "2.99") == [False, True]
    assert changed(_libraries, "PLATFORM", "linux-riscv64") == [False, True]


def test_an_extension_of_other_sources_is_not_found(tmp_path, monkeypatch):
    monkeypatch.setattr(_libraries, "_PACKAGE", tmp_path)
    monkeypatch.setattr(_libraries, "source_folder", lambda: SOURCES)
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    beside = tmp_path / _libraries.EXTENSION
    assert _libraries.find() is None
    beside.write_bytes(b"crate_kernels sources 0123456789abcdef\0")
    assert _libraries.find() is None
    beside.write_bytes(b"..." + _libraries.marker(_libraries.source_hash(SOURCES)) + b"...")
    assert _libraries.find() == beside
    monkeypatch.setattr(_libraries, "source_folder", lambda: None)  # without sources any library fits
    beside.write_bytes(b"crate_kernels sources 0123456789abcdef\0")
    assert _libraries.find() == beside
    beside.write_bytes(b"another library")
    assert _libraries.find() is None


def users_library(sources, home, monkeypatch):
    """Return where a user's own build of these sources would be, in an empty home with nothing in the package."""
    monkeypatch.setattr(_libraries, "_PACKAGE", home)
    monkeypatch.setattr(_libraries, "source_folder", lambda: SOURCES)
    monkeypatch.setattr(Path, "home", lambda: home)
    cached = _libraries.cache_folder(sources) / _libraries.EXTENSION
    cached.parent.mkdir(parents=True)
    return cached


def test_the_users_own_build_is_found(tmp_path, monkeypatch):
    sources = _libraries.source_hash(SOURCES)
    cached = users_library(sources, tmp_path, monkeypatch)
    cached.write_bytes(_libraries.marker(sources))
    assert _libraries.find() == cached


def elf(sources, order="little"):
    """Return a minimal whole file: a header that locates the table of sections, the marker, that table."""
    marker = _libraries.marker(sources)
    table = 64 + len(marker)
    header = bytearray(64)
    header[:6] = b"\x7fELF\x02" + bytes([1 if order == "little" else 2])
    header[40:48], header[58:60], header[60:62] = (n.to_bytes(w, order) for n, w in ((table, 8), (64, 2), (2, 2)))
    return bytes(header) + marker + bytes(128)


CUT = {"nothing": 0, "part of the header": 30, "header": 64, "no sections": 64 + 40, "one byte": -1}


@pytest.mark.parametrize("cut", CUT.values(), ids=CUT)
def test_what_is_left_of_a_library_is_neither_loaded_nor_already_there(cut, tmp_path, monkeypatch, compiler, build):
    """The process that maps it ends by SIGBUS."""
    sources = _libraries.source_hash(SOURCES)
    cached = users_library(sources, tmp_path, monkeypatch)
    for order in ("little", "big"):
        cached.write_bytes(elf(sources, order))
        assert _libraries.find() == cached
        cached.write_bytes(elf(sources, order)[:cut])
        assert _libraries.find() is None
    status, said = build(compiler[0])
    assert status == 0
    assert "compiled in" in said
    assert _libraries.find() == cached
    assert "already there" in build(compiler[0])[1]


@pytest.mark.skipif(_extension.PATH is None, reason="needs python -m crate_kernels build")
def test_a_linkers_own_file_is_whole_and_a_part_of_it_is_not():
    content = _extension.PATH.read_bytes()
    assert _libraries._is_whole(content)
    assert not any(_libraries._is_whole(content[: len(content) * part // 8]) for part in range(1, 8))


@pytest.mark.parametrize("change", ["library", "checksum"])
def test_a_library_whose_bytes_changed_in_its_middle_is_refused_and_built_again(change, compiler, build, monkeypatch):
    """Its code would be run as it is."""
    monkeypatch.setattr(_libraries, "_PACKAGE", compiler[0].parent / "package")
    monkeypatch.setattr(_libraries, "source_folder", lambda: SOURCES)
    assert build(compiler[0])[0] == 0
    built = _libraries.find()
    assert built is not None
    if change == "library":
        marker = _libraries.marker(_libraries.source_hash(SOURCES))
        before, after = built.read_bytes().split(marker)
        built.write_bytes(before + marker + b"?" + after[1:])
    else:
        built.with_suffix(".crc32").write_bytes(b"\xff")
    assert _libraries.find() is None
    assert _libraries.why_missing() == f"the C++ extension {built} is damaged: its bytes are not those that were built"
    assert "compiled in" in build(compiler[0])[1]
    assert _libraries.find() == built
    built.unlink()
    assert _libraries.why_missing() == "the C++ extension is not built"


HOMES = {
    "a file": (
        lambda folder: folder / "file",
        "the user's cache cannot be written: .*Not a directory.*; set XDG_CACHE_HOME or HOME",
    ),
    "too long": (
        lambda folder: folder / ("x" * 300),
        "the user's cache cannot be written: .*too long.*; set XDG_CACHE_HOME or HOME",
    ),
    "none": (None, "there is no cache without a home folder: Could not determine home directory. Set HOME"),
}


@pytest.mark.parametrize(("home", "message"), HOMES.values(), ids=HOMES)
def test_without_a_usable_home_nothing_is_found_and_build_says_so(home, message, tmp_path, monkeypatch, capsys):
    def none():
        raise RuntimeError("Could not determine home directory.")

    (tmp_path / "file").touch()
    monkeypatch.setattr(_libraries, "_PACKAGE", tmp_path)
    monkeypatch.setattr(_libraries, "source_folder", lambda: SOURCES)
    monkeypatch.setattr(Path, "home", none if home is None else lambda: home(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert _libraries.find() is None
    assert main(["build"]) == 1
    assert re.search(f"^build: {message}", capsys.readouterr().out)


CACHES = {
    "absolute": ("{tmp}/caches", "caches/crate_kernels"),
    "relative": ("caches", ".cache/crate_kernels"),
    "empty": ("", ".cache/crate_kernels"),
}


@pytest.mark.parametrize(("cache_home", "expected"), CACHES.values(), ids=CACHES)
def test_the_cache_is_where_the_user_has_caches(cache_home, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", cache_home.format(tmp=tmp_path))
    assert _libraries.user_cache() == tmp_path / expected
    assert _libraries.cache_folder("a").parent == tmp_path / expected
    assert table.user_table("A GPU") == tmp_path / expected / "tune" / "A-GPU.json"


CHANGES = {
    "kernels-of-gpus": ("common/cuda/mma.cuh", False),
    "cpu": ("ista/cpu/ista_cpu.cpp", True),
    "cpu-header": ("ista/cpu/kernels.h", True),
    "shared": ("common/dtype.h", True),
}


@pytest.mark.parametrize(("name", "extension"), CHANGES.values(), ids=CHANGES)
def test_a_change_rebuilds_what_is_made_of_it_and_nothing_else(name, extension, tmp_path):
    copy = tmp_path / "csrc"
    shutil.copytree(SOURCES, copy)
    before = _libraries.source_hash(copy)
    assert (copy / name).exists()
    with open(copy / name, "a") as file:
        file.write("// changed\n")
    assert (_libraries.source_hash(copy) != before) == extension


TREE = {"a.h": "one\ntwo\n", "b.h": "three\n", "m.cpp": "four\n"}
OTHER_TREES = {
    "swapped-headers": {"a.h": TREE["b.h"], "b.h": TREE["a.h"]},
    "renamed-header": {"a.h": None, "a2.h": TREE["a.h"]},
    "header-in-a-folder": {"a.h": None, "a/a.h": TREE["a.h"]},
    "line-of-another-header": {"a.h": "one\n", "b.h": "two\nthree\n"},
    "empty-header": {"c.h": ""},
    "one-header-less": {"b.h": None},
    "line-of-another-kind": {"b.h": "three\nfour\n", "m.cpp": ""},
}


@pytest.mark.parametrize("changes", OTHER_TREES.values(), ids=OTHER_TREES)
def test_the_same_lines_in_other_files_are_other_sources(changes, tmp_path):
    def hash_of(name, tree):
        for path, text in tree.items():
            if text is not None:
                (tmp_path / name / path).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / name / path).write_text(text)
        return _libraries.source_hash(tmp_path / name)

    before = hash_of("before", TREE)
    assert hash_of("again", TREE) == before
    assert hash_of("after", TREE | changes) != before
