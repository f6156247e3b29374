"""The pages say what the committed results say."""

import json
import re
from dataclasses import replace

import pytest

from benchmarks import goals, profiled, tables, tuning
from crate_kernels.bench import rows


@pytest.fixture(scope="module")
def committed():
    """Read the committed results once."""
    return tables.load()


@pytest.mark.parametrize("page", tables.PAGES)
def test_page_has_the_tables_of_the_results(page, committed):
    text = (tables.ROOT / page).read_text(encoding="utf-8")
    assert text == tables.rewritten(page=text, results=committed), "run python -m benchmarks.tables"


TABLES = {
    "cpu": ([(goal.bench, case) for goal in goals.GOALS for case in goal.cases], tables._ON_A_CPU),
    "cuda": ([(goal.bench, case) for goal in goals.GPU_GOALS for case in goal.cases], tables._ON_A_GPU),
}


@pytest.mark.parametrize("device", TABLES)
def test_goals_and_the_readme_name_cases_that_are_timed(device):
    from crate_kernels.bench import decoding, networks
    from crate_kernels.testing import SPECS, TIMED_CASES

    timed = {(SPECS[t.case.op].package, t.case.name) for t in TIMED_CASES if device in t.devices}
    timed |= {("decode", str(step)) for step in decoding.STEPS if device in step.devices}
    timed |= {("models", n.name) for n in networks.NETWORKS if (n.cpu_batch if device == "cpu" else n.gpu_batch)}
    judged, shown = TABLES[device]
    assert [case for case in (*judged, *(wanted[:2] for wanted in shown)) if case not in timed] == []


def test_results_of_every_device_are_read(committed):
    for results in committed.values():
        assert results.rows
        # A run on a GPU may end before it has timed every provider.
        ours = ("default", "cpp", "triton") if results.machine["gpu"] else ("default", "cpp", "composite")
        assert {row.provider for row in results.rows if row.times} >= {"eager", *ours}
        assert not [row.key for row in results.rows if row.skipped.startswith("wrong") and row.provider == "cpp"]


def row(bench, op, case, direction, provider, seconds, **more):
    return rows.BenchRow(bench, op, case, "bf16", direction, provider, seconds=[seconds], **more)


def machine(gpu):
    rates = {"product_flops": {"bf16": 1e15}, "copy_bytes": 4e12}
    return {"device": "NVIDIA None", "gpu": gpu, "processor": "one", "torch": "2.13.0", "git": "0", **rates}


def rendered(name, folder, monkeypatch, gpu, found):
    """Render a table from invented results, which are in a separate folder."""
    device = "nvidia-none" if gpu else tables.CPUS["zen5"]
    rows.write(folder / "benchmarks" / "results" / device / "results.json", rows.Results(machine(gpu), found))
    monkeypatch.setattr(tables, "ROOT", folder)
    return tables.render(name, tables.load())


def test_the_readme_has_one_number_a_cell_forward_and_backward(tmp_path, monkeypatch):
    found = [
        row("tssa", "tssa", "vit-196-many", direction, provider, seconds, shape=[64, 8, 196, 48])
        for direction, ours in (("forward", 2.0), ("both", 1.0))
        for provider, seconds in (("eager", 3.0), ("compile", 1.5), ("default", ours))
    ]
    found += [
        row("models", "model", "crate_small", "step", provider, seconds, shape=[8, 3, 224, 224])
        for provider, seconds in (("eager", 0.6), ("default", 0.3))
    ]
    said = rendered("zen5-speed", tmp_path, monkeypatch, False, found)
    assert said.splitlines()[2:] == [
        "| `tssa`, ToST-S, 64 × 196 | - | - | - | - | 1000 | 3.00× | 1.50× | - |",
        "| CRATE-S, training step, 8 images | - | - | - | - | 300 | 2.00× | - | - |",
    ]


