"""Read JSON and safetensors that may come from anyone.

No file is unpickled, none is read through a link that leads out of its folder, and none decides by a number in it how
much memory is allocated: a header or a text has a largest size, and tensors have that of their file.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MAX_TEXT = 1 << 20  # bytes of a config: a thousand times the longest here
MAX_HEADER = 8 << 20  # bytes of a safetensors header, or of an index of weights: some 80,000 tensors

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}


def inside(owner: str, folder: Path, name: str) -> Path:
    """Return the path of a file in a folder.

    A link may lead to a file of the same folder, or, in a snapshot of a hub's cache, to one of its ``blobs``.

    Raises:
        FileNotFoundError: there is none.
        ValueError: a link out of the folder, or no regular file.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{owner}: folder must be one that is there and holds {name}, got {folder}")
    path, root = folder / name, folder.resolve()
    try:
        real = path.resolve()
    except (OSError, RuntimeError) as error:  # a circle of links
        raise ValueError(f"{owner}: {path} cannot be followed, {error}") from None
    homes = [root, *([root.parents[1] / "blobs"] if root.parent.name == "snapshots" else [])]
    if not any(real.is_relative_to(home) for home in homes):
        raise ValueError(f"{owner}: {path} must be in its folder, is a link to {real}")
    if not real.exists():
        raise FileNotFoundError(f"{owner}: {folder} must hold {name}")
    if not real.is_file():  # a pipe would block, a device has no end
        raise ValueError(f"{owner}: {path} must be a regular file")
    return path


def json_object(owner: str, path: Path, max_bytes: int) -> dict[str, Any]:
    """Return the JSON object in a file of at most ``max_bytes`` bytes.

    Raises:
        ValueError: the file is larger, or is no JSON object whose keys differ and whose numbers are finite.
    """
    with path.open("rb") as file:
        text = file.read(max_bytes + 1)
    if len(text) > max_bytes:
        raise ValueError(f"{owner}: {path} must have at most {max_bytes} bytes, got {path.stat().st_size}")
    return _parsed(owner, path, text)


def shapes(owner: str, path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file without their values, on the meta device.

    Raises:
        ValueError: the file is no whole safetensors file.
    """
    from safetensors import SafetensorError, safe_open  # all else runs in a checkout without safetensors

    _check_header(owner, path)
    found = {}
    try:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  not a mapping
                described = file.get_slice(name)
                if described.get_dtype() not in _DTYPES:
                    dtypes = ", ".join(_DTYPES)
                    raise ValueError(f"{owner}: {path}: {name} must be of {dtypes}, got {described.get_dtype()}")
                found[name] = torch.empty(described.get_shape(), dtype=_DTYPES[described.get_dtype()], device="meta")
    except (SafetensorError, OverflowError, RuntimeError) as error:
        raise ValueError(f"{owner}: {path} must be a whole safetensors file, {error}") from None
    return found


def tensors(owner: str, path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the metadata of a safetensors file.

    Raises:
        ValueError: the file is no whole safetensors file.
    """
    from safetensors import SafetensorError, safe_open

    _check_header(owner, path)
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{owner}: {path} must be a whole safetensors file, {error}") from None


def _check_header(owner: str, path: Path) -> None:
    """Require a header that fits the file and the largest size, and names each tensor once.

    safetensors itself parses headers of up to 100 MB, and takes the last of two tensors of one name.
    """
    with path.open("rb") as file:
        left = os.fstat(file.fileno()).st_size - 8
        length = int.from_bytes(file.read(8), "little")
        if length > MAX_HEADER or length > left:
            raise ValueError(
                f"{owner}: {path} must be a whole safetensors file, got a header of {length} bytes, of at most "
                f"{MAX_HEADER}, and {max(left, 0)} bytes after its size"
            )
        _parsed(owner, path, file.read(length))


def _parsed(owner: str, path: Path, text: bytes) -> dict[str, Any]:
    """Parse the JSON object in a file, strictly."""
    try:
        found = json.loads(text.decode(), object_pairs_hook=_once, parse_constant=_no_number)
    except RecursionError:
        raise ValueError(f"{owner}: {path} must be JSON, nested less deeply") from None
    except ValueError as error:
        raise ValueError(f"{owner}: {path} must be JSON, {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{owner}: {path} must hold a JSON object, got {type(found).__name__}")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"{twice!r} is there twice")
    return found


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")
