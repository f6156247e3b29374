"""Files that are whole or absent, never half-written."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write; rename it to ``path`` at the end, unless the block raises.

    No two writers share a temporary path: of several that write ``path`` at once, the last one's file stays.
    """
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def put(path: Path, content: bytes) -> Path:
    """Write a file atomically: until the rename, an old file stays."""
    with replacing(path) as partial:
        partial.write_bytes(content)
    return path