def clocked(bench, op, case, ours, eager, **more):
    """Return ours and eager's forward and backward of one case, each of (device, loop, calls)."""
    names = ("device_seconds", "loop_seconds", "seconds")
    for provider, times in (("default", ours), ("eager", eager)):
        found = row(bench, op, case, "both", provider, 0.0, **more)
        for name, seconds in zip(names, times, strict=True):
            setattr(found, name, [] if seconds is None else [seconds])
        yield found


CLOCKS = {
    "gpu": (
        "gpu-speed",
        ("tssa", "tssa", "vit-196", (1e-3, 2e-3, 4e-3), (8e-3, 8e-3, 12e-3)),
        ["| `tssa`, ToST-S, 64 × 196 | 1 | 8.00× | - | - | - | - |"],
    ),
    "gpu, in a loop": (
        "gpu-calls",
        ("tssa", "tssa", "vit-196", (1e-3, 2e-3, 4e-3), (8e-3, 8e-3, 12e-3)),
        ["| `tssa`, ToST-S, 64 × 196 | 2 | 4.00× | - | - |"],
    ),
    "gpu, one by one": (
        "gpu-calls",
        ("tssa", "tssa", "vit-196", (1e-3, None, 4e-3), (8e-3, None, 12e-3)),
        ["| `tssa`, ToST-S, 64 × 196 | 4 | 3.00× | - | - |"],
    ),
    "cpu": (
        "zen5-tssa",
        ("tssa", "tssa", "vit-196-many", (None, 2e-3, 4e-3), (None, 8e-3, 12e-3)),
        ["| vit-196-many (64, 8, 196, 48) | bf16 | - / 4 | - / 3.00 |"],
    ),
    "every": (
        "gpu-clocks",
        ("tssa", "tssa", "vit-196", (1e-3, None, 4e-3), (8e-3, None, 12e-3)),
        ["| `tssa` vit-196 (64, 8, 196, 48), forward and backward | bf16 | 1000 / 4000 | 8000 / 12000 |"],
    ),
    "graphs": (
        "gpu-graphs",
        ("tssa", "tssa", "vit-196", (1e-3, 2e-3, 4e-3), (8e-3, None, 12e-3)),
        ["| `tssa` vit-196 (64, 8, 196, 48), forward and backward | bf16 | 1000 | 2000 (2.00) | 4000 (4.00) |"],
    ),
    "models": (
        "zen5-models",
        ("models", "model", "crate_small", (None, 2.0, 4.0), (None, 8.0, 12.0)),
        ["| crate_small, 8 images | bf16 | 4000 / 4000 | 2 | 3.00 / 3.00 | - / - | - / - | - / - |"],
    ),
}


@pytest.mark.parametrize(("name", "times", "lines"), CLOCKS.values(), ids=CLOCKS)
def test_tables_show_the_clocks_that_they_name(name, times, lines, tmp_path, monkeypatch):
    found = [*clocked(*times, shape=[64, 8, 196, 48])]
    if times[0] == "models":
        found = [replace(r, direction=d, amount=8.0, unit="images") for r in found for d in ("forward", "step")]
    said = rendered(name, tmp_path, monkeypatch, name.startswith("gpu"), found)
    assert said.splitlines()[-len(lines) :] == lines


def test_the_readme_has_the_memory_of_a_gpu(tmp_path, monkeypatch):
    found = [
        row("mssa", "mssa", "vit-197-d64", "both", provider, 1.0, shape=[256, 12, 197, 64], peak_bytes=mib * 2**20)
        for provider, mib in (("eager", 1206), ("default", 155))
    ]
    for each in found:
        each.device_seconds = [1.0]
    assert rendered("gpu-speed", tmp_path, monkeypatch, True, found).endswith(" | 1206 | 155 |\n")


