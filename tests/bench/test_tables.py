"""The pages say what the committed results say."""

import json
from dataclasses import replace

import pytest

from benchmarks import tables, tuning
from crate_kernels.bench import rows


@pytest.fixture(scope="module")
def committed():
    """Read the committed results once."""
    return tables.load()


@pytest.mark.parametrize("page", tables.PAGES)
def test_page_has_the_tables_of_the_results(page, committed):
    text = (tables.ROOT / page).read_text(encoding="utf-8")
    assert text == tables.rewritten(page=text, results=committed), "run python -m benchmarks.tables"


TABLES = {"cpu": tables._ON_A_CPU, "cuda": tables._ON_A_GPU}


@pytest.mark.parametrize("device", TABLES)
def test_the_readme_names_cases_that_are_timed(device):
    from crate_kernels.bench import networks
    from crate_kernels.testing import SPECS, TIMED_CASES

    timed = {(SPECS[t.case.op].package, t.case.name) for t in TIMED_CASES if device in t.devices}
    timed |= {("models", n.name) for n in networks.NETWORKS if (n.cpu_batch if device == "cpu" else n.gpu_batch)}
    assert [case for *case, _ in TABLES[device] if tuple(case) not in timed] == []


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
    """Render a table from invented results, which are in a folder of their own."""
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


def test_models_are_shown_with_and_without_graphs(tmp_path, monkeypatch):
    found = [
        row("models", "model", "crate_base", "step", name, 2 * ms / 1e3, device_seconds=[ms / 1e3])
        for name, ms in (("eager", 4), ("compile-graphed", 3), ("default", 2), ("default-graphed", 1))
    ]
    said = rendered("gpu-graphed", tmp_path, monkeypatch, True, found).splitlines()[-1]
    assert said == "| crate_base, step | bf16 | 4000 / 8000 | - | 3000 / 6000 | 2000 / 4000 | - | 1000 / 2000 |"
    assert "No GPU" in rendered("gpu-graphed", tmp_path, monkeypatch, True, found[:3])


def test_a_kernel_is_timed_by_its_last_run(tmp_path, monkeypatch):
    forward = next(kernel for kernel in tuning.KERNELS if kernel.flops)
    lines = [
        {"run": run, "workload": forward.workload, "seconds": time}
        for run, time in ((1, 1e-3), (2, 3e-3), (2, 2e-3), (2, None))
    ]
    lines += [{"run": 1, "workload": kernel.workload, "seconds": 1e-4} for kernel in tuning.KERNELS if kernel.passes]
    (tmp_path / "nvidia-none").mkdir()
    (tmp_path / "nvidia-none" / "tuning.jsonl").write_text("\n".join(map(json.dumps, lines)))
    monkeypatch.setattr(tuning, "_FOLDER", tmp_path)
    results = rows.Results(machine(gpu=True), [])
    _, _, first, second, *_ = tuning.table(results).splitlines()
    assert (
        first
        == f"| `mssa` forward | (10, 12, 4096, 64) | 2000 | 4 N² D a head | {forward.flops / 2e9:.0f} TFLOP/s | 1000 |"
    )
    assert second.startswith("| `mssa` decode | (16, 12, 8193, 64) | 100 | the cache once | 2.01 TB/s | 4.00 |")
