"""Steps over 1.3 times their estimate under Nsight Compute: ``python -m tests.gpu.ncu --out FOLDER --seconds S``.

An estimate is of a step, forward and backward in bf16: instructions, products and bytes counted without a GPU, at the
rates of an H100 or H200. A step that takes more is run again under ncu, where that is; its report is in FOLDER.
"""

import contextlib
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace

import torch

import crate_kernels
from crate_kernels._core import backends
from crate_kernels._triton import launch
from crate_kernels._triton.table import forced
from crate_kernels.bench import clock
from crate_kernels.ops.tssa.cuda import persistent, walking
from tests.gpu import lines, processes
from tests.ops.mssa import heads
from tests.ops.tssa import persistent as persistent_cases
from tests.ops.tssa import walking as walking_cases

OVER = 1.3
ROUNDS = 20
LIMIT = 40  # seconds of one report


@dataclass(frozen=True)
class Step:
    """A step of one operator by kernels that no table takes by default.

    Attributes:
        shape: of the tokens.
        micros: the estimate.
        kernels: a regular expression of their names.
        tables: what launch tables hold where tuning found them faster.
    """

    op: str
    backend: str
    shape: tuple[int, ...]
    micros: float
    kernels: str
    tables: dict = field(hash=False)
    options: dict = field(default_factory=dict, hash=False)


_PERSISTENT = dict.fromkeys((persistent.FORWARD, persistent.BACKWARD), persistent_cases.AHEAD)
_WALKING = {walking.FORWARD: walking_cases.EIGHT, walking.BACKWARD: walking_cases.BACK}
STEPS = {
    "heads": Step("mssa", "cpp", (256, 12, 197, 64), 260, "head_", heads.Heads.forced),
    "rows of 64": Step("mssa", "cpp", (8, 4, 16384, 64), 14_200, "long_", heads.LongRows.forced),
    "rows of 128": Step("mssa", "cpp", (16, 4, 4096, 128), 3_090, "long_", heads.LongRows.forced),
    "pairs of 128, causal": Step(
        "mssa", "cpp", (4, 4, 16384, 128), 6_300, "long_", heads.LongPairs.forced, {"causal": True}
    ),
    "persistent": Step("tssa", "cpp", (256, 8, 196, 48), 67, "persistent", _PERSISTENT),
    "walking": Step("tssa", "cpp", (32, 12, 1024, 64), 170, "walking", _WALKING, {"causal": True}),
}
DRY = {"persistent": replace(STEPS["persistent"], backend="composite", shape=(1, 2, 16, 16), micros=1e-3)}


def prepared(step, device, dtype):
    """Return a call of the step that allocates its results alone."""
    w = torch.randn(step.shape, device=device).to(dtype).requires_grad_()
    dout = torch.randn(step.shape, device=device).to(dtype)
    temp = [torch.ones(step.shape[1], 1, device=device)] if step.op == "tssa" else []

    def call():
        out = getattr(crate_kernels, step.op)(w, *temp, backend=step.backend, **step.options)
        return torch.autograd.grad(out, w, dout)

    return call


@contextlib.contextmanager
def taken(step):
    """Let the step's kernels be taken."""
    with contextlib.ExitStack() as stack:
        for table, config in step.tables.items():
            stack.enter_context(forced(table, config))
        yield


def once(name):
    """Run a step twice on the GPU: what ncu watches."""
    with taken(STEPS[name]):
        call = prepared(STEPS[name], "cuda", torch.bfloat16)
        for _ in range(2):
            call()
        torch.cuda.synchronize()


def command(tool, name):
    """Return the command that has a step's kernels watched."""
    watched = [tool, "--set", "detailed", "--kernel-name", f"regex:{STEPS[name].kernels}", "--launch-count", "4"]
    return [*watched, sys.executable, "-c", f"from tests.gpu import ncu; ncu.once({name!r})"]


def report(name, folder):
    """Write what ncu says of a step; return the file's name, or why there is none."""
    tool = shutil.which("ncu") or shutil.which("/usr/local/cuda/bin/ncu")
    if tool is None:
        return "ncu is not there"
    path = folder / f"ncu-{name.replace(' ', '-').replace(',', '')}.txt"
    try:
        done = subprocess.run(command(tool, name), cwd=processes.ROOT, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return f"ncu took more than {LIMIT} s"
    path.write_text(done.stdout + done.stderr)
    return path.name


def judged(name, step, seconds, folder):
    """Return the fields of a step's line: its time over the estimate, and the report where that is too much."""
    ratio = 1e6 * seconds / step.micros
    found = {"micros": round(1e6 * seconds, 1), "estimate": step.micros, "ratio": round(ratio, 2)}
    return found | ({"report": report(name, folder)} if ratio > OVER else {})


def timed(step, device, dtype):
    """Return the median seconds of a step on the device; on a CPU, of the host."""
    with taken(step):
        call = prepared(step, device, dtype)
        times = clock.device_seconds(call, tuple, device, ROUNDS) or clock.host_seconds(call, tuple, device, 0.01)
    return statistics.median(times)


def run(folder, deadline, dry_run):
    """Add a line for every step; return the exit status."""
    device, dtype = (torch.device("cpu"), torch.float32) if dry_run else (torch.device("cuda"), torch.bfloat16)
    path, steps = folder / "ncu.jsonl", DRY if dry_run else STEPS
    before = lines.results(path)
    for name, step in steps.items():
        if name in before:
            continue
        if time.monotonic() > deadline:
            return processes.INCOMPLETE
        reason = backends.unavailable_reason(step.op, step.backend, device)
        if not dry_run and launch.arch(device) != "sm_90":
            reason = "these kernels are for sm_90a"
        if reason is not None:
            lines.append(path, item=name, outcome="skipped", reason=reason)
            continue
        lines.append(path, item=name, outcome="started")
        lines.append(path, item=name, outcome="timed", **judged(name, step, timed(step, device, dtype), folder))
    return processes.DONE


def main(argv=None):
    args = processes.parser(__doc__).parse_args(argv)  # of the workers, none: steps are timed alone
    args.out.mkdir(parents=True, exist_ok=True)
    return run(args.out, time.monotonic() + args.seconds, args.dry_run)


if __name__ == "__main__":
    sys.exit(main())
