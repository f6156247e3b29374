"""The sweep of cells: each is timed once, a slow one again, and what is wrong not at all; the worst are shown."""

import json

import pytest

import crate_kernels
from tests.apart import cells

TINY = {
    "head_dim": (8,), "dim": (8,), "seqlen": (3,), "heads": (2,), "threads": (1,), "dtype": ("fp32", "bf16"),
    "direction": (cells.FORWARD, cells.BOTH),
}  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread(threads):
    """A run sets threads; let the fixture restore them."""
    threads(1)


def test_every_operator_is_timed_beside_its_rivals(tmp_path):
    wanted = cells.cells(TINY)
    found = cells.run(wanted, tmp_path / "log.jsonl", 0.0)
    assert list(found) == wanted
    assert len(wanted) == 4 * len(cells.OPERATORS)
    for cell, fastest in found.items():
        assert set(fastest) == {"ours", "eager"} | ({"sdpa"} if cell.op.startswith("mssa") else set())
        assert all(0 < value < 1 for value in fastest.values())


def test_a_second_run_resumes_where_the_first_was_stopped(tmp_path, monkeypatch):
    log, wanted = tmp_path / "log.jsonl", cells.cells(TINY, ("ista",))
    cells.run(wanted[:1], log, 0.0)
    timed = []
    monkeypatch.setattr(cells, "measure", lambda cell, _: timed.append(cell) or {"ours": 1.0, "eager": 2.0})
    found = cells.run(wanted, log, 0.0)
    assert timed == wanted[1:]
    assert list(found) == wanted
    assert [cells.Cell(*json.loads(line)["cell"]) for line in log.read_text().splitlines()] == wanted


def test_a_slow_cell_is_timed_again_and_keeps_the_least(tmp_path, monkeypatch):
    (cell, *_) = cells.cells(TINY, ("mssa",))
    times = iter([{"ours": 3.0, "sdpa": 2.0, "eager": 9.0}, {"ours": 1.0, "sdpa": 4.0, "eager": 5.0}])
    monkeypatch.setattr(cells, "measure", lambda *_: next(times))
    assert cells.run([cell], tmp_path / "log.jsonl", 0.0) == {cell: {"ours": 1.0, "sdpa": 2.0, "eager": 5.0}}
    assert next(times, None) is None


def test_the_table_has_the_worst_cells_first_and_counts_the_slow_ones():
    one, two, three = cells.cells(TINY, ("tssa",))[:3]
    found = {
        one: {"ours": 1e-6, "eager": 1e-6},
        two: {"ours": 3e-6, "eager": 1e-6},
        three: {"ours": 1.2e-6, "eager": 1e-6},
    }
    _, first, second, count = cells.table(found, 2)
    assert first.split()[-4:] == ["3.0", "-", "1.0", "3.00"]
    assert second.split()[-1] == "1.20"
    assert count == "tssa: 2 of 3 cells are slower by more than a tenth"


def test_what_is_wrong_gets_no_time(monkeypatch):
    own = crate_kernels.tssa
    monkeypatch.setattr(crate_kernels, "tssa", lambda *args, **options: own(*args, **options) * 1.01)
    (cell, *_) = (c for c in cells.cells(TINY, ("tssa",)) if c.dtype == "fp32")
    with pytest.raises(ArithmeticError, match=r"ours is off by 0\.01"):
        cells.measure(cell, 0.0)
