"""Portions of the tests, of which CI runs one of those that take long."""

from types import SimpleNamespace

import pytest

from tests import conftest

NAMES = [f"tests/test_{file}.py::test_{name}" for file in "abc" for name in range(40)]


class Item:
    """Stands for a collected test."""

    def __init__(self, name):
        self.nodeid = name


def kept(portion):
    """Return the names that a portion keeps; the others are reported as deselected."""
    items, deselected = [*map(Item, NAMES)], []
    hook = SimpleNamespace(pytest_deselected=lambda items: deselected.extend(items))
    conftest.pytest_collection_modifyitems(SimpleNamespace(getoption=lambda name: portion, hook=hook), items)
    assert len(items) + len(deselected) == len(NAMES)
    return [item.nodeid for item in items]


def test_portions_have_every_test_once():
    portions = [kept(f"{which}/3") for which in range(3)]
    assert sorted(name for each in portions for name in each) == sorted(NAMES)
    assert min(map(len, portions)) > 25
    assert kept(None) == NAMES


@pytest.mark.parametrize("portion", ["3/3", "-1/3"])
def test_a_portion_that_is_none_is_refused(portion):
    with pytest.raises(pytest.UsageError, match="--portion must be P/Q"):
        kept(portion)
