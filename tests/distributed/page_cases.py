"""The lines of docs/distributed.md, in every process; what the page claims it asserts."""

import tempfile
from pathlib import Path

import torch

from tests.distributed.training_cases import shared_folder
from tests.test_tutorials import program

PAGE = Path(__file__).parents[2] / "docs" / "distributed.md"


def page(group):
    with shared_folder() as folder, torch.random.fork_rng():
        tempfile.tempdir = str(folder)
        try:
            exec(compile(program(PAGE), str(PAGE), "exec"), {"__name__": "page"})
        finally:
            tempfile.tempdir = None


CASES = {"page": page}
