"""The build by ninja: it compiles only changes, resumes after a stop, and reports its progress."""

import fcntl
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from crate_kernels._native import build, ninja_build
from crate_kernels.cli import build as build_command

needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
# The headers that each source includes.
TREE = {
    "library.cpp": (),
    "ista/cpu/update.cpp": ("../../common/vec.h", "square.h"),
    "ista/cpu/other.cpp": ("../../common/vec.h",),
    "alone.cpp": (),
}
HEADERS = ("common/vec.h", "ista/cpu/square.h")
COMPILER = """#!/bin/sh
case "$*" in *" -c "*) echo "$@" >> "{log}";; esac
{before}
exec c++ "$@" -O0
"""


class Tree:
    """A few sources, a compiler that logs the files it compiles, and the folders of the results."""

    def __init__(self, folder, monkeypatch):
        self.sources, self.root, self.target = folder / "checkout" / "csrc", folder / "root", folder / "to" / "_cpu.so"
        self.log, self.compiler = folder / "log", folder / "cxx"
        for name in HEADERS:
            self.write(name, f"#pragma once // {name}\n")  # gcc treats equal files of the same time as one file
        for name, headers in TREE.items():
            self.write(name, "".join(f'#include "{header}"\n' for header in headers))
        monkeypatch.setenv("CXX", shlex.quote(str(self.compiler)))
        self.set_compiler()

    def set_compiler(self, before=""):
        self.compiler.write_text(COMPILER.format(log=self.log, before=before))
        self.compiler.chmod(0o755)

    def write(self, name, text):
        path = self.sources / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def build(self, show=build.show_nothing):
        """Build and return the sources that were compiled."""
        self.log.write_text("")
        build.compile_extension(self.sources, self.target, self.root, show)
        return self.compiled()

    def compiled(self):
        lines = self.log.read_text().splitlines()
        return {name for name in TREE if any(f"csrc/{name}" in line.split() for line in lines)}

    def objects(self):
        (folder,) = (path for path in self.root.iterdir() if len(list(path.iterdir())) > 1)
        return folder


@pytest.fixture
def tree(tmp_path, monkeypatch):
    return Tree(tmp_path / "a folder", monkeypatch)  # spaces in names must be quoted


CHANGES = {
    "nothing": ((), set()),
    "leaf header": (("ista/cpu/square.h",), {"library.cpp", "ista/cpu/update.cpp"}),
    "shared header": (("common/vec.h",), {"library.cpp", "ista/cpu/update.cpp", "ista/cpu/other.cpp"}),
    "source": (("alone.cpp",), {"library.cpp", "alone.cpp"}),
}


@needs_compiler
def test_what_depends_on_a_change_is_compiled_and_nothing_else(tree):
    """The library's own source besides: it says of what sources the library is."""
    assert tree.build() == set(TREE)
    for number, (name, (changed, expected)) in enumerate(CHANGES.items()):
        for path in changed:
            tree.write(path, f"#pragma once\nint changed_{number}();\n" if path.endswith(".h") else f"// {number}\n")
        tree.target.unlink()
        assert tree.build() == expected, name
        assert tree.target.exists(), name


@needs_compiler
def test_a_change_is_told_by_content_not_by_time(tree):
    tree.build()
    path = tree.write("alone.cpp", "int restored_from_an_archive;\n")
    os.utime(path, (0, 0))
    assert tree.build() == {"library.cpp", "alone.cpp"}
    for path in tree.sources.rglob("*"):
        os.utime(path)
    assert tree.build() == set()
    (tree.sources / "alone.cpp").unlink()  # its object must not be linked
    assert tree.build() == {"library.cpp"}
    assert b"restored_from_an_archive" not in tree.target.read_bytes()


@needs_compiler
def test_other_flags_and_another_compiler_compile_everything(tree, monkeypatch):
    tree.build()
    monkeypatch.setenv("CXX", f"{shlex.quote(str(tree.compiler))} -O1")
    assert tree.build() == set(TREE)
    tree.set_compiler('case "$*" in --version) echo another; exit;; esac')
    assert tree.build() == set(TREE)


@needs_compiler
def test_two_checkouts_do_not_undo_each_others_work(tree):
    tree.build()
    first, second = tree.sources, tree.sources.parents[1] / "second" / "csrc"
    shutil.copytree(first, second)
    tree.sources = second
    tree.write("alone.cpp", "// changed\n")
    assert tree.build() == set(TREE)
    for tree.sources in (first, second):
        assert tree.build() == set()


@needs_compiler
def test_an_error_names_the_file_of_the_checkout_and_what_is_compiled_stays(tree):
    """The compiler reads a copy, which nobody should edit."""
    tree.write("ista/cpu/square.h", "#pragma once\n#error not so\n")
    with pytest.raises(build.BuildError, match=r"csrc/ista/cpu/square.h:2:2: error: #error not so") as caught:
        tree.build()
    assert str(tree.root) not in str(caught.value)
    assert not tree.target.exists()
    tree.write("ista/cpu/square.h", "#pragma once\n")
    assert "ista/cpu/update.cpp" in tree.build()
    assert tree.target.exists()


