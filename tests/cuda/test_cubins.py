"""Compiled kernels in the user's cache: one process compiles, corrupted files do not count, no cache is no error."""

import multiprocessing
import os
import time
from pathlib import Path

import pytest

from crate_kernels._cuda import cubins, sources
from crate_kernels._cuda.sources import Kernel
from crate_kernels._native import libraries, nvrtc

KERNEL = Kernel("ista/cuda/update.cuh", "ista_update_kernel")


class Compiler:
    """Stands in for NVRTC: notes what it compiles, in a file, for processes have no list in common."""

    version = (13, 0)

    def __init__(self, log, seconds=0.0):
        self.log, self.seconds = log, seconds

    def architecture(self, capability):
        return f"sm_{capability}" if capability < 100 else "compute_90"

    def compile(self, source, architecture, options, headers, names):
        time.sleep(self.seconds)
        with open(self.log, "a") as file:
            file.write(f"{architecture} {names[0]}\n")
        return nvrtc.Compiled(b"\x7fELF\n\0" + bytes(1000), {names[0]: f"_Z{names[0]}"})

    def count(self):
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Return the folder of the kernels of an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "crate_kernels" / "kernels"


@pytest.fixture
def compiler(tmp_path):
    return Compiler(tmp_path / "log")


def compiled(compiler, kernel=KERNEL, capability=80, records=()):
    return cubins.compiled(kernel, capability, records, compiler)


def test_the_second_time_is_read(cache, compiler):
    first, second = compiled(compiler), compiled(compiler)
    assert first == second
    assert first[1] == "_Zista_update_kernel"
    assert compiler.count() == 1
    assert [path.suffix for path in cache.iterdir()] == [".cubin"]


def test_the_compiler_is_that_of_the_process(cache, compiler, monkeypatch):
    monkeypatch.setattr(nvrtc, "library", lambda: compiler)
    assert cubins.compiled(KERNEL, 80) == compiled(compiler)
    assert compiler.count() == 1


CHANGED = {
    "architecture": {"capability": 90},
    "virtual": {"capability": 120},
    "kernel": {"kernel": Kernel(KERNEL.header, "ista_symmetrize_kernel<bf16>")},
}


@pytest.mark.parametrize("changed", CHANGED.values(), ids=CHANGED)
def test_another_kernel_is_another_file(changed, cache, compiler):
    compiled(compiler)
    compiled(compiler, **changed)
    assert compiler.count() == len(list(cache.iterdir())) == 2


@pytest.mark.parametrize("what", ["version", "options", "sources"])
def test_what_decides_the_binary_decides_the_file(what, cache, compiler, monkeypatch):
    compiled(compiler)
    if what == "version":
        compiler.version = (13, 1)
    elif what == "options":
        monkeypatch.setattr(cubins, "OPTIONS", (*cubins.OPTIONS, "-G"))
    else:
        headers = sources.headers(KERNEL.header) | {"common/dtype.h": "// changed"}
        monkeypatch.setattr(sources, "headers", lambda name: headers)
    compiled(compiler)
    assert compiler.count() == 2


CORRUPTIONS = {
    "empty": lambda content: b"",
    "short": lambda content: content[:-1],
    "long": lambda content: content + b"\0",
    "a-bit": lambda content: content[:-1] + b"\1",
    "another-kernel": lambda content: content.replace(b"ista_update", b"ista_updates", 1),
    "another-name": lambda content: content.replace(b"_Zista_update", b"_Zista_updats", 1),
    "header": lambda content: b"{}\n" + content,
    "text": lambda content: b"\xff\xfe\n" + content,
    "list": lambda content: b"[]\n" + content,
}


@pytest.mark.parametrize("corrupt", CORRUPTIONS.values(), ids=CORRUPTIONS)
def test_a_corrupt_file_is_compiled_again(corrupt, cache, compiler):
    expected = compiled(compiler)
    (path,) = cache.iterdir()
    path.write_bytes(corrupt(path.read_bytes()))
    assert compiled(compiler) == expected
    assert compiled(compiler) == expected
    assert compiler.count() == 2


def _in_a_process(log, results):
    results.put(compiled(Compiler(log, 0.3)))


def test_one_of_several_processes_compiles(cache, compiler):
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    processes = [context.Process(target=_in_a_process, args=(compiler.log, results)) for _ in range(4)]
    for process in processes:
        process.start()
    found = [results.get() for _ in processes]
    for process in processes:
        process.join(60)
    assert compiler.count() == 1
    assert all(one == found[0] for one in found)
    assert len(list(cache.iterdir())) == 1, "no lock stays"


def test_without_a_home_each_process_compiles_for_itself(compiler, monkeypatch):
    def homeless():
        raise libraries.BuildError("there is no home folder")

    monkeypatch.setattr(libraries, "user_cache", homeless)
    assert compiled(compiler) == compiled(compiler)
    assert compiler.count() == 2


def test_a_home_that_cannot_be_written_is_no_error(cache, compiler, monkeypatch):
    cache.parent.parent.write_text("a file where the folder would be")
    assert compiled(compiler)[1] == "_Zista_update_kernel"


@pytest.mark.parametrize("function", ["owned", "put"])
def test_a_folder_that_cannot_be_written_is_no_error(function, cache, compiler, monkeypatch):
    def refuse(path, *args):
        raise OSError(30, "Read-only file system", str(path))

    monkeypatch.setattr(cubins.files, function, refuse)
    assert compiled(compiler)[1] == "_Zista_update_kernel"
    assert list(cache.iterdir()) == [] or function == "owned"


@pytest.mark.parametrize(("limit", "kept"), [("_MAX_FILES", 3), ("_MAX_BYTES", 3)])
def test_what_was_used_last_stays(limit, kept, cache, compiler, monkeypatch):
    compiled(compiler, Kernel(KERNEL.header, "kernel_0"))
    size = next(cache.iterdir()).stat().st_size
    monkeypatch.setattr(cubins, limit, kept if limit == "_MAX_FILES" else kept * size)
    for number in range(6):
        compiled(compiler, Kernel(KERNEL.header, f"kernel_{number}"))
        for path in cache.iterdir():  # as if made some seconds apart
            os.utime(path, (path.stat().st_mtime - 10,) * 2)
    compiled(compiler, Kernel(KERNEL.header, "kernel_5"))
    assert compiler.count() == 6
    assert len(list(cache.iterdir())) == kept
    compiled(compiler, Kernel(KERNEL.header, "kernel_0"))
    assert compiler.count() == 7


def test_headers_are_those_that_the_kernel_includes(cache):
    texts = sources.headers(KERNEL.header)
    assert {"ista/cuda/update.cuh", "common/cuda/device.cuh", "common/dtype.h"} <= texts.keys()
    assert not any("tests" in name or name.startswith("torch") for name in texts)
    own = {name for name in texts if (Path(libraries.source_folder()) / name).exists()}
    for name in own:
        for included in sources._INCLUDE.findall(texts[name]):
            assert included in texts, f"{name} includes {included}"


def test_without_sources_there_is_nothing_to_compile(compiler, monkeypatch):
    monkeypatch.setattr(libraries, "source_folder", lambda: None)
    sources.headers.cache_clear()
    with pytest.raises(libraries.BuildError, match="the CUDA sources are not installed"):
        compiled(compiler)
