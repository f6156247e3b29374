"""The training examples in two processes: the losses of one, whatever is cut."""

import pytest

from tests.distributed import ranks

pytestmark = pytest.mark.exhaustive
MODULES = ("run_cases",)
CASES = ranks.cases(MODULES)
failures = ranks.failures(2, MODULES)


@pytest.mark.parametrize("name", CASES)
def test_two(name, failures):
    report = ranks.report(failures, name)
    assert not report, report
