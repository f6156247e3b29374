"""Importing and calling import nothing that is not needed, and no variable of the environment steers a choice."""

import os
import re
import subprocess
import sys

import torch

import crate_kernels
from crate_kernels._core import backends

USE_EVERYTHING = """
import sys, torch
import crate_kernels, crate_kernels.nn, crate_kernels.models, crate_kernels.testing
assert "triton" not in sys.modules, "imported with the package"
w = torch.randn(2, 3, 5, 8, requires_grad=True)
out = crate_kernels.mssa(w) + crate_kernels.tssa(w, torch.ones(3)) + crate_kernels.tssa(w, torch.ones(3), causal=True)
out = out + crate_kernels.ista(w, torch.eye(8)) + crate_kernels.ista_overcomplete(w, torch.ones(8, 9))
out.sum().backward()
assert w.grad.isfinite().all()
assert "triton" not in sys.modules, "imported by a call that needs none"
"""
APART = """
found = {"crate_kernels.distributed", "torch.distributed.tensor"} & sys.modules.keys()
found |= {"transformers", "accelerate", "timm", "torchvision"} & sys.modules.keys()
assert not found, found
assert crate_kernels.distributed.shard is sys.modules["crate_kernels.distributed"].shard
try:
    crate_kernels.nothing
except AttributeError as error:
    assert "has no attribute 'nothing'" in str(error)
"""
HIDE_TRITON = """
import sys
class Hidden:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] == "triton" else self.finder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(self.finder, name)
sys.meta_path[:] = [Hidden(finder) for finder in sys.meta_path]
"""
REASON = """
import re
from crate_kernels._core import backends
try:
    crate_kernels.mssa(w, backend="triton")
except RuntimeError as error:
    assert re.search("backend='triton' is unavailable: .*; use backend='composite'", str(error)), error
else:
    raise AssertionError("triton ran where there is none")
assert backends._BACKENDS["triton"].missing == "Triton is not installed (pip install triton)"
assert backends.resolve("mssa", None, torch.device("cuda"), torch.float32) in ("cpp", "composite")
"""


FLOP_COUNTER = """
import sys, crate_kernels
assert "torch.utils.flop_counter" not in sys.modules, "imported with the package"
from torch.utils.flop_counter import FlopCounterMode
with FlopCounterMode(display=False) as counter:
    crate_kernels.ista(torch.ones(9, 4), torch.eye(4), backend="composite")
assert counter.get_total_flops() == 2 * 9 * 4 * 4 + 2 * 4**3
"""
CHOICES = """
from crate_kernels._core import backends
print([backends.resolve(op, None, torch.device(d), torch.float32) for op in backends.OPS for d in ("cpu", "cuda")])
"""
STEERING = {"CRATE_KERNELS_BACKEND": "reference", "CRATE_KERNELS_DISABLE_TRITON": "1", "TRITON_INTERPRET": "0"}


def python(script, **environment):
    """Run a script in a fresh interpreter from the root of the tree, warnings as errors."""
    root = str(backends.Path(crate_kernels.__file__).parents[1])
    # Importing torch may warn: only warnings after it count.
    script = "import torch, warnings; warnings.simplefilter('error')\n" + script
    command = [sys.executable, "-c", script]
    # Where the extension is.
    caches = {name: os.environ[name] for name in ("HOME", "XDG_CACHE_HOME") if name in os.environ}
    variables = {"PATH": "/usr/bin:/bin", "PYTHONPATH": root, **caches, **environment}
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)


def test_importing_and_calling_import_no_triton_and_no_environment_variable_steers_the_choice():
    devices = (torch.device("cpu"), torch.device("cuda"))
    chosen = [backends.resolve(op, None, device, torch.float32) for op in backends.OPS for device in devices]
    steered = python(USE_EVERYTHING + APART + CHOICES, **STEERING)
    assert steered.returncode == 0, steered.stderr
    assert steered.stdout == f"{chosen}\n"  # of what is printed, nothing is by what was imported and called


def test_where_triton_is_not_installed_everything_works_and_a_flop_counter_imported_later_knows_the_ops():
    result = python(HIDE_TRITON + FLOP_COUNTER + USE_EVERYTHING + REASON)  # the counter only warns without Triton
    assert result.returncode == 0, result.stderr


def test_no_variable_of_the_environment_chooses_what_computes():
    """Triton's says on which device it can run at all, others where the user's cache is and how many compilers run."""
    root = backends.Path(crate_kernels.__file__).parent
    reads = [
        f"{path.name}: {line.strip()}"
        for path in sorted(root.rglob("*.py"))
        for line in path.read_text().splitlines()
        if re.search(r"(?<!\*\*)os\.(environ(?!\.setdefault)|getenv)", line)
    ]
    assert reads == [
        'backends.py: _INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"',
        'libraries.py: caches = os.environ.get("XDG_CACHE_HOME", "")',
        'ninja_build.py: asked = os.environ.get("MAX_JOBS")',
    ]
