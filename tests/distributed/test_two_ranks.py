"""Every case in two processes: equal to one, or refused."""

import pytest

from tests.distributed import ranks

MODULES = (*ranks.MODULES, "sharded_cases")
CASES = ranks.cases(MODULES)
failures = ranks.failures(2, MODULES)


@pytest.mark.parametrize("name", CASES)
def test_two(name, failures):
    report = ranks.report(failures, name)
    assert not report, report
