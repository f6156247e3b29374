"""Disassemble a cubin with the nvdisasm of Triton's wheel."""

import subprocess
import tempfile
from pathlib import Path

from tests.tools.aot import harness
from tests.tools.sass import listing


def functions(cubin):
    """Return the functions of a cubin, by its bytes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [harness.nvidia_tool("nvdisasm"), "-c", path]
        return listing.functions(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
