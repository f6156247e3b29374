"""The persistent and the walking kernels on Hopper GPUs, emulated: broken on purpose."""

import pytest
import torch

from tests.ops.tssa.persistent import Persistent
from tests.ops.tssa.persistent_broken import BROKEN, FILES
from tests.ops.tssa.walking import Walking
from tests.ops.tssa.walking_broken import BROKEN as BROKEN_WALKS
from tests.ops.tssa.walking_broken import FILES as FILES_OF_WALKS

pytestmark = pytest.mark.exhaustive
FAMILIES = {"persistent": (Persistent, BROKEN, FILES), "walking": (Walking, BROKEN_WALKS, FILES_OF_WALKS)}
CHANGES = {
    f"{family}-{name}": (kind, files, change)
    for family, (kind, changes, files) in FAMILIES.items()
    for name, change in changes.items()
}
CASES = sorted({(kind.__name__.lower(), change[-1]) for kind, _, change in CHANGES.values()})


def in_every_order(kind, name, backend, hopper):
    for descending in (False, True):
        problem = kind(name)
        hopper(problem.config, descending=descending)
        problem.check(backend, torch.bfloat16)


@pytest.mark.parametrize(("kind", "files", "change"), CHANGES.values(), ids=CHANGES)
def test_a_broken_kernel_is_found(kind, files, change, broken, backend, hopper):
    """The emulator stops it, or its numbers are wrong, in one order of threads or the other."""
    before, after, name = change
    broken(files, before, after)
    with pytest.raises((RuntimeError, AssertionError), match=r"emulator: |Measurement|result . of|saved sums"):
        in_every_order(kind, name, backend, hopper)


@pytest.mark.parametrize(("family", "name"), CASES)
def test_the_kernels_as_they_are_pass_in_every_order(family, name, backend, hopper):
    in_every_order(FAMILIES[family][0], name, backend, hopper)
