"""NVRTC, NVIDIA's compiler of CUDA C++ at run time: finds the one that PyTorch's CUDA build brings, and compiles by it.

Sources and headers are texts. Nothing here reads the package's own, loads what was compiled, or needs a GPU.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_void_p
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

_MAJORS = ("13", "12")  # of CUDA, whose libraries' names end with it; the newest first
_NO_CUDA = "this PyTorch has no CUDA (install one that has)"


class Unavailable(RuntimeError):
    """There is no NVRTC here; the message says what to do about it."""


class NotCompiled(RuntimeError):
    """NVRTC does not compile for the architecture, or not the source; the message has what it says."""


class Compiled(NamedTuple):
    """What NVRTC made of a source.

    Attributes:
        binary: a cubin; PTX, for a virtual architecture.
        names: the name in the binary of each name expression that was asked for.
        said: NVRTC's warnings, and the assembler's report where an option asks for one.
    """

    binary: bytes
    names: dict[str, str]
    said: str = ""


class Nvrtc:
    """A loaded NVRTC.

    Attributes:
        version: (major, minor) of CUDA.
        architectures: those it knows, as 90 for 9.0, in order.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._call("nvrtcVersion", byref(major := c_int()), byref(minor := c_int()))
        self.version = (major.value, minor.value)
        self._call("nvrtcGetNumSupportedArchs", byref(count := c_int()))
        self._call("nvrtcGetSupportedArchs", known := (c_int * count.value)())
        self.architectures = tuple(sorted(known))

    def architecture(self, capability: int) -> str:
        """Return the architecture to compile for, for a GPU of a compute capability, as 90 for 9.0.

        That is the GPU's own; for a newer one than NVRTC knows, the newest virtual one, which the driver translates.

        Raises:
            NotCompiled: the GPU is older than all that NVRTC knows.
        """
        if capability in self.architectures:
            return f"sm_{capability}a" if capability == 90 else f"sm_{capability}"  # wgmma is in 90a alone
        older = [known for known in self.architectures if known < capability]
        if not older:
            found = "{}.{}".format(*self.version)
            raise NotCompiled(f"NVRTC {found} compiles from sm_{self.architectures[0]} on, this GPU is sm_{capability}")
        return f"compute_{older[-1]}"

    def compile(
        self,
        source: str,
        architecture: str,
        options: Sequence[str] = (),
        headers: Mapping[str, str] | None = None,
        names: Sequence[str] = (),
    ) -> Compiled:
        """Compile a source; ``headers`` by the names that it includes them by, ``names`` are C++ of its kernels.

        Raises:
            NotCompiled: the source has an error, or NVRTC fails.
        """
        headers = headers or {}
        texts = (c_char_p * len(headers))(*(text.encode() for text in headers.values()))
        keys = (c_char_p * len(headers))(*(key.encode() for key in headers))
        program = c_void_p()
        self._call("nvrtcCreateProgram", byref(program), source.encode(), b"kernel.cu", len(headers), texts, keys)
        try:
            for name in names:
                self._call("nvrtcAddNameExpression", program, name.encode())
            words = [f"--gpu-architecture={architecture}".encode(), *(option.encode() for option in options)]
            status = self._library.nvrtcCompileProgram(program, len(words), (c_char_p * len(words))(*words))
            if status:
                raise NotCompiled(f"NVRTC: {self._text(status)} for {architecture}:\n{self._log(program)}")
            lowered = {name: self._lowered(program, name) for name in names}
            kind = "PTX" if architecture.startswith("compute_") else "CUBIN"
            return Compiled(self._bytes(program, kind), lowered, self._log(program))
        finally:
            self._library.nvrtcDestroyProgram(byref(program))

    def _lowered(self, program: c_void_p, name: str) -> str:
        self._call("nvrtcGetLoweredName", program, name.encode(), byref(found := c_char_p()))
        assert found.value is not None
        return found.value.decode()

    def _bytes(self, program: c_void_p, kind: str) -> bytes:
        self._call(f"nvrtcGet{kind}Size", program, byref(size := c_size_t()))
        content = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{kind}", program, content)
        return content.raw

    def _log(self, program: c_void_p) -> str:
        return self._bytes(program, "ProgramLog").rstrip(b"\0").decode(errors="replace").strip()

    def _call(self, function: str, *arguments: Any) -> None:
        status = getattr(self._library, function)(*arguments)
        if status:
            raise NotCompiled(f"NVRTC: {function}: {self._text(status)}")

    def _text(self, status: int) -> str:
        describe = self._library.nvrtcGetErrorString
        describe.restype = c_char_p
        return describe(status).decode()


def load(path: Path | str) -> Nvrtc:
    """Load an NVRTC by its path, or by its name where the system finds it.

    Raises:
        OSError: there is none, or it cannot be loaded.
    """
    if os.path.isabs(path):  # it looks for its other half where the system looks
        for other in sorted(Path(path).parent.glob("libnvrtc-builtins.so.*")):
            ctypes.CDLL(str(other))
    library = ctypes.CDLL(str(path))
    library.nvrtcCompileProgram.argtypes = (c_void_p, c_int, POINTER(c_char_p))
    return Nvrtc(library)


@cache
def library() -> Nvrtc:
    """Return the NVRTC of this process: the one that PyTorch has loaded, one beside PyTorch, or the system's.

    Raises:
        Unavailable: there is none.
    """
    import torch

    if torch.version.cuda is None:
        raise Unavailable(_NO_CUDA)
    if not sys.platform.startswith("linux"):
        raise Unavailable(f"CUDA C++ kernels are compiled on Linux, not on {sys.platform}")
    own = torch.version.cuda.partition(".")[0]
    majors = (own, *(major for major in _MAJORS if major != own))
    refused = ""
    for place in _places(majors, Path(torch.__file__).parents[1]):
        try:
            return load(place)
        except (OSError, AttributeError, NotCompiled) as error:  # not there, not NVRTC, or broken
            refused = f" ({error})"
    raise Unavailable(f"NVRTC, which PyTorch's CUDA wheels bring, is not found{refused}; pip install nvidia-cuda-nvrtc")


def _places(majors: Sequence[str], packages: Path) -> Iterator[str]:
    """Yield names and paths to try: those loaded before, those of NVIDIA's wheels, those that the system finds."""
    names = [f"libnvrtc.so.{major}" for major in majors]
    for name in names:
        if _is_loaded(name):
            yield name
    for name in names:
        yield from map(str, sorted(packages.glob(f"nvidia/*/lib/{name}")))
    yield from names
    for name in names:
        yield f"/usr/local/cuda/lib64/{name}"


def _is_loaded(name: str) -> bool:
    try:
        ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return False
    return True


@cache
def unavailable_reason() -> str | None:
    """Say why CUDA C++ cannot be compiled in this process; None if it can."""
    try:
        library()
    except Unavailable as reason:
        return str(reason)
    return None
