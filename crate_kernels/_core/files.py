"""Files that are whole or absent, never half-written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the name of a file to write; it becomes ``path`` in one move, unless the block raises."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def put(path: Path, content: bytes) -> Path:
    """Write a file in one move: until then, what was there stays."""
    with replacing(path) as partial:
        partial.write_bytes(content)
    return path
