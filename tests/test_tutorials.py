"""Every line of docs/tutorials/ runs, top to bottom; what a page claims it asserts."""

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs" / "tutorials").glob("*.md"))


def program(page):
    """Return the page's Python blocks as one program whose line numbers are the page's."""
    lines, inside = [], False
    for line in page.read_text().splitlines():
        if inside := (line != "```" if inside else line == "```python"):
            lines.append("" if line == "```python" else line)
        else:
            lines.append("")
    return "\n".join(lines)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tutorial_runs(page):
    with torch.random.fork_rng():
        exec(compile(program(page), str(page), "exec"), {"__name__": page.stem})


def test_every_tutorial_asserts_what_it_claims():
    assert {page.stem for page in PAGES} == {"block", "patch", "decode"}
    for page in PAGES:
        assert len(re.findall(r"^(assert |torch\.testing\.assert_close)", program(page), re.MULTILINE)) >= 4, page
