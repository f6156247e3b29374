"""Another process that owns a path, as a run beside this one does."""

import subprocess
import sys
from contextlib import contextmanager

from crate_kernels._core import files

_OWNER = """
import runpy, sys
from pathlib import Path
files = runpy.run_path(sys.argv[2])  # without importing PyTorch
with files["owned"](Path(sys.argv[1])):
    print("has it", flush=True)
    sys.stdin.read()
"""


def command(path):
    """Return the words that start it: it says "has it", and ends with its input."""
    return [sys.executable, "-c", _OWNER, str(path), files.__file__]


@contextmanager
def another(path):
    """Let it own a path; yields the process."""
    process = subprocess.Popen(command(path), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "has it\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
