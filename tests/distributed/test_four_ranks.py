"""Meshes of two dimensions in four processes: models equal one process, and so do the training examples."""

import pytest

from tests.distributed import ranks

pytestmark = pytest.mark.exhaustive
MODULES = ("mesh_cases", "training_cases", "run_cases", "pair_cases")
CASES = ranks.cases(MODULES)
failures = ranks.failures(4, MODULES)


@pytest.mark.parametrize("name", CASES)
def test_four(name, failures):
    report = ranks.report(failures, name)
    assert not report, report
