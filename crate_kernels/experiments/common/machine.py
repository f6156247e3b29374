"""Choose and describe the device and the backend of a run."""

from __future__ import annotations

import platform

import torch

from crate_kernels import __version__
from crate_kernels._core import backends as _backend
from crate_kernels.bench.rows import device_name


def choose(device: str | None, ops: tuple[str, ...], backend: str | None) -> torch.device:
    """Check that the requested device works and return it; the default is a GPU if there is one.

    Raises:
        ValueError: the device cannot be used, or no backend has that name.
        RuntimeError, NotImplementedError: ``backend`` cannot compute ``ops`` there.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
        torch.empty(1, device=found).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"--device {device} cannot be used: {str(error).partition(chr(10))[0]}") from error
    for op in ops:
        _backend.resolve(op, backend, found, torch.float32)
    return found


def choose_or_say(command: str, device: str | None) -> torch.device | None:
    """Return the requested device as ``choose`` does; where it cannot be used, print why and return None."""
    try:
        return choose(device, (), None)
    except ValueError as error:
        print(f"{command}: {error}")
        return None


def describe(device: torch.device) -> dict[str, str]:
    """Describe the device and the versions behind the numbers."""
    return {
        "device": device_name(device),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "crate_kernels": __version__,
    }


def backends(ops: tuple[str, ...], backend: str | None, device: torch.device) -> str:
    """Name the backend that computes ``ops``, or one per operator where they differ."""
    found = {op: _backend.resolve(op, backend, device, torch.float32) for op in ops}
    if len(set(found.values())) == 1:
        return next(iter(found.values()))
    return ", ".join(f"{op} {name}" for op, name in found.items())
