"""``pytest -p tests.tools.emulator.plugin tests/ops -k emulated``: every operator test on the emulated CUDA kernels.

The tests cover a backend's contract, its errors and drawn calls. Their parameters are listed at collection, so the
backend must be registered before.
"""

import pytest

from tests.tools.emulator import emulated


def pytest_sessionstart(session):
    """Register the backend, or exit with the reason."""
    reason = emulated.unavailable_reason()
    if reason is not None:
        pytest.exit(reason, returncode=2)
    emulated.load()
    emulated.register()
