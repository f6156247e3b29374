import itertools
import json
from dataclasses import replace

import pytest
import torch

from crate_kernels import testing
from crate_kernels.bench import clock, figures, load, providers, rows
from crate_kernels.bench.rows import BenchRow, Results
from crate_kernels.cli import bench as bench_subcommand
from crate_kernels.cli import main

MACHINE = {
    "device": "a CPU",
    "processor": "of some make",
    "gpu": False,
    "torch": "2",
    "product_flops": {"fp32": 1e11},
    "copy_bytes": 1e10,
}


def row(provider, seconds, tokens=128, bench="mssa", sweep="", **kwargs):
    options = {"layer": "a layer", "shape": [1, 2, tokens, 64], "flops": 1e9, "bytes": 1e6, "peak_bytes": tokens**2}
    return BenchRow(
        bench, "mssa", f"n{tokens}", "fp32", "both", provider, sweep=sweep, seconds=seconds, **options | kwargs
    )


def drawn(middle):
    return [middle * (1 + 0.01 * k) for k in (-2, -1, 0, 1, 2)]


@pytest.fixture
def results():
    swept = [
        row(provider, drawn(base * (n / 128) ** 2), n, "scaling", "seqlen")
        for provider, base in (("eager", 4e-3), ("cpp", 1e-3))
        for n in (128, 256, 512, 1024)
    ]
    spent = row("eager", [], 2048, "scaling", "seqlen", skipped="out of memory")
    return Results(dict(MACHINE), [row("eager", drawn(4e-3)), row("cpp", drawn(1e-3)), *swept, spent])


def test_file_is_read_as_it_was_written(results, tmp_path):
    path = tmp_path / "folder" / "results.json"
    rows.write(path, results)
    again = rows.read(path)
    assert again.machine == results.machine
    assert [r.key for r in again.rows] == [r.key for r in results.rows]
    assert again.rows[0].median == pytest.approx(results.rows[0].median, rel=1e-4)
    assert again.rows[-1].skipped == "out of memory"


def test_runs_on_one_machine_are_pooled():
    machine = MACHINE | {"git": "b+", "product_flops": {"fp32": 2e11, "bf16": 1e11}}
    rows.pool(machine, MACHINE | {"git": "a, b", "product_flops": {"fp32": 3e11, "bf16": 9e10}, "copy_bytes": 9e9})
    assert machine["git"] == "a, b, b+"
    assert machine["product_flops"] == {"fp32": 3e11, "bf16": 1e11}
    assert machine["copy_bytes"] == 1e10


@pytest.mark.parametrize("content", ["", "[]", '{"machine": {}}', '{"machine": {}, "rows": [{"unknown": 1}]}'])
def test_file_of_something_else_is_refused(content, tmp_path):
    path = tmp_path / "results.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="no file of benchmark results"):
        rows.read(path)


def test_facts_of_a_row(results):
    facts = rows.facts(results.rows[1], results)
    assert facts["speedup_over_eager"] == pytest.approx(4.0)
    assert facts["min_us"] == pytest.approx(980)
    assert facts["tflops"] == pytest.approx(1 / 0.98)
    assert facts["percent_of_product"] == pytest.approx(1000 / 0.98)
    assert facts["gb_per_s"] == pytest.approx(1 / 0.98)
    assert facts["p20_us"] == pytest.approx(990)
    assert facts["p80_us"] == pytest.approx(1010)
    assert rows.facts(results.rows[-1], results) == {"skipped": "out of memory"}


def test_a_device_counts_with_its_median():
    assert row("cpp", drawn(1e-3)).time == pytest.approx(0.98e-3)
    assert row("triton", drawn(5e-3), device_seconds=drawn(1e-3)).time == pytest.approx(1e-3)


