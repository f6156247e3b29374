"""Rows of results, and the files that they are kept in."""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from crate_kernels import __version__
from crate_kernels._core import files
from crate_kernels.bench import clock

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Row:
    """One provider on one case, dtype and direction, or why it has no time.

    Attributes:
        bench: "mssa", "tssa", "ista", "decode", "models", "generation" or "scaling".
        op, case, layer, shape, options: what was computed.
        sweep: which size a row of "scaling" belongs to the sweep of; else "".
        seconds: times of single calls on the host, synchronised.
        device_seconds: the same by events on the device, caches cold; empty on a CPU.
        error, times_eager, share: what the gate found.
        flops, bytes: the least work, for TFLOP/s and GB/s; None where it means nothing.
        peak_bytes: the most that tensors held beyond what they held before; resident_bytes: the process's.
        unit, amount: what a call makes (tokens, images), for rates; else "" and 0.
        skipped: why there is no time; else "".
    """

    bench: str
    op: str
    case: str
    dtype: str
    direction: str
    provider: str
    layer: str = ""
    shape: list[int] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    sweep: str = ""
    seconds: list[float] = field(default_factory=list)
    device_seconds: list[float] = field(default_factory=list)
    error: float | None = None
    times_eager: float | None = None
    share: float | None = None
    flops: float | None = None
    bytes: float | None = None
    peak_bytes: int | None = None
    resident_bytes: int | None = None
    unit: str = ""
    amount: float = 0.0
    skipped: str = ""

    @property
    def group(self) -> tuple[str, ...]:
        """What the rows that compare with this one share."""
        return (self.bench, self.sweep, self.op, self.case, self.dtype, self.direction)

    @property
    def key(self) -> str:
        """The name of a row, unique in a file."""
        return "/".join((*filter(None, self.group), self.provider))

    @property
    def times(self) -> list[float]:
        """The device's own times where there are any, else the host's."""
        return self.device_seconds or self.seconds

    @property
    def median(self) -> float:
        """Median of ``times``; nan without any."""
        return statistics.median(self.times) if self.times else float("nan")

    @property
    def time(self) -> float:
        """What tables and figures show: the device's median, or the least of the host's; nan without any.

        What else a host does, or its neighbours on a shared machine, lasts longer than a row and only adds.
        """
        return self.median if self.device_seconds or not self.seconds else min(self.seconds)

    def percentile(self, percent: int) -> float:
        """Return a percentile of ``times``."""
        times = sorted(self.times)
        return times[round((len(times) - 1) * percent / 100)] if times else float("nan")


@dataclass
class Results:
    """The rows of one machine, and what it is."""

    machine: dict[str, Any]
    rows: list[Row]

    def find(self, **wanted: Any) -> list[Row]:
        """Return the rows whose fields have these values."""
        return [row for row in self.rows if all(getattr(row, name) == value for name, value in wanted.items())]

    def in_group(self, row: Row) -> dict[str, Row]:
        """Return the rows beside ``row``, itself among them, by provider."""
        return {other.provider: other for other in self.rows if other.group == row.group}

    def best(self, row: Row) -> Row | None:
        """Return the row of the backend that ``backend=None`` takes, among those beside ``row``."""
        beside = self.in_group(row)
        names = ("default", "triton", "cpp", "composite")
        return next((beside[name] for name in names if name in beside and beside[name].times), None)

    def speedups(self, row: Row) -> dict[str, float]:
        """Return how many times as long each other provider takes as ``row`` does."""
        others = self.in_group(row).values()
        return {o.provider: o.time / row.time for o in others if o.provider != row.provider and o.times}


def facts(row: Row, results: Results) -> dict[str, Any]:
    """Derive what is printed beside a row: rates, shares of what this machine reaches, percentiles, speed-ups."""
    if not row.times:
        return {"skipped": row.skipped}
    found: dict[str, Any] = {
        "least_us": 1e6 * min(row.times),
        "median_us": 1e6 * row.median,
        "p20_us": 1e6 * row.percentile(20),
        "p80_us": 1e6 * row.percentile(80),
        "error": row.error,
        "error_over_eager": row.times_eager,
        "error_over_budget": row.share,
        "peak_mib": None if row.peak_bytes is None else row.peak_bytes / 2**20,
    }
    if row.flops:
        found["tflops"] = row.flops / row.time / 1e12
        found["percent_of_product"] = 100 * row.flops / row.time / results.machine["product_flops"][row.dtype]
    if row.bytes:
        found["gb_per_s"] = row.bytes / row.time / 1e9
        found["percent_of_copy"] = 100 * row.bytes / row.time / results.machine["copy_bytes"]
    if row.unit:
        found[f"{row.unit}_per_s"] = row.amount / row.time
    return found | {f"speedup_over_{name}": ratio for name, ratio in sorted(results.speedups(row).items())}


def machine(device: torch.device, dtypes: Iterable[str]) -> dict[str, Any]:
    """Say where the numbers come from, and measure its product and copy rates."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{platform.machine()} CPU, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    return {
        "device": name,
        "gpu": device.type == "cuda",
        "processor": _processor(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "crate_kernels": __version__,
        "git": _revision(),
        "product_flops": {name: clock.product_flops(DTYPES[name], device) for name in dtypes},
        "copy_bytes": clock.copy_bytes(device),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _revision() -> str | None:
    """Return the commit of the source tree, with a plus sign where it has changed since; None outside a clone."""
    folder = Path(__file__).parent
    try:
        sha = subprocess.run(
            ["git", "-C", folder, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        )
        clean = subprocess.run(["git", "-C", folder, "diff", "--quiet", "HEAD"], capture_output=True).returncode == 0
    except (OSError, subprocess.CalledProcessError):
        return None
    return sha.stdout.strip() + ("" if clean else "+")


def write(path: Path, results: Results) -> None:
    """Write results, a line a row so that versions of a file compare, in one move."""
    rows = ",\n  ".join(json.dumps(_short(asdict(row))) for row in results.rows)
    text = f'{{\n "machine": {json.dumps(_short(results.machine))},\n "rows": [\n  {rows}\n ]\n}}\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    files.put(path, text.encode())


def read(path: Path) -> Results:
    """Read what ``write`` wrote.

    Raises:
        ValueError: the file is none of these.
    """
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
        return Results(loaded["machine"], [Row(**row) for row in loaded["rows"]])
    except (json.JSONDecodeError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no file of benchmark results ({error})") from None


def read_all(paths: Sequence[Path]) -> Results:
    """Read the shards of one device's results as one; the first says what the machine is.

    Raises:
        ValueError: a file is no results, or of another device, or there is none.
    """
    every = [read(path) for path in paths]
    if not every:
        raise ValueError("no file of benchmark results was given")
    for path, results in zip(paths, every, strict=True):
        if results.machine["device"] != every[0].machine["device"]:
            raise ValueError(f"{path} is of {results.machine['device']}, {paths[0]} of {every[0].machine['device']}")
    return Results(every[0].machine, [row for results in every for row in results.rows])


def _short(value: Any) -> Any:
    """Drop what is empty and digits beyond the fifth: times do not have more."""
    if isinstance(value, dict):
        return {k: _short(v) for k, v in value.items() if v not in (None, "", [], {})}
    if isinstance(value, list):
        return [_short(v) for v in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value
