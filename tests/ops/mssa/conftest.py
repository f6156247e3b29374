"""A Hopper GPU for mssa's kernels, emulated."""

import re

import pytest

from tests.ops.mssa.hopper import HOPPER


@pytest.fixture
def hopper(device, library):
    """Emulate one; return a function that says which kernels were launched since it was last called."""
    device(**HOPPER)

    def launched():
        return re.findall(r"(\w+_kernel)\b", library.emulated_launches())

    launched()
    return launched
