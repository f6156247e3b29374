"""Changes that break a kernel still have their place: exhaustive tests make each, and see it found."""

import pytest

from tests.ops.mssa import heads_broken, pairs_broken
from tests.ops.tssa import persistent_broken, walking_broken
from tests.tools.emulator.fixtures import file_with

TABLES = {
    "head-backward": (heads_broken.BROKEN, heads_broken.HEAD_FILES),
    "head-forward": (heads_broken.BROKEN_FORWARD, heads_broken.HEAD_FILES),
    "long-forward": (heads_broken.BROKEN_LONG_FORWARD, heads_broken.LONG_FORWARD_FILES),
    "long-backward": (heads_broken.BROKEN_LONG_BACKWARD, heads_broken.LONG_BACKWARD_FILES),
    "pairs": (pairs_broken.BROKEN, pairs_broken.FILES),
    "persistent": (persistent_broken.BROKEN, persistent_broken.FILES),
    "walking": (walking_broken.BROKEN, walking_broken.FILES),
}


@pytest.mark.parametrize(("changes", "files"), TABLES.values(), ids=TABLES)
def test_every_change_has_its_place(changes, files):
    for before, after, _case in changes.values():
        assert before != after
        file_with(before, files)
