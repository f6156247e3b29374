"""The training examples in two processes: the losses of one, whatever is cut."""

import pytest

from tests.distributed import ranks

pytestmark = pytest.mark.exhaustive
MODULES = ("run_cases",)
CASES = ranks.cases(MODULES)


@pytest.fixture(scope="module")
def failures(request, tmp_path_factory):
    return ranks.run(tmp_path_factory.mktemp("ranks"), 2, ranks.chosen(request), MODULES)


@pytest.mark.parametrize("name", CASES)
def test_two(name, failures):
    told = ranks.told(failures, name)
    assert not told, told
