"""Every line of the page on transformers runs, top to bottom; what it claims it asserts."""

import re
from pathlib import Path

import pytest
import torch

from tests.test_tutorials import program

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_on_transformers_runs():
    pytest.importorskip("transformers", reason="needs transformers: the extra hf")
    pytest.importorskip("accelerate", reason="needs accelerate: the extra hf")
    page = DOCS / "transformers.md"
    assert len(re.findall(r"^assert ", program(page), re.MULTILINE)) >= 10
    with torch.random.fork_rng():
        exec(compile(program(page), str(page), "exec"), {"__name__": page.stem})
