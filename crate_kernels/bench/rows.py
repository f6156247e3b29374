"""Rows of results, and their files."""

from __future__ import annotations

import json
import math
import platform
import statistics
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from crate_kernels import __version__
from crate_kernels._core import files
from crate_kernels.bench import clock

# The device's own time; of a call in a loop from Python that is synchronised at its end; of calls one by one.
CLOCKS = ("device", "loop", "calls")
# Rows of providers that were timed interleaved, with cold caches.
INTERLEAVED = "interleaved"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_GROUP = attrgetter("bench", "sweep", "op", "case", "dtype", "direction")


@dataclass
class BenchRow:
    """One provider on one case, dtype and direction, or why it has no time.

    Attributes:
        bench: "mssa", "tssa", "ista", "decode", "models", "generation", "scaling", "interleaved" or "threads".
        op, case, layer, shape, options: the computation.
        sweep: the size varied in a row of "scaling"; else "".
        seconds: times of single calls on the host, synchronised one by one.
        loop_seconds: times of one call in loops that are synchronised at their end only; empty in earlier results.
        device_seconds: times by events on the device, with cold caches; empty on a CPU.
        error, times_eager, share: as in the gate's ``Verdict``.
        flops, bytes: the minimum work, for TFLOP/s and GB/s; None if meaningless.
        peak_bytes: peak bytes of tensors, less the bytes before the call.
        resident_bytes: peak rise of the process's resident memory.
        unit, amount: results per call (tokens, images), for rates; else "" and 0.
        load: load average of the machine after samples that were interleaved; else None.
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
    loop_seconds: list[float] = field(default_factory=list)
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
    load: float | None = None
    skipped: str = ""

    @property
    def group(self) -> tuple[str, ...]:
        """The key that rows comparable with this one share."""
        return _GROUP(self)

    @property
    def key(self) -> str:
        """The name of a row, unique in a file."""
        return "/".join((*filter(None, self.group), self.provider))

    @property
    def times(self) -> list[float]:
        """Times on the device if there are any, else on the host."""
        return self.device_seconds or self.seconds

    @property
    def median(self) -> float:
        """Median of ``times``; nan without times."""
        return statistics.median(self.times) if self.times else float("nan")

    @property
    def time(self) -> float:
        """Time for tables and figures: the device's median, or the host's minimum; nan without times.

        Other work on the host, or on a shared machine, lasts longer than a row and only adds time. Providers that were
        timed interleaved share it, so theirs is the median.
        """
        return self._typical(self.times)

    def samples(self, clock: str) -> list[float]:
        """Return the samples of one of ``CLOCKS``."""
        return {"device": self.device_seconds, "loop": self.loop_seconds, "calls": self.seconds}[clock]

    def on(self, clock: str) -> float:
        """Return the time by one of ``CLOCKS``, as ``time`` takes it from samples; nan without any."""
        return self._typical(self.samples(clock))

    def _typical(self, samples: list[float]) -> float:
        interleaved = self.bench in (INTERLEAVED, "threads")
        typical = statistics.median if self.device_seconds or interleaved else min
        return typical(samples) if samples else math.nan

    def percentile(self, percent: int) -> float:
        """Return a percentile of ``times``."""
        times = sorted(self.times)
        return times[round((len(times) - 1) * percent / 100)] if times else float("nan")


@dataclass
class Results:
    """The rows of one machine, and its description."""

    machine: dict[str, Any]
    rows: list[BenchRow]

    def find(self, **wanted: Any) -> list[BenchRow]:
        """Return the rows whose fields have these values."""
        if not wanted:
            return list(self.rows)
        fields = attrgetter(*wanted)
        values = fields(SimpleNamespace(**wanted))
        return [row for row in self.rows if fields(row) == values]

    def by(self, clock: str) -> Results:
        """Return the rows that one of ``CLOCKS`` has timed, each with that time alone."""
        timed = [row for row in self.rows if row.samples(clock)]
        alone = {"loop_seconds": [], "device_seconds": []}
        return Results(self.machine, [replace(row, seconds=[row.on(clock)], **alone) for row in timed])

    def clocks(self, **wanted: Any) -> list[str]:
        """List the clocks that have timed some row with these values."""
        found = self.find(**wanted)
        return [clock for clock in CLOCKS if any(row.samples(clock) for row in found)]

    def in_group(self, row: BenchRow) -> dict[str, BenchRow]:
        """Return the rows comparable with ``row``, and ``row`` itself, by provider."""
        group = row.group
        return {other.provider: other for other in self.rows if _GROUP(other) == group}

    def best(self, row: BenchRow) -> BenchRow | None:
        """Return the row of the backend that ``backend=None`` chooses, in the group of ``row``."""
        beside = self.in_group(row)
        names = ("default", "triton", "cpp", "composite")
        return next((beside[name] for name in names if name in beside and beside[name].times), None)

    def speedups(self, row: BenchRow) -> dict[str, float]:
        """Return the time of each other provider as a multiple of the time of ``row``."""
        others = self.in_group(row).values()
        return {o.provider: o.time / row.time for o in others if o.provider != row.provider and o.times}


def facts(row: BenchRow, results: Results) -> dict[str, Any]:
    """Derive the printed facts of a row: rates, shares of this machine's rates, percentiles, speed-ups."""
    if not row.times:
        return {"skipped": row.skipped}
    found: dict[str, Any] = {
        "min_us": 1e6 * min(row.times),
        "median_us": 1e6 * row.median,
        "p20_us": 1e6 * row.percentile(20),
        "p80_us": 1e6 * row.percentile(80),
        "error": row.error,
        "error_over_eager": row.times_eager,
        "error_over_tolerance": row.share,
        "peak_mib": None if row.peak_bytes is None else row.peak_bytes / 2**20,
    }
    found |= {f"{clock}_us": 1e6 * row.on(clock) for clock in CLOCKS if row.samples(clock)}
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
    """Describe this machine, and measure its product and copy rates."""
    return {
        "device": device_name(device),
        "gpu": device.type == "cuda",
        "processor": _processor(),
        "torch": torch.__version__,
        "triton": installed("triton"),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "crate_kernels": __version__,
        "git": _revision(),
        "product_flops": {name: clock.product_flops(DTYPES[name], device) for name in dtypes},
        "copy_bytes": clock.copy_bytes(device),
    }


