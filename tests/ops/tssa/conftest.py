"""A Hopper GPU for the persistent and the walking kernels, emulated."""

import re

import pytest

from tests.ops.tssa.persistent import MAX_SHARED


@pytest.fixture
def hopper(device, library):
    """Emulate one that holds so many groups of clusters; return what says which kernels were launched."""

    def emulate(config, clusters=1, **properties):
        count = clusters * config["CLUSTER"] * config.get("TOGETHER", 1)
        device(capability=90, shared_limit=MAX_SHARED, multiprocessors=count, **properties)
        library.emulated_launches()
        return lambda: re.findall(r"(\w+_kernel)\b", library.emulated_launches())

    return emulate
