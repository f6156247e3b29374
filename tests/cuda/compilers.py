"""The NVRTC of NVIDIA's wheel, which compiles without a GPU and without PyTorch's CUDA build."""

import sys
from functools import cache
from pathlib import Path

import pytest

from crate_kernels._native import nvrtc


@cache
def found():
    """Return an Nvrtc: this process's, or that of the wheel nvidia-cuda-nvrtc; None without either."""
    if nvrtc.unavailable_reason() is None:
        return nvrtc.library()
    for folder in map(Path, sys.path):
        for path in sorted(folder.glob("nvidia/*/lib/libnvrtc.so.??")):
            return nvrtc.load(path)
    return None


def needed():
    """Return the Nvrtc, or skip the test."""
    compiler = found()
    if compiler is None:
        pytest.skip("needs NVRTC: pip install nvidia-cuda-nvrtc")
    return compiler
