"""The quick reference has every argument of the operators, with its default."""

import inspect
import re

import pytest

import crate_kernels
from tests.docs import pages

ROWS = re.findall(
    r"^\| `(\w+)` \| ((?:`\w+`(?:, )?)+) \| `([^`]+)` \|", (pages.DOCS / "quick.md").read_text(), re.MULTILINE
)


@pytest.mark.parametrize("name", ["mssa", "tssa", "ista", "ista_overcomplete"])
def test_every_argument_has_a_row_with_its_default(name):
    listed = {argument: default for argument, owners, default in ROWS if f"`{name}`" in owners.split(", ")}
    parameters = inspect.signature(getattr(crate_kernels, name)).parameters.values()
    assert listed == {p.name: repr(p.default) for p in parameters if p.default is not p.empty}