def pool(machine: dict[str, Any], earlier: dict[str, Any]) -> None:
    """Add the commits of earlier runs to a machine's description, and their rates where these were higher."""
    commits = [commit for found in (earlier, machine) for commit in (found.get("git") or "").split(", ")]
    machine["git"] = ", ".join(dict.fromkeys(filter(None, commits)))
    machine["copy_bytes"] = max(machine["copy_bytes"], earlier.get("copy_bytes", 0.0))
    rates = earlier.get("product_flops", {})
    machine["product_flops"] = {
        name: max(rate, rates.get(name, 0.0)) for name, rate in machine["product_flops"].items()
    }


def device_name(device: torch.device) -> str:
    """Name a device for people."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def installed(package: str) -> str | None:
    """Return the version of a package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _revision() -> str | None:
    """Return the commit of the source tree, with a plus sign if the tree has changes; None outside a clone."""
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
    """Write results atomically, one line per row so that diffs are readable."""
    rows = ",\n  ".join(json.dumps(_compact(asdict(row))) for row in results.rows)
    text = f'{{\n "machine": {json.dumps(_compact(results.machine))},\n "rows": [\n  {rows}\n ]\n}}\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    files.put(path, text.encode())


def read(path: Path) -> Results:
    """Read a file of ``write``.

    Raises:
        ValueError: the file is no such file.
    """
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
        return Results(loaded["machine"], [BenchRow(**row) for row in loaded["rows"]])
    except (json.JSONDecodeError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no file of benchmark results ({error})") from None


def read_all(paths: Sequence[Path]) -> Results:
    """Read the shards of one device's results as one; the first shard describes the machine.

    Raises:
        ValueError: a file has no results, or is of another device, or there are no files.
    """
    every = [read(path) for path in paths]
    if not every:
        raise ValueError("no file of benchmark results was given")
    for path, results in zip(paths, every, strict=True):
        if results.machine["device"] != every[0].machine["device"]:
            raise ValueError(f"{path} is of {results.machine['device']}, {paths[0]} of {every[0].machine['device']}")
    return Results(every[0].machine, [row for results in every for row in results.rows])


def _compact(value: Any) -> Any:
    """Drop empty values, and digits beyond the fifth: times are not more precise."""
    if isinstance(value, dict):
        return {k: _compact(v) for k, v in value.items() if v not in (None, "", [], {})}
    if isinstance(value, list):
        return [_compact(v) for v in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value