def test_each_clock_has_its_own_time():
    both = {"seconds": drawn(5e-3), "loop_seconds": drawn(3e-3)}
    on_a_cpu, on_a_gpu = (row("cpp", **both, device_seconds=device) for device in ([], drawn(1e-3)))
    assert [on_a_cpu.on(clock) for clock in rows.CLOCKS[1:]] == pytest.approx([0.98 * 3e-3, 0.98 * 5e-3])
    assert [on_a_gpu.on(clock) for clock in rows.CLOCKS] == pytest.approx([1e-3, 3e-3, 5e-3])
    results = Results(dict(MACHINE), [on_a_cpu, on_a_gpu])
    assert results.clocks() == list(rows.CLOCKS)
    assert [row.time for row in results.by("device").rows] == pytest.approx([1e-3])
    assert [row.time for row in results.by("loop").rows] == pytest.approx([0.98 * 3e-3, 3e-3])
    assert rows.facts(on_a_gpu, results)["loop_us"] == pytest.approx(3e3)


def test_a_file_from_before_the_loop_was_timed_is_read(results, tmp_path):
    path = tmp_path / "results.json"
    rows.write(path, results)
    assert "loop_seconds" not in path.read_text()
    assert rows.read(path).clocks() == ["calls"]


def test_series_of_a_sweep(results):
    eager, cpp = figures.series(results, "mssa", "seqlen", "both")
    assert eager.sizes == [128, 256, 512, 1024]
    assert eager.exhausted == 2048
    assert cpp.exhausted is None
    assert eager.exponent(eager.seconds) == pytest.approx(2.0)
    assert eager.exponent(eager.memory) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("factor", "min_change", "moved"),
    [(1.0, 0.05, False), (1.03, 0.05, False), (1.3, 0.05, True), (0.7, 0.05, True), (1.3, 0.5, False)],
)
def test_change_beyond_noise(results, factor, min_change, moved):
    later = Results(dict(MACHINE), [row("cpp", drawn(factor * 1e-3)), row("triton", drawn(1.0))])
    (change,) = bench_subcommand.changes(results, later)
    assert change.ratio == pytest.approx(factor)
    assert change.low <= change.ratio <= change.high
    assert change.moved(min_change) == moved
    assert bench_subcommand.missing(results, later)[1] == [later.rows[1].key]


def test_wide_samples_are_no_change(results):
    later = Results(dict(MACHINE), [row("cpp", [0.5e-3, 0.9e-3, 1.3e-3, 2e-3, 3e-3])])
    (change,) = bench_subcommand.changes(results, later)
    assert change.ratio == pytest.approx(1.3)
    assert not change.moved(0.05)


def test_compare_prints_what_moved(results, tmp_path, capsys):
    later = Results(dict(MACHINE), [row("cpp", drawn(2e-3)), row("eager", drawn(4e-3))])
    paths = [str(tmp_path / name) for name in ("a.json", "b.json")]
    for path, content in zip(paths, (results, later), strict=True):
        rows.write(tmp_path / path, content)
    assert main(["bench", "compare", *paths]) == 0
    printed = capsys.readouterr().out
    assert "1 of 2 rows moved" in printed
    assert "2.000" in printed
    assert "9 rows only in the first" in printed or "8 rows only in the first" in printed


@pytest.mark.parametrize("subcommand", [["bench", "compare", "absent.json", "absent.json"], ["plot", "absent.json"]])
def test_absent_file(subcommand, capsys):
    assert main(subcommand) == 2
    assert "absent.json" in capsys.readouterr().out


def test_plot_writes_every_figure(results, tmp_path, capsys):
    path = tmp_path / "results.json"
    rows.write(path, results)
    assert main(["plot", str(path), "--output", str(tmp_path / "figures")]) == 0
    names = {figure.stem for figure in (tmp_path / "figures").glob("*.png")}
    assert names == {"scaling_seqlen", "speedup_both"}
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_plot_says_where_it_cannot_write(results, tmp_path, capsys):
    path, taken = tmp_path / "results.json", tmp_path / "taken"
    rows.write(path, results)
    taken.touch()
    assert main(["plot", str(path), "--output", str(taken)]) == 2
    assert capsys.readouterr().out == f"plot: [Errno 17] File exists: '{taken}'\n"


