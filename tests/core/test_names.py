"""dir of each public package shows its public names alone, which are all there; arguments and sizes are as recorded."""

import importlib

import pytest

from tests.core import signatures, sizes

PACKAGES = {
    "crate_kernels": (),
    "crate_kernels.analysis": (),
    "crate_kernels.distributed": (),
    "crate_kernels.integrations.transformers": (),
    "crate_kernels.models": ("aot", "redunet"),  # whose classes are named there
    "crate_kernels.nn": (),
    "crate_kernels.testing": (),
}


@pytest.mark.parametrize(("name", "more"), PACKAGES.items(), ids=PACKAGES)
def test_dir_shows_the_public_names(name, more):
    if "transformers" in name:
        importlib.import_module("tests.integrations.vision_schemas")  # transformers may import torchvision
        pytest.importorskip("transformers", reason="needs transformers: the extra hf")
    package = importlib.import_module(name)
    assert dir(package) == sorted([*package.__all__, *more])
    assert all(hasattr(package, each) for each in dir(package))


def test_signatures_are_those_of_the_record():
    """A change of a public argument or default is a decision: python -m tests.core.signatures records it."""
    assert signatures.lines() == signatures.RECORDED.read_text().splitlines()


def test_cases_launches_and_settings_are_those_of_the_record():
    """A change of what is timed, launched or trained is a decision: python -m tests.core.sizes records it."""
    assert sizes.lines() == sizes.RECORDED.read_text().splitlines()
