"""The numbers of docs/distributed.md."""

import re
from pathlib import Path

import pytest

from crate_kernels.distributed import traffic

PAGE = (Path(__file__).parents[2] / "docs" / "distributed.md").read_text()
ROWS = re.findall(r'^\| `(\w+)`, `"(\w+)"` \| (\d+) \| (.*) \|$', PAGE, re.MULTILINE)


@pytest.mark.parametrize(("op", "form", "seqlen", "numbers"), ROWS)
def test_bytes(op, form, seqlen, numbers):
    counted = traffic(op, (1, 16, int(seqlen), 64), 8, form)
    assert [cell.strip() for cell in numbers.split("|")] == ["" if n is None else f"{n / 1e6:.2f}" for n in counted]


def test_rows_are_found():
    assert len(ROWS) == 5