def test_plot_of_nothing(tmp_path, capsys):
    path = tmp_path / "results.json"
    rows.write(path, Results(dict(MACHINE), []))
    assert main(["plot", str(path)]) == 1
    assert "no row" in capsys.readouterr().out


@pytest.fixture
def bench(tmp_path, monkeypatch, capsys):
    """Return a function that times tiny cases on a machine with some free cores before, and some after."""

    def run(before=2.0, after=2.0, options=("--quick", "--op", "tssa")):
        looks = iter((load.Load(2, before), load.Load(2, after)))
        monkeypatch.setattr(load, "measure", lambda: next(looks))
        status = main(["bench", *options, "--device", "cpu", "--output", str(run.path)])
        return status, capsys.readouterr().out, run.path

    monkeypatch.setattr(clock, "product_flops", lambda *_: 1e11)
    monkeypatch.setattr(clock, "copy_bytes", lambda *_: 1e10)
    shapes = {"tssa": ("vit-196", (1, 2, 9, 16)), "ista": ("tokens-1576", (1, 9, 16))}
    tiny = [testing.Timed(testing.Case(op, *case), "a layer", ("cpu",), True) for op, case in shapes.items()]
    monkeypatch.setattr(testing, "TIMED_CASES", tiny)
    for tier in bench_subcommand._SECONDS:
        monkeypatch.setitem(bench_subcommand._SECONDS, tier, 0.01)
    run.path = tmp_path / "out.json"
    return run


def test_bench_prints_a_table_and_writes_rows(bench):
    status, printed, path = bench()
    assert status == 0
    assert "cannot be trusted" not in printed
    assert "tssa vit-196 fp32 both" in printed
    assert "x eager" in printed
    header, _, line = printed.partition("\ncase ")[2].splitlines()[:3]
    loop = line.split()[header.replace("in a loop", "loop").split().index("loop") + 4]  # a case has four words more
    assert 0 < float(loop) < 1e3
    found = rows.read(path)
    assert {r.provider for r in found.rows if r.times} >= {"eager", "composite"}
    assert json.loads(path.read_text())["machine"]["copy_bytes"] == 1e10


def test_a_run_that_is_killed_leaves_the_rows_so_far(bench, monkeypatch):
    every = bench_subcommand._rows

    def killed(*args):
        yield from itertools.islice(every(*args), 2)
        raise SystemExit

    monkeypatch.setattr(bench_subcommand, "_rows", killed)
    with pytest.raises(SystemExit):
        bench()
    assert len(rows.read(bench.path).rows) == 2


def test_a_file_that_cannot_be_written_ends_bench_with_a_line(bench, tmp_path):
    (tmp_path / "out.json").mkdir()
    status, printed, _ = bench()
    assert status == 2
    assert printed.endswith(f"bench: [Errno 21] Is a directory: '{tmp_path / 'out.json'}'\n")


def test_a_file_that_another_run_writes_is_left_alone(bench, monkeypatch):
    def taken(path):
        raise bench_subcommand.files.InUse(f"{path} is in use by process 1 on a host")

    monkeypatch.setattr(bench_subcommand.files, "owned", taken)
    status, printed, path = bench()
    assert (status, printed) == (2, f"bench: {path} is in use by process 1 on a host\n")
    assert not path.exists()


SIZES = {"quick": ["--quick"], "full": ["--full"]}


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_what_bench_writes_plot_draws(size, bench, monkeypatch, capsys):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # it would take seconds a case
    status, _, path = bench(options=size)
    assert status == 0
    assert main(["plot", str(path)]) == 0
    figures = {path.stem for path in path.parent.glob("*.png")}
    dtypes = ["fp32"] if "--quick" in size else ["fp32", "bf16"]
    assert figures == {"speedup_forward", "speedup_both", *(f"roofline_{dtype}" for dtype in dtypes)}
    assert len(capsys.readouterr().out.splitlines()) == len(figures)