# Rows of one case by provider, and what the table says of a goal for GPUs.
GPU_GOALS = {
    "best-of-sdpa": (
        ("mssa", "mssa", "vit-197-d64", "forward"),
        {"sdpa": (2.5, {}), "sdpa-cudnn": (2.25, {}), "default": (1.0, {})},
        "| mssa forward, 197 tokens | bf16 | 2.1 x best sdpa | vit-197-d64 2.25 | yes |",
    ),
    "stream": (
        ("decode", "mssa", "64x12x64-cached-4096", "forward"),
        {"eager": (9.0, {}), "triton": (1.0, {"bytes": 3e12})},
        "| mssa decode, 256 MB of cache and more | bf16 | 1 x stream | 64x12x64-cached-4096 0.75 | 0 of 1 |",
    ),
    "product": (
        ("ista", "ista", "crate-b", "forward"),
        {"eager": (9.0, {}), "default": (1.0, {"flops": 0.95e15})},
        "| ista forward | bf16 | 0.9 x product | crate-b 0.95 | yes |",
    ),
    "memory": (
        ("models", "model", "crate_base", "step"),
        {"eager": (2.0, {"peak_bytes": 200}), "default": (1.0, {"peak_bytes": 100})},
        "| training steps | bf16 | 1.67 x eager's memory | crate_base 2.00 | yes |",
    ),
}


@pytest.mark.parametrize(("what", "providers", "line"), GPU_GOALS.values(), ids=GPU_GOALS)
def test_goals_for_gpus_are_judged_from_rows(what, providers, line, tmp_path, monkeypatch):
    found = [row(*what, provider, seconds, **more) for provider, (seconds, more) in providers.items()]
    said = rendered("gpu-goals", tmp_path, monkeypatch, True, found).splitlines()
    assert any(each.startswith(line) for each in said)
    assert not any(" x sdpa |" in each and "fp32" in each for each in said), "goals for CPUs"


def test_a_goal_of_one_clock_is_judged_by_it(tmp_path, monkeypatch):
    found = [
        row("models", "model", "crate_base", "step", name, 9.0, loop_seconds=[loop], device_seconds=[device])
        for name, device, loop in (("eager", 8.0, 3.0), ("compile", 3.0, 8.0), ("default", 1.0, 2.0))
    ]
    said = rendered("gpu-goals", tmp_path, monkeypatch, True, found)
    steps = "| CRATE-B and causal CRATE, training step"
    assert f"{steps} | bf16 | 2.2 x compile | crate_base 3.00 | yes |" in said
    assert f"{steps}, from Python | bf16 | 2 x eager | crate_base 1.50 | 0 of 1 |" in said


FROM_PYTHON = {
    "one-by-one": ((1e-3, None, 4e-3), (2e-3, None, 4e-3), "vit-196 both 0.50 | 0 of 1 | what a call costs the host |"),
    "in-a-loop": ((1e-3, 1e-3, 4e-3), (2e-3, 2e-3, 4e-3), "vit-196 both 1.00 | yes |  |"),
}


@pytest.mark.parametrize(("ours", "eager", "end"), FROM_PYTHON.values(), ids=FROM_PYTHON)
def test_calls_from_python_are_held_to_what_the_device_takes(ours, eager, end, tmp_path, monkeypatch):
    found = [*clocked("tssa", "tssa", "vit-196", ours, eager, shape=[64, 8, 196, 48])]
    found.append(row("tssa", "tssa", "vit-196", "both", "triton", 1e-9, device_seconds=[1e-9]))
    (last,) = re.findall(".*over ours, from Python.*", rendered("gpu-goals", tmp_path, monkeypatch, True, found))
    assert last == f"| best other over ours, from Python | all | 0.9 x the device's | {end}"


def test_models_are_shown_with_and_without_graphs(tmp_path, monkeypatch):
    found = [
        row("models", "model", "crate_base", "step", name, 2 * ms / 1e3, device_seconds=[ms / 1e3])
        for name, ms in (("eager", 4), ("compile-graphed", 3), ("default", 2), ("default-graphed", 1))
    ]
    said = rendered("gpu-graphed", tmp_path, monkeypatch, True, found).splitlines()[-1]
    assert said == "| crate_base, step | bf16 | 4000 / 8000 | - | 3000 / 6000 | 2000 / 4000 | - | 1000 / 2000 |"
    assert "No GPU" in rendered("gpu-graphed", tmp_path, monkeypatch, True, found[:3])


