"""The lines of docs/distributed.md, in every process; what the page claims it asserts."""

import tempfile

import torch

from tests.distributed.training_cases import shared_folder
from tests.docs import pages

PAGE = pages.DOCS / "distributed.md"


def page(group):
    with shared_folder() as folder, torch.random.fork_rng():
        tempfile.tempdir = str(folder)
        try:
            pages.run(PAGE)
        finally:
            tempfile.tempdir = None


CASES = {"page": page}
