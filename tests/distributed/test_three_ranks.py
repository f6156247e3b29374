"""Every case in three processes: equal to one, or refused."""

import pytest

from tests.distributed import ranks

pytestmark = pytest.mark.exhaustive  # two processes take the same ways, but for a rank in the middle
CASES = ranks.cases()
failures = ranks.failures(3)


@pytest.mark.parametrize("name", CASES)
def test_three(name, failures):
    report = ranks.report(failures, name)
    assert not report, report