def test_without_a_gpu_its_goals_are_not_measured_but_that_of_the_host():
    measured, left = tables.render("gpu-goals", {}).split("\nNot measured:\n\n")
    assert [line.split(" | ")[0] for line in measured.splitlines()[2:]] == ["| the host's time of a call"]
    assert left.startswith("- mssa forward, 197 tokens: 2.1 x best sdpa\n- ")
    assert left.count(" x ") == len(goals.GPU_GOALS) + 1  # that of both clocks


def test_the_goal_of_the_host_is_judged_by_the_worst_column():
    host = {"sdpa": {"of": "sdpa", "grad": 10.0, "both": 100.0}}
    host |= {call: {"of": "sdpa", "grad": 12.0, "both": 10.0} for call in goals._HOST_MAX}
    *_, measured, met, _ = goals.host_line(host)
    assert measured.startswith("mssa 1.20, ")
    assert met.startswith("3 of 5")


def test_a_kernel_is_timed_by_its_last_run_and_stands_for_a_goal_without_a_case(tmp_path, monkeypatch):
    forward = next(kernel for kernel in tuning.KERNELS if kernel.flops)
    lines = [
        {"run": run, "workload": forward.workload, "seconds": time}
        for run, time in ((1, 1e-3), (2, 3e-3), (2, 2e-3), (2, None))
    ]
    lines += [{"run": 1, "workload": kernel.workload, "seconds": 1e-4} for kernel in tuning.KERNELS if kernel.passes]
    (tmp_path / "nvidia-none").mkdir()
    (tmp_path / "nvidia-none" / "tuning.jsonl").write_text("\n".join(map(json.dumps, lines)))
    monkeypatch.setattr(profiled, "FOLDER", tmp_path)
    results = rows.Results(machine(gpu=True), [])
    _, _, first, second, *_ = tuning.table(results).splitlines()
    assert (
        first
        == f"| `mssa` forward | (10, 12, 4096, 64) | 2000 | 4 N² D a head | {forward.flops / 2e9:.0f} TFLOP/s | 1000 |"
    )
    assert second.startswith("| `mssa` decode | (16, 12, 8193, 64) | 100 | the cache once | 2.01 TB/s | 4.00 |")
    assert "| mssa decode (16, 12, 8193, 128), as tuned 1.01 | yes |" in tables._all_goals(results)
    sums, other = ["CUDAFunctor_add", 1.0, 2], ["FillFunctor", 9.0, 1]
    ours = [["_mssa_fwd_kernel", 2.0, 1], ["_mssa_bwd_kernel", 4.0, 1], ["_mssa_bwd_delta_kernel", 1.0, 1], sums, other]
    others = {"flash": [["flash_fwd_kernel", 9.0, 1], ["dot_do_o", 3.0, 1], sums]}
    others["cudnn"] = [["fprop", 3.0, 1], ["bprop", 3.0, 1], ["dot_do_o", 1.0, 1]]
    calls = [
        {"call": f"mssa vit-197 {name}", "shape": [1000, 1000], "kernels": kernels}
        for name, kernels in {"triton": ours, **others}.items()
    ]
    (tmp_path / "nvidia-none" / "profile.jsonl").write_text("\n".join(map(json.dumps, calls)))
    assert profiled.over_the_best_sdpa(results) == {"mssa vit-197 forward": 1.5, "mssa vit-197 backward": 0.6}
    assert profiled.stream_bytes(results) == 1.2e13  # twice two numbers read and one written, of 2 bytes, in 1 us
    said = tables._all_goals(results)
    assert "| mssa vit-197 forward, as profiled 1.50 | 0 of 1 |" in said
    assert "| mssa decode (16, 12, 8193, 128), as tuned 0.34 | 0 of 1 |" in said
    elsewhere = rows.Results(machine(gpu=True) | {"device": "NVIDIA Other"}, [])
    assert "mssa decode, 256 MB of cache and more: 1 x stream" in tables._all_goals(elsewhere)
