"""Build the process of ``remote.cpp``, and call its ops as those of the extension are called."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import struct
import subprocess
import tempfile
from functools import partial
from pathlib import Path

import torch

from crate_kernels._native import libraries, ninja_build
from tests.tools import compiling

HERE = Path(__file__).parent
STANDIN = HERE.parent / "standin"
COMPILER = ("aarch64-linux-gnu-g++",)
EMULATOR = ("qemu-aarch64",)
FLAGS = (*libraries.FLAGS, f"-I{STANDIN}", "-pthread", "-static")
# As in the stand-in for ScalarType.h.
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.bool, torch.float64)


def unavailable_reason():
    """Say what is missing to compile and run the kernels for aarch64; None if nothing is."""
    if libraries.source_folder() is None:
        return "needs the C++ sources: run from a checkout"
    missing = [command[0] for command in (COMPILER, EMULATOR) if shutil.which(command[0]) is None]
    if missing:
        return f"needs {' and '.join(missing)}: on Debian, apt install g++-aarch64-linux-gnu qemu-user"
    return None


class Remote:
    """The ops of the CPU kernels in another process, with the interface of ``extension.Library``."""

    def __init__(self, *command):
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __getattr__(self, name):
        return partial(self._call, name)

    def close(self):
        """End the process."""
        with contextlib.suppress(BrokenPipeError):  # it has ended, with a call half sent
            self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def _call(self, name, *arguments):
        memory, packed = {}, []
        for argument in arguments:
            packed.append(_pack(argument, memory))
        wholes = [torch.empty(0, dtype=torch.uint8).set_(storage) for _, storage in memory.values()]
        send = self._process.stdin.write
        send(_numbers(len(name)) + name.encode() + _numbers(torch.get_num_threads(), len(wholes)))
        for whole in wholes:
            send(_numbers(whole.numel()))
            send(whole.numpy().data)
        send(_numbers(len(packed)) + b"".join(packed))
        self._process.stdin.flush()
        message = self._read(self._read_number()).decode()
        for whole in wholes:
            if whole.numel():
                whole.copy_(torch.frombuffer(self._read(whole.numel()), dtype=torch.uint8))
        if message:
            raise RuntimeError(message)

    def _read_number(self):
        return struct.unpack("<q", self._read(8))[0]

    def _read(self, count):
        data = bytearray(self._process.stdout.read(count))
        if len(data) < count:
            raise RuntimeError(f"the remote process ended with status {self._process.wait()}")
        return data


def _numbers(*values):
    return struct.pack(f"<{len(values)}q", *values)


def _pack(argument, memory):
    """Serialise an argument; list the memory of a tensor once, since tensors of a call may share it."""
    if argument is None:
        return b"n"
    if isinstance(argument, bool):
        return b"b" + _numbers(argument)
    if isinstance(argument, int):
        return b"i" + _numbers(argument)
    if isinstance(argument, float):
        return b"d" + struct.pack("<d", argument)
    storage = argument.untyped_storage()
    place, _ = memory.setdefault(storage.data_ptr(), (len(memory), storage))
    offset = argument.storage_offset() * argument.element_size()
    numbers = (DTYPES.index(argument.dtype), place, offset, argument.dim(), *argument.shape, *argument.stride())
    return b"t" + _numbers(*numbers)


_OF_PYTORCH = (
    "library.cpp",
    "packing.cpp",
    "plan.cpp",
    "exported.cpp",
    "exported_cpu.cpp",
    "lt.cpp",
)  # of csrc; no kernel is in them


def build(compiler=COMPILER, flags=FLAGS):
    """Return the program, compiled for the other processor if it is not there yet."""
    folder = libraries.source_folder()
    own = [HERE / "remote.cpp", *sorted(STANDIN.rglob("*.h"))]
    key = hashlib.sha256(repr((compiler, flags, libraries.source_hash(folder))).encode())
    for path in own:
        key.update(path.read_bytes())
    target = libraries.user_cache() / f"remote-{key.hexdigest()[:16]}" / "remote"
    with ninja_build.locked(target.parent):
        if not target.exists():
            _compile([*compiler, *flags], folder, target)
    return target


def _compile(command, folder, target):
    ours = (path for path in sorted(folder.rglob("*.cpp")) if path.name not in _OF_PYTORCH)
    sources = [HERE / "remote.cpp", *ours]
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        linked, objects = Path(scratch) / target.name, compiling.objects(command, sources, Path(scratch))
        compiling.run([*command, *objects, "-o", linked])
        os.replace(linked, target)
