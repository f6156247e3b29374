"""Every case in two processes: equal to one, or refused."""

import pytest

from tests.distributed import ranks

CASES = ranks.cases()


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    return ranks.run(tmp_path_factory.mktemp("ranks"), 2, CASES)


@pytest.mark.parametrize("name", CASES)
def test_two(name, failures):
    assert not ranks.told(failures, name)
