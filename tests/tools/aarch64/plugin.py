"""``pytest -p tests.tools.aarch64.plugin tests/ops -k aarch64``: every operator test on the kernels for aarch64."""

import pytest

from tests.tools import natives
from tests.tools.aarch64 import remote


def pytest_sessionstart(session):
    """Register the backend before parameters are listed, or exit with what is missing."""
    reason = remote.unavailable_reason()
    if reason is not None:
        pytest.exit(reason, returncode=2)
    natives.register("aarch64", remote.Remote(*remote.EMULATOR, str(remote.build())))