@pytest.mark.parametrize("timed", ["eager", "cpp"])
def test_what_has_nothing_beside_it_is_not_drawn(timed, tmp_path, capsys):
    """As where bench is interrupted, or where memory ran out for all others."""
    path = tmp_path / "results.json"
    rows.write(path, Results(dict(MACHINE), [row(timed, drawn(1e-3)), row("composite", [], skipped="out of memory")]))
    assert main(["plot", str(path)]) == 1
    assert "no row" in capsys.readouterr().out


BUSY = {"before": (0.3, 2.0), "after": (2.0, 0.3)}


@pytest.mark.parametrize(("before", "after"), BUSY.values(), ids=BUSY)
def test_bench_says_that_its_times_are_of_a_busy_machine(before, after, bench, threads, capsys):
    threads(2)
    _, printed, path = bench(before, after)
    assert printed.startswith("bench: 0.3 of 2 cores free") == (before < 1)
    assert torch.get_num_threads() == (1 if before < 1 else 2)
    warning = f"others were at work ({before} of 2 cores free before, {after} of 2 cores free after)"
    assert printed.endswith(f"bench: {warning}: these times and ratios cannot be trusted\n")
    assert main(["bench", "compare", str(path), str(path)]) == 0
    assert capsys.readouterr().out.count(warning) == 2


@pytest.mark.parametrize("name", ["eager", "composite"])
def test_bench_marks_a_provider_beyond_its_tolerance(name, bench, monkeypatch):
    every = providers.of

    def off(provider):
        return replace(provider, make=lambda case: lambda *args: 1.01 * provider.make(case)(*args))

    monkeypatch.setattr(providers, "of", lambda op: [off(p) if p.name == name else p for p in every(op)])
    status, printed, _ = bench()
    assert status == (name == "composite")
    header, _, *lines = printed.partition("\ncase ")[2].splitlines()[:4]
    column = len("case ") + header.index(f"x {name}")
    assert [line[column:].split()[0] for line in lines] == ["wrong", "wrong"]
    assert all(("(composite wrong)" in line) == (name == "composite") for line in lines)


def test_an_interrupted_run_prints_and_writes_what_was_timed(bench, monkeypatch):
    every = bench_subcommand._rows

    def interrupted(*args):
        yield from itertools.islice(every(*args), 3)
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_subcommand, "_rows", interrupted)
    status, printed, path = bench()
    assert status == 0
    assert "bench: interrupted; what follows is what was timed" in printed
    assert len(rows.read(path).rows) == 3
    assert "\ncase " in printed


OPTIONS = {
    "quick": (["--quick"], {"ista", "tssa"}, {"fp32"}),
    "one op": (["--quick", "--op", "ista"], {"ista"}, {"fp32"}),
    "ops": (["--op", "ista", "--op", "tssa"], {"ista", "tssa"}, {"fp32", "bf16"}),
    "dtype": (["--quick", "--dtype", "bf16"], {"ista", "tssa"}, {"bf16"}),
    "backend": (["--quick", "--backend", "composite"], {"ista", "tssa"}, {"fp32"}),
}


@pytest.mark.parametrize(("options", "ops", "dtypes"), OPTIONS.values(), ids=OPTIONS)
def test_what_bench_times(options, ops, dtypes, bench, monkeypatch):
    seen = []

    def measured(row, timed, provider, device, timer):
        assert (row.provider, row.case, device.type) == (provider.name, timed.case.name, "cpu")
        seen.append(row)
        return row

    monkeypatch.setattr(bench_subcommand.measuring, "measure", measured)
    bench(options=options)
    assert {row.op for row in seen} == ops
    assert {row.dtype for row in seen} == dtypes
    assert {row.direction for row in seen} == {"forward", "both"}
    quick = {"eager", "sdpa", *(["composite"] if "--backend" in options else providers.OURS)}
    every = {provider.name for op in ops for provider in providers.of(op)} - {providers.DEFAULT}
    assert {row.provider for row in seen} == (every & quick if "--quick" in options else every)
    keys = [row.key for row in seen]
    assert len(set(keys)) == len(keys)


