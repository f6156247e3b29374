"""Files that are whole or absent, whoever writes them at once; folders that one run at a time writes to."""

import errno
import os
import re
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest

from crate_kernels._core import files
from tests.tools import owning


def fail(path):
    with files.replacing(path) as partial:
        partial.write_bytes(b"half")
        raise OSError("disk full")


@pytest.mark.parametrize("failing", [False, True], ids=["both_succeed", "one_fails"])
def test_writers_of_one_path_do_not_meet(failing, tmp_path):
    path = tmp_path / "file"
    with files.replacing(path) as slow:
        slow.write_bytes(b"slow, ")
        if failing:
            with pytest.raises(OSError, match="disk full"):
                fail(path)
            assert not path.exists()
        else:
            files.put(path, b"quick")
            assert path.read_bytes() == b"quick"
        with slow.open("ab") as file:
            file.write(b"and whole")
    assert path.read_bytes() == b"slow, and whole"
    assert list(tmp_path.iterdir()) == [path]


@contextmanager
def files_of_at_most(size):
    """Let a write of more bytes fail, as on a full disk, after the first ones."""
    resource = pytest.importorskip("resource", reason="limits are of POSIX: run on Linux")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("old", [None, b"an old file"], ids=["first", "again"])
def test_a_write_that_fails_leaves_what_was_there(old, tmp_path):
    path = tmp_path / "file"
    if old is not None:
        path.write_bytes(old)
    with files_of_at_most(4096), pytest.raises(OSError, match="File too large"):
        files.put(path, bytes(100_000))
    assert [each.read_bytes() for each in tmp_path.iterdir()] == ([] if old is None else [old])
    assert files.put(path, b"new").read_bytes() == b"new"


@pytest.mark.skipif(os.name != "posix", reason="modes are of POSIX: run on Linux")
@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_a_file_has_the_mode_of_any_other(umask, mode, tmp_path):
    before = os.umask(umask)
    try:
        path = files.put(tmp_path / "file", b"content")
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == mode


def full(partial):
    raise OSError(errno.ENOSPC, "No space left on device")  # as a write says it: without a name


def elsewhere(partial):
    raise FileNotFoundError(errno.ENOENT, "No such file or directory", "another")


def whole(partial):
    partial.write_bytes(b"new")


ERRORS = {
    "full": (full, "file", "[Errno 28] No space left on device: '{path}'"),
    "of another": (elsewhere, "file", "[Errno 2] No such file or directory: 'another'"),
    "no folder": (whole, "absent/file", "[Errno 2] No such file or directory: '{path}'"),
    "a folder": (whole, "folder", "[Errno 21] Is a directory: '{path}'"),
}


@pytest.mark.parametrize(("failing", "name", "words"), ERRORS.values(), ids=ERRORS)
def test_an_error_names_the_file(failing, name, words, tmp_path):
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "folder").mkdir()
    with (
        pytest.raises(OSError, match=re.escape(words.format(path=tmp_path / name))),
        files.replacing(tmp_path / name) as partial,
    ):
        failing(partial)
    assert (tmp_path / "file").read_bytes() == b"old"
    assert {path.name for path in tmp_path.iterdir()} == {"file", "folder"}


@pytest.mark.skipif(os.name != "posix", reason="locks are of POSIX: run on Linux")
@pytest.mark.parametrize("name", ["", "results.json"], ids=["a folder", "a file"])
def test_two_runs_do_not_write_to_one_place(name, tmp_path):
    path = tmp_path / name
    with owning.another(path) as first:
        used = rf"{path} is in use by process {first.pid} on \S+: wait"
        with pytest.raises(files.InUse, match=used), files.owned(path):
            pass
        first.send_signal(signal.SIGKILL)  # the system frees the lock, and the file of it stays
        assert len(list(tmp_path.iterdir())) == 1
        with files.owned(path, patience=30.0):
            assert first.wait() == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.name != "posix", reason="locks are of POSIX: run on Linux")
def test_a_run_waits_for_the_end_of_the_one_before(tmp_path):
    with owning.another(tmp_path) as first:
        threading.Timer(0.3, first.stdin.close).start()
        with files.owned(tmp_path, patience=60.0):
            pass
    assert list(tmp_path.iterdir()) == []


def test_a_lock_whose_owner_ends_meanwhile_is_made_anew(tmp_path, monkeypatch):
    """The file that was opened has lost its name by the time it is locked: it keeps nobody out."""
    fcntl = pytest.importorskip("fcntl", reason="locks are of POSIX: run on Linux")
    lock, locked = fcntl.lockf, []

    def late(*args):
        if not locked:
            (tmp_path / ".lock").unlink()
        locked.append(args)
        lock(*args)

    monkeypatch.setattr(fcntl, "lockf", late)
    with files.owned(tmp_path):
        second = subprocess.run(owning.command(tmp_path), stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert f"is in use by process {os.getpid()}" in second.stderr
    assert list(tmp_path.iterdir()) == []


def test_children_do_not_keep_a_lock(tmp_path):
    """As the processes that read images do not, where torchrun's own is killed."""
    reading, writing = os.pipe()
    with files.owned(tmp_path):
        child = os.fork()
        if child == 0:
            os.read(reading, 1)
            os._exit(0)
    try:
        subprocess.run(owning.command(tmp_path), stdin=subprocess.DEVNULL, check=True)
    finally:
        os.write(writing, b".")
        os.waitpid(child, 0)


def test_a_file_system_without_locks_is_told_of(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl", reason="locks are of POSIX: run on Linux")

    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with pytest.warns(UserWarning, match="no lock keeps a second run out .No locks available."), files.owned(tmp_path):
        pass


def test_a_name_that_a_file_may_have():
    assert files.plain_name("NVIDIA H200 (80GB)/x_1") == "NVIDIA-H200-80GB-x-1"


def test_another_error_of_a_lock_is_not_taken_for_a_second_run(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl", reason="locks are of POSIX: run on Linux")
    closed, close = [], os.close

    def broken(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "lockf", broken)
    monkeypatch.setattr(os, "close", lambda lock: closed.append(lock) or close(lock))
    with pytest.raises(OSError, match="Input/output error") as raised, files.owned(tmp_path, patience=60.0):
        pass
    assert not isinstance(raised.value, files.InUse)
    assert len(closed) == 1


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EACCES])
def test_a_second_run_is_told_of_one_that_could_not_sign(number, tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl", reason="locks are of POSIX: run on Linux")

    def taken(*_):
        raise OSError(number, "taken")

    monkeypatch.setattr(fcntl, "lockf", taken)
    with pytest.raises(files.InUse, match=r"is in use by another process: wait for its end"), files.owned(tmp_path):
        pass


def test_on_a_full_disk_a_lock_stays_unsigned(tmp_path, monkeypatch):
    pytest.importorskip("fcntl", reason="locks are of POSIX: run on Linux")

    def full_disk(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full_disk)
    with files.owned(tmp_path):
        assert (tmp_path / ".lock").read_bytes() == b""
    assert list(tmp_path.iterdir()) == []


def test_a_system_without_locks_goes_without(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with files.owned(tmp_path), files.owned(tmp_path):
        assert list(tmp_path.iterdir()) == []
