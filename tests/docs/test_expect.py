"""The ranges of docs/expect.md are those of the tables of results on the performance pages."""

import re

import pytest

from tests.docs import pages

BASELINES = ("eager", "torch.compile of it", "SDPA(w, w, w)")
MACHINES = {
    "AMD Zen 5": ("performance-zen5", "zen5"),
    "AMD Zen 4": ("performance-zen4", "zen4"),
    "Intel, AVX-512": ("performance-intel", "intel"),
    "AMD, AVX2": ("performance", "avx2"),
}
CLOCKS = {"NVIDIA H200, device clock": 0, "NVIDIA H200, calls from Python": 1}
RANGES = re.findall(
    r"^\| ([\w ,-]+) \| `(\w+)` \| ([\w. -]+) \| ([\w. -]+) \| ([\w. -]+) \|$",
    (pages.DOCS / "expect.md").read_text(),
    re.MULTILINE,
)


def rows(page, table):
    """Return the rows of a table of results, each by the names of its columns."""
    text = (pages.DOCS / f"{page}.md").read_text()
    lines = text.partition(f"<!-- table {table} -->\n")[2].partition("<!-- end -->")[0].splitlines()
    cells = [
        [cell.strip(" `").replace("`", "") for cell in line.strip("|").split("|")]
        for line in lines
        if line.startswith("|")
    ]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]


def numbers(cell):
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?", cell)]


def times(machine, operator, baseline):
    """Return how many times as long a baseline took as we, in every case of an operator."""
    if machine in MACHINES:
        page, results = MACHINES[machine]
        return [number for row in rows(page, f"{results}-{operator}") for number in numbers(row.get(baseline, ""))]
    place = CLOCKS[machine]
    timed = [row for row in rows("performance", "gpu-clocks") if row["call"].startswith(operator)]
    pairs = [(numbers(row[baseline]), numbers(row["None"])) for row in timed]
    return [theirs[place] / ours[place] for theirs, ours in pairs if theirs]


def span(found):
    """Write the smallest and the largest number."""
    return f"{min(found):.2g} to {max(found):.2g}" if found else "-"


def test_every_machine_and_operator_has_a_row():
    assert [(machine, operator) for machine, operator, *_ in RANGES] == [
        (machine, operator) for machine in (*CLOCKS, *MACHINES) for operator in ("mssa", "tssa", "ista")
    ]


@pytest.mark.parametrize(("machine", "operator", "spans"), [(m, o, s) for m, o, *s in RANGES])
def test_a_range_is_that_of_the_results(machine, operator, spans):
    assert spans == [span(times(machine, operator, baseline)) for baseline in BASELINES]
