"""Shared by all benchmarks: options, the clock, and the file to which each result is written at once."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from benchmarks import worth
from crate_kernels._core import files
from crate_kernels.bench import clock, load, memory, rows
from crate_kernels.bench.providers import DEFAULT, OURS
from crate_kernels.bench.rows import Results
from tests.integrations import vision_schemas  # noqa: F401 (timm imports torchvision)

MAX_ROUNDS_SECONDS = {"quick": 0.1, "brief": 0.2, "full": 0.4}
QUICK_MINUTES = 5.0
RESULTS = Path("bench-output") / "results.json"  # of a run that names no file: begun anew
COLUMNS = ["min", "median", "iqr", "rounds"]


def pytest_addoption(parser):
    group = parser.getgroup("crate_kernels benchmarks")
    group.addoption(
        "--tier",
        choices=tuple(MAX_ROUNDS_SECONDS),
        help=f"quick, the default on a CPU: at most {QUICK_MINUTES:g} minutes; brief: a quarter of an hour or more; "
        "full: all, the default on a GPU",
    )
    group.addoption("--bench-device", help="default: cuda if there is a GPU, else cpu")
    group.addoption(
        "--results",
        type=Path,
        help="JSON file to add rows to as they come; rows in it are not run again. Without this option, "
        f"{RESULTS} is begun anew",
    )
    group.addoption(
        "--again", action="store_true", help="time rows of the file once more, and keep the samples of both"
    )
    group.addoption(
        "--minutes",
        type=float,
        help=f"start nothing after so many ({QUICK_MINUTES:g} of --tier quick); with --results, a second call resumes",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    if getattr(config.option, "benchmark_columns", "") is None:
        config.option.benchmark_columns = COLUMNS  # the default columns do not fit a terminal
    config.device = torch.device(config.getoption("--bench-device") or ("cuda" if torch.cuda.is_available() else "cpu"))
    config.results = config.getoption("--results") or RESULTS
    config.looks, config.rows_written = [], False
    config.tier = config.getoption("--tier") or ("full" if config.device.type == "cuda" else "quick")
    config.minutes = config.getoption("--minutes") or (QUICK_MINUTES if config.tier == "quick" else None)


def _rank(item):
    """Return the place of a benchmark in the order of worth."""
    parameters = getattr(item, "callspec", None)
    params = parameters.params if parameters else {}
    return worth.rank(params["what"].name, params["dtype"], params["direction"]) if "what" in params else 0


def _quick_rank(item):
    """Return the place of a benchmark in the quick run; None if it is not in it."""
    params = item.callspec.params
    return worth.quick_rank(params["what"].name, params["dtype"], params["direction"], params["provider"])


def pytest_collection_modifyitems(config, items):
    """Keep the tests of this device and tier."""
    kept, dropped = [], []
    for item in sorted(items, key=_rank) if config.device.type == "cuda" else items:
        parameters = getattr(item, "callspec", None)
        what = parameters.params.get("what") if parameters else None
        if what is None:
            kept.append(item)
            continue
        provider, direction = item.callspec.params["provider"], item.callspec.params.get("direction")
        briefly = getattr(item.module, "BRIEF_PROVIDERS", (provider,))
        brief = what.brief and provider in briefly and not {provider, direction} & {*what.only_full}
        chosen = {"quick": _quick_rank(item) is not None, "brief": brief, "full": True}[config.tier]
        fits = what.runs_on(config.device.type) and chosen
        (kept if fits else dropped).append(item)
    items[:] = sorted(kept, key=lambda item: _quick_rank(item) or 0) if config.tier == "quick" else kept
    config.hook.pytest_deselected(items=dropped)


@pytest.fixture(scope="session")
def results(request):
    """Return the results so far, including those of the file that --results names."""
    path, device = request.config.results, request.config.device
    if device.type == "cpu":
        request.config.looks.append(load.measure())
    machine = rows.machine(device, ("fp32", "bf16"))
    if any(found.busy for found in request.config.looks):
        machine["load"] = f"{request.config.looks[0]} before"
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.owned(path):
        if not request.config.getoption("--results") or not path.exists():
            yield Results(machine, [])
            return
        earlier = rows.read(path)
        if earlier.machine["device"] != machine["device"]:
            raise pytest.UsageError(f"{path} is of {earlier.machine['device']}, this is {machine['device']}")
        rows.pool(machine, earlier.machine)
        yield Results(machine, earlier.rows)


def pytest_terminal_summary(terminalreporter, config):
    """Report where the rows are, and whether other processes used the machine, before and after."""
    if config.rows_written:
        terminalreporter.write_line(f"rows: {config.results}; --results {config.results} resumes where this run ended")
    looks = [*config.looks, *(load.measure() for _ in config.looks)]
    if any(found.busy for found in looks):
        words = " before, ".join(map(str, looks))
        terminalreporter.write_line(f"others were at work ({words} after): these times cannot be trusted", yellow=True)


@pytest.fixture(scope="session")
def started():
    return time.monotonic()


@pytest.fixture
def timed(request, benchmark, results, started):
    """Return a function that takes (row, measure): it times the row by pytest-benchmark and keeps it."""
    config = request.config
    device, path = config.device, config.results

    def timer(call, prepare):
        rounds = clock.warm_rounds(call, prepare, device, MAX_ROUNDS_SECONDS[config.tier])

        def setup():
            args = prepare()
            clock.synchronize(device)
            return args, {}

        def synchronised(*args):
            call(*args)
            clock.synchronize(device)

        benchmark.pedantic(synchronised, setup=setup, rounds=rounds, iterations=1)
        return list(benchmark.stats.stats.data)

    def run(row, measure):
        earlier = next((other for other in results.rows if other.key == row.key), None)
        skip_what_is_done(config, started, earlier is not None)
        benchmark.group = " ".join(filter(None, row.group))
        measured = measure(row, device, timer)
        if earlier is not None:
            measured.seconds += earlier.seconds
            measured.loop_seconds += earlier.loop_seconds
            measured.device_seconds += earlier.device_seconds
            results.rows.remove(earlier)
        results.rows.append(measured)
        benchmark.extra_info.update(rows.facts(measured, results) | {"machine": results.machine})
        config.rows_written = True
        rows.write(path, results)
        if measured.skipped.startswith("wrong") and measured.provider in (DEFAULT, *OURS):
            pytest.fail(measured.skipped)
        if measured.skipped:
            pytest.skip(measured.skipped)

    return run


def skip_what_is_done(config, started, in_file):
    if in_file and not config.getoption("--again"):
        pytest.skip("in the file of results already")
    if config.minutes is not None and time.monotonic() - started > 60 * config.minutes:
        pytest.skip(f"time is up: --results {config.results} resumes")


@pytest.fixture
def together(request, benchmark, results, started):
    """Return a function that takes (rows, measure): it times the rows of one case interleaved and keeps them."""
    config = request.config

    def run(timed_rows, measure):
        earlier = {row.key: row for row in results.rows}
        skip_what_is_done(config, started, all(row.key in earlier for row in timed_rows))
        benchmark.group = " ".join(filter(None, timed_rows[0].group))
        seconds = MAX_ROUNDS_SECONDS[config.tier]
        benchmark.pedantic(lambda: measure(timed_rows, config.device, seconds), rounds=1, iterations=1)
        for row in timed_rows:
            if row.key in earlier:
                row.seconds += earlier[row.key].seconds
                results.rows.remove(earlier[row.key])
        results.rows += timed_rows
        benchmark.extra_info.update({row.provider: rows.facts(row, results) for row in timed_rows})
        config.rows_written = True
        rows.write(config.results, results)
        bad = [row for row in timed_rows if row.skipped.startswith("wrong") and row.provider in (DEFAULT, *OURS)]
        assert [row.skipped for row in bad] == []

    return run


@pytest.fixture(autouse=True)
def free(request):
    """Free cached GPU memory between benchmarks, so that the next one can use it."""
    yield
    if request.config.device.type == "cuda":
        memory.release()
