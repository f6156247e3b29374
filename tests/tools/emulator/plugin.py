"""``pytest -p tests.tools.emulator.plugin tests/ops -k emulated``: every operator test on the emulated CUDA kernels.

The contract of a backend, its errors, drawn calls: parameters are listed as tests are collected, so the backend has to
be there before.
"""

import pytest

from tests.tools.emulator import emulated


def pytest_configure(config):
    """Offer the backend, or end with the reason."""
    reason = emulated.unavailable_reason()
    if reason is not None:
        pytest.exit(reason, returncode=2)
    emulated.load()
    emulated.register()
