"""Files that are whole or absent, never half-written; folders that one run at a time writes to."""

from __future__ import annotations

import errno
import os
import re
import socket
import time
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_TAKEN = (errno.EAGAIN, errno.EACCES)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


def plain_name(name: str) -> str:
    """Return a name with a hyphen for whatever is no letter or digit, as a file may have it."""
    return re.sub(r"[^A-Za-z0-9]+", "-", name)


class InUse(OSError):
    """Another run writes to the folder; the message says which."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write; rename it to ``path`` at the end, unless the block raises.

    No two writers share a temporary path: of several that write ``path`` at once, the last one's file stays. An error
    of the system names ``path``: by itself, that of a full disk names no file.
    """
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        yield partial
        os.replace(partial, path)
    except OSError as error:
        if error.errno is None or error.filename not in (None, partial, str(partial)):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        partial.unlink(missing_ok=True)


def put(path: Path, content: bytes) -> Path:
    """Write a file atomically: until the rename, an old file stays."""
    with replacing(path) as partial:
        partial.write_bytes(content)
    return path


@contextmanager
def owned(path: Path, patience: float = 0.0) -> Iterator[None]:
    """Keep other runs out of a folder, or of a file that may not exist yet, while the block lasts.

    The lock belongs to this process alone: the system frees it when the process ends, however it ends, whatever the
    processes do that it has started. It holds between hosts where their file system has POSIX locks, as NFS has; a
    file system without locks gets a warning.

    Args:
        path: the folder, which is there, or the file.
        patience: seconds to wait for another run to end.

    Raises:
        InUse: another run has it.
    """
    try:
        import fcntl  # absent on Windows
    except ImportError:
        yield
        return
    place = path / ".lock" if path.is_dir() else path.with_name(f".{path.name}.lock")
    until = time.monotonic() + patience
    while True:
        lock = os.open(place, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(lock, place):
                break
        except OSError as error:
            if error.errno in _NO_LOCKS:
                warnings.warn(f"{path}: no lock keeps a second run out ({error.strerror})", stacklevel=3)
                break
            owner = os.read(lock, 256).decode(errors="replace")
            if error.errno not in _TAKEN or time.monotonic() > until:
                os.close(lock)
                if error.errno not in _TAKEN:
                    raise
                raise InUse(f"{path} is in use by {owner or 'another process'}: wait for its end, or end it") from None
            time.sleep(0.1)
        os.close(lock)
    try:
        _sign(lock)
        yield
    finally:
        place.unlink(missing_ok=True)
        os.close(lock)


def _is_at(lock: int, place: Path) -> bool:
    """Return whether the file that is locked still has its name: whoever had it before may have removed it."""
    try:
        return os.path.samestat(os.fstat(lock), place.stat())
    except FileNotFoundError:
        return False


def _sign(lock: int) -> None:
    """Write into a lock whose it is. On a full disk it stays unsigned."""
    try:
        os.ftruncate(lock, 0)
        os.write(lock, f"process {os.getpid()} on {socket.gethostname()}".encode())
    except OSError:
        pass