def test_cases_and_devices_that_a_run_leaves_out(bench, monkeypatch):
    """A case that is for GPUs, and one that is not brief."""
    tssa, ista = testing.TIMED_CASES
    gone = [replace(tssa, devices=("cuda",)), replace(ista, brief=False)]
    monkeypatch.setattr(testing, "TIMED_CASES", gone)
    seen = []
    monkeypatch.setattr(bench_subcommand.measuring, "measure", lambda row, *_: seen.append(row.op) or row)
    bench(options=["--op", "tssa", "--op", "ista"])
    assert seen == []
    bench(options=["--full"])
    assert set(seen) == {"ista"}


def test_a_device_that_cannot_be_used_is_refused(capsys, monkeypatch):
    assert main(["bench", "--device", "toaster"]) == 2
    assert capsys.readouterr().out.startswith("bench: --device toaster cannot be used: ")


def test_compare_lists_the_slower_rows_first_and_heeds_its_least(results, tmp_path, capsys):
    times = {"cpp": 2e-3, "eager": 1e-3}
    later = Results(MACHINE | {"git": "abc"}, [row(name, drawn(seconds)) for name, seconds in times.items()])
    paths = [str(tmp_path / name) for name in ("a.json", "b.json")]
    rows.write(tmp_path / "a.json", results)
    rows.write(tmp_path / "b.json", later)
    assert main(["bench", "compare", *paths]) == 0
    first, second, _, header, _, slower, faster, *rest = capsys.readouterr().out.splitlines()
    assert (first, second) == ("first: a CPU, torch 2, None", "second: a CPU, torch 2, abc")
    assert header.split() == ["row", "times", "as", "long", "95%"]
    assert slower.split()[:2] == ["mssa/mssa/n128/fp32/both/cpp", "2.000"]
    assert faster.split()[:2] == ["mssa/mssa/n128/fp32/both/eager", "0.250"]
    assert rest == [
        "",
        "2 of 2 rows moved by more than 5%",
        "8 rows only in the first, scaling/seqlen/mssa/n1024/fp32/both/cpp for one",
    ]
    assert main(["bench", "compare", *paths[::-1], "--min-change", "2"]) == 0
    printed = capsys.readouterr().out
    assert "1 of 2 rows moved by more than 200%" in printed
    assert "8 rows only in the second" in printed


def test_the_line_of_a_case(results):
    found = [row("eager", [3e-3]), row("cpp", [1e-3], loop_seconds=[5e-4]), row("composite", [2e-3])]
    found += [row("sdpa", [], skipped="not here"), row("eager", [1e-3], 256), row("cpp", [], 256, skipped="wrong: out")]
    header, _, *lines = bench_subcommand._table(Results(MACHINE, found)).splitlines()
    assert header.split() == ["case", "backend", "ms", "in", "a", "loop", "x", "eager", "x", "composite"]
    assert [line.split() for line in lines] == [
        ["mssa", "n128", "fp32", "both", "cpp", "1.000", "0.500", "3.00", "2.00"],
        ["mssa", "n256", "fp32", "both", "-", "(cpp", "wrong)", "-", "-", "-", "-"],
    ]
    assert bench_subcommand._time_cell(replace(found[0], times_eager=0.5, share=0.25)) == (
        "     3.000 ms  error 0.50 x eager's, 0.25 of its tolerance"
    )
    assert bench_subcommand._time_cell(found[3]) == "not here"
    assert bench_subcommand._heading(Results(MACHINE, [])) == (
        "a CPU (of some make), torch 2; product fp32 0.1 TFLOP/s; copy 10 GB/s\n"
    )
