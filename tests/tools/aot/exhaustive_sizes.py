"""Compile, without a GPU, every kernel that the operators launch on the small and odd sizes of ``sizes.py``.

``pytest -n auto tests/tools/aot/exhaustive_sizes.py -k sm_90``; ``PYTHONPATH=.:.venv-triton-3.6`` takes Triton 3.6. Not
collected by name: a GPU takes hours. Kernels are kept in build/sizes, so that the same command resumes. A compiler that
ends its process is a failed test, after which pytest-xdist starts another process.
"""

import pytest
from triton import knobs

from tests.tools.aot import harness

harness.needs_compiler()

from tests.tools.aot import sizes  # noqa: E402  # only where Triton compiles

DRAWS = 1  # calls per pair of sizes
CALLS = dict(sizes.calls(DRAWS))


@pytest.mark.parametrize("target", harness.TARGETS)
@pytest.mark.parametrize("name", CALLS)
def test_kernels_compile_and_fit(name, target):
    with knobs.cache.scope():
        knobs.cache.dir = str(harness.ROOT / "build" / "sizes")
        assert harness.misfits(harness.launches(CALLS[name], target), target) == []