def wait_for(condition):
    for _ in range(400):
        if condition():
            return
        time.sleep(0.025)
    pytest.fail("waited in vain")


def is_locked(folder):
    with open(folder / "lock") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


BUILD = """
import sys
from pathlib import Path
from crate_kernels._native import build
build.compile_extension(*map(Path, sys.argv[1:]))
"""


@needs_compiler
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "killed"])
def test_a_build_that_is_stopped_leaves_nothing_half_done_and_the_next_resumes(number, tree, monkeypatch):
    monkeypatch.setenv("MAX_JOBS", "1")
    stuck = tree.log.with_name("stuck")
    tree.set_compiler(f"""case "$*" in *csrc/ista/cpu/update.cpp*) touch "{stuck}"; sleep 1.5;; esac""")
    arguments = [str(path) for path in (tree.sources, tree.target, tree.root)]
    environment = {**os.environ, "PYTHONPATH": str(Path(build.__file__).parents[2])}
    with subprocess.Popen(
        [sys.executable, "-c", BUILD, *arguments], env=environment, stderr=subprocess.PIPE
    ) as process:
        wait_for(stuck.exists)
        process.send_signal(number)
        process.communicate()
    assert process.returncode != 0
    # A killed build leaves its compilers running, and they keep the lock: two ninjas must not write to one folder.
    assert is_locked(tree.objects()) == (number == signal.SIGKILL)
    assert not tree.target.exists()
    done = tree.compiled() - {"ista/cpu/update.cpp"}
    assert done == {"alone.cpp", "ista/cpu/other.cpp"}
    tree.set_compiler()
    assert tree.build() == {"ista/cpu/update.cpp", "library.cpp"}
    assert tree.target.exists()


@needs_compiler
@pytest.mark.parametrize("jobs", [1, 2])
def test_as_many_compilers_run_at_once_as_max_jobs_says(jobs, tree, monkeypatch):
    monkeypatch.setenv("MAX_JOBS", str(jobs))
    running = tree.log.with_name("running")
    running.mkdir()
    tree.set_compiler(f"""case "$*" in *" -c "*) touch "{running}/$$"; ls "{running}" | wc -l >> "{running}.log"
    sleep 0.1; rm "{running}/$$";; esac""")
    tree.build()
    assert max(map(int, Path(f"{running}.log").read_text().split())) == jobs


@pytest.mark.parametrize("jobs", ["0", "-1", "two"])
def test_a_max_jobs_that_is_no_number_is_refused(jobs, tree, monkeypatch):
    monkeypatch.setenv("MAX_JOBS", jobs)
    with pytest.raises(build.BuildError, match=f"MAX_JOBS must be a positive integer, got '{jobs}'"):
        tree.build()


def test_without_ninja_the_error_says_how_to_get_it(tree, monkeypatch):
    monkeypatch.setitem(sys.modules, "ninja", None)
    with pytest.raises(build.BuildError, match="ninja is not installed: pip install ninja"):
        tree.build()


@needs_compiler
def test_editors_are_told_how_each_source_is_compiled(tree):
    tree.build()
    entries = json.loads((tree.objects() / "compile_commands.json").read_text())
    assert {entry["file"] for entry in entries} == set(TREE)
    for entry in entries:
        assert Path(entry["directory"]) == tree.sources
        subprocess.run([*entry["arguments"], "-fsyntax-only"], cwd=entry["directory"], check=True)


@needs_compiler
def test_folders_that_no_build_used_for_a_month_are_emptied(tree, monkeypatch):
    tree.build()
    old = tree.objects()
    monkeypatch.setenv("CXX", "c++")  # another compiler has another folder of objects
    os.utime(old / "lock", (time.time() - 29 * 86400,) * 2)
    tree.build()
    assert (old / "library.so").exists()
    with ninja_build.locked(old):
        os.utime(old / "lock", (time.time() - 31 * 86400,) * 2)
        tree.build()
    assert (old / "library.so").exists()
    os.utime(old / "lock", (time.time() - 31 * 86400,) * 2)
    tree.build()
    assert [path.name for path in old.iterdir()] == ["lock"]


@needs_compiler
def test_progress_is_shown(tree, monkeypatch, capsys):
    shown = []
    tree.build(shown.append)
    assert shown[0] == "compiling"
    assert [line.split()[0] for line in shown[1:]] == [f"[{n}/5]" for n in range(1, 6)]
    assert {line.split()[1] for line in shown[1:]} == {*(f"csrc/{name}" for name in TREE), "library.so"}
    begun = "build: compiling: a minute or two, up to 8 where others use the cores\n"
    now = iter([0.0, 19.0, 21.0, 21.0, 30.0])
    monkeypatch.setattr(build_command.time, "monotonic", lambda: next(now))
    log = build_command._Progress()
    for line in (*shown[:4], ""):
        log(line)
    assert capsys.readouterr().out == f"{begun}build: {shown[2]}\n"
    monkeypatch.setattr(build_command.time, "monotonic", lambda: 0.0)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    terminal = build_command._Progress()
    for line in (*shown[:2], ""):
        terminal(line)
    assert capsys.readouterr().out == f"{begun}\r\x1b[K{shown[1]}\r\x1b[K"
