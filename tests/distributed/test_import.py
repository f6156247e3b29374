"""The package is imported without its parts for several processes."""

import subprocess
import sys

SCRIPT = """
import sys, crate_kernels
assert "crate_kernels.distributed" not in sys.modules and "torch.distributed.tensor" not in sys.modules
assert crate_kernels.distributed.shard is sys.modules["crate_kernels.distributed"].shard
try:
    crate_kernels.nothing
except AttributeError as error:
    assert "has no attribute 'nothing'" in str(error)
"""


def test_imported_when_asked_for():
    result = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
