"""The pages say what the committed results say."""

import pytest

from benchmarks import goals, tables


@pytest.mark.parametrize("page", tables.PAGES)
def test_page_has_the_tables_of_the_results(page):
    text = (tables.ROOT / page).read_text(encoding="utf-8")
    assert text == tables.rewritten(page=text, results=tables.load()), "run python -m benchmarks.tables"


def test_goals_name_cases_that_are_timed():
    from crate_kernels.bench.networks import NETWORKS
    from crate_kernels.testing import TIMED_CASES

    names = {t.case.name for t in TIMED_CASES if "cpu" in t.devices} | {n.name for n in NETWORKS if n.cpu_batch}
    assert [case for goal in goals.GOALS for case in goal.cases if case not in names] == []


def test_results_of_every_device_are_read():
    for results in tables.load().values():
        assert results.rows
        assert {row.provider for row in results.rows if row.times} >= {"eager", "composite"}
        assert not [row.key for row in results.rows if row.skipped.startswith("wrong") and row.provider == "cpp"]
