"""``info``: versions, devices, and per operator and backend: available, or why not."""

from __future__ import annotations

import argparse
import json
import platform
from typing import Any

import torch

from crate_kernels import __version__
from crate_kernels._core import backends as _backend
from crate_kernels._core import measured
from crate_kernels._cuda import cubins
from crate_kernels._native import extension as _extension
from crate_kernels._native import libraries, nvrtc
from crate_kernels.bench.rows import installed
from crate_kernels.cli import table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def collect() -> dict[str, Any]:
    """Return the facts that ``info`` prints."""
    devices = ["cpu"]
    if torch.cuda.is_available():
        devices.append("cuda")
    return {
        "versions": {
            "crate_kernels": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
            "triton": installed("triton"),
            "numpy": installed("numpy"),
        },
        "cpu": {
            "machine": platform.machine(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
        },
        "extension": _extension_facts(),
        "nvrtc": _nvrtc_facts(),
        "gpus": [_gpu(index) for index in range(torch.cuda.device_count())] if len(devices) > 1 else [],
        "operators": {op: {name: _state(op, name, devices) for name in _backend.names()} for op in _backend.OPS},
        "default": {
            device: {op: _backend.resolve(op, None, torch.device(device), torch.float32) for op in _backend.OPS}
            for device in devices
        },
    }


def _extension_facts() -> dict[str, Any]:
    """Return the facts of the C++ extension, or how to get it."""
    if _extension.PATH is None:
        advice = f"python -m crate_kernels build, with a C++ compiler installed ({_extension.MISSING})"
        if libraries.source_folder() is None:
            advice = "install from a source distribution: the C++ sources are not here"
        return {"path": None, "advice": advice}
    return {"path": str(_extension.PATH), "capability": _extension.cpu_capability(), **_extension.build_info()}


def _nvrtc_facts() -> dict[str, Any]:
    """Return what compiles CUDA C++ kernels where they are needed, and where it keeps them; or why nothing does."""
    reason = nvrtc.unavailable_reason()
    if reason is not None:
        return {"version": None, "reason": reason}
    found = nvrtc.library()
    try:
        folder = str(cubins.folder())
    except libraries.BuildError as error:
        folder = f"nowhere: {error}"
    return {"version": "{}.{}".format(*found.version), "architectures": found.architectures, "kept": folder}


def _state(op: str, name: str, devices: list[str]) -> dict[str, Any]:
    """Return whether a backend, and its variant for CUDA tensors, can run on a device of this machine."""
    state = _available(op, _backend.for_device(name), devices)
    if (on_cuda := _backend.for_device(name, "cuda")) is not _backend.for_device(name):
        state["on_cuda"] = _available(op, on_cuda, devices)
    return state


def _available(op: str, backend: _backend.Backend, devices: list[str]) -> dict[str, Any]:
    reason = _backend.variant_reason(op, backend)
    if reason is None and backend.devices is not None and not set(backend.devices) & set(devices):
        reason = f"takes {' or '.join(backend.devices)} tensors, and PyTorch sees no such device"
    if reason is None and "cuda" in devices and "cuda" in (backend.devices or ()):
        reason = backend.unfit_reason(torch.device("cuda"))
    return {"available": reason is None, "reason": reason}


def _gpu(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "classes": len(measured.read(properties.name)),
    }


def run(args: argparse.Namespace) -> int:
    """Print the report."""
    facts = collect()
    if args.json:
        print(json.dumps(facts, indent=2))
        return 0
    for name, value in facts["versions"].items():
        print(f"{name:14}{value or 'not installed'}")
    cpu = facts["cpu"]
    print(f"{'cpu':14}{cpu['machine']}, {cpu['capability']}, {cpu['threads']} threads")
    extension = facts["extension"]
    if extension["path"] is None:
        print(f"{'extension':14}not built; to get it: {extension['advice']}")
    else:
        print(f"{'extension':14}{extension['path']}, {extension['capability']}")
    compiler = facts["nvrtc"]
    if compiler["version"] is None:
        print(f"{'nvrtc':14}none: {compiler['reason']}")
    else:
        print(
            f"{'nvrtc':14}{compiler['version']}, to sm {compiler['architectures'][-1]}, kernels in {compiler['kept']}"
        )
    for gpu in facts["gpus"] or [None]:
        line = "none" if gpu is None else f"{gpu['name']}, sm {gpu['capability']}, {gpu['memory_gib']} GiB"
        if gpu is not None and gpu["classes"]:
            line += f"; by its times, {gpu['classes']} classes of calls take another backend (docs/gpu.md)"
        print(f"{'gpu':14}{line}")
    rows = [
        [op, label, "available" if shown["available"] else shown["reason"]]
        for op, backends in facts["operators"].items()
        for name, state in backends.items()
        for label, shown in ((name, state), (f"{name} on cuda", state.get("on_cuda")))
        if shown is not None
    ]
    print("\n" + table.render(["operator", "backend", "state"], rows))
    print("\nbackend=None picks:")
    for device, choice in facts["default"].items():
        print(f"  {device}: " + ", ".join(f"{op} {name}" for op, name in choice.items()))
    return 0
