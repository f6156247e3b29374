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


def _need_what_it_imports(name):
    if "transformers" in name:
        importlib.import_module("tests.integrations.vision_schemas")  # transformers may import torchvision
        pytest.importorskip("transformers", reason="needs transformers: the extra hf")


@pytest.mark.parametrize(("name", "more"), PACKAGES.items(), ids=PACKAGES)
def test_dir_shows_the_public_names(name, more):
    _need_what_it_imports(name)
    package = importlib.import_module(name)
    assert dir(package) == sorted([*package.__all__, *more])
    assert all(hasattr(package, each) for each in dir(package))


@pytest.mark.parametrize("record", signatures.RECORDS)
def test_signatures_are_those_of_the_record(record):
    """A change of a public argument or default is a decision: python -m tests.core.signatures records it."""
    _need_what_it_imports(record)
    expected = (signatures.HERE / record).read_text().splitlines()
    assert signatures.lines(signatures.RECORDS[record]) == expected


def test_cases_launches_and_settings_are_those_of_the_record():
    """A change of what is timed, launched or trained is a decision: python -m tests.core.sizes records it."""
    assert sizes.lines() == sizes.RECORDED.read_text().splitlines()
