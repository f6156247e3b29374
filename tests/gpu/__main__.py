"""The GPU suite, in shards: ``python -m tests.gpu --shard 1/3``. It needs PyTorch, NumPy and pytest 9, nothing else.

It tests Triton's kernels where Triton is, and those in CUDA C++ where NVRTC is. The C++ extension, which repeats later
calls, is compiled first, once, where a C++ compiler and the package ninja are.
A shard ends by itself before its time is up and says what is left; running it again goes on from there. Every result
is in the JSON file the moment it is known. ``--dry-run`` runs the same tests in Triton's interpreter, on tiny shapes.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INCOMPLETE = 3  # exit status: nothing failed, but time was up
# A file that cannot be imported stops no other.
OPTIONS = ("-q", "-p", "no:cacheprovider", "-m", "", "--continue-on-collection-errors")


def parse(argv):
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--shard", default="1/1", help="I/N: the I-th of N parts, 1/1 by default")
    parser.add_argument("--minutes", type=float, default=8.0, help="stop before so much time has passed; 8 by default")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "test-gpu", help="folder of the JSON files")
    parser.add_argument("--dry-run", action="store_true", help="interpret tiny shapes on the CPU")
    parser.add_argument("--again", action="store_true", help="forget earlier results instead of going on from them")
    parser.add_argument("-k", default="", help="only tests that match, as pytest's -k")
    args = parser.parse_args(argv)
    index, _, count = args.shard.partition("/")
    if not (index.isdigit() and count.isdigit() and 1 <= int(index) <= int(count)):
        parser.error(f"--shard must be I/N with 1 <= I <= N, got {args.shard}")
    args.index, args.count = int(index), int(count)
    return args


def is_drawn(item):
    """Return whether a test draws its calls: ``make fuzz`` does that, at leisure and without a GPU."""
    return getattr(item.obj, "is_hypothesis_test", False)


class Part:
    """A pytest plugin that runs one part of the tests, gives each result to ``save`` at once and stops in time."""

    def __init__(self, index, count, seconds):
        self.index, self.count = index, count
        self.stop_at = time.monotonic() + seconds
        self.left, self.broken = 0, False

    def pytest_collectreport(self, report):
        self.broken |= report.failed

    def mine(self, items):
        """Return this part of the items, without drawn ones."""
        return [item for item in items if not is_drawn(item)][self.index - 1 :: self.count]

    def choose(self, config, items, chosen):
        """Run only the chosen items, in their order."""
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen
        self.left = len(chosen)

    def pytest_runtest_logreport(self, report):
        if report.when != "call" and report.outcome == "passed":
            return
        test = {"outcome": report.outcome, "seconds": round(report.duration, 3)}
        if report.outcome == "failed":
            test["error"] = report.longreprtext[-4000:]
        elif report.outcome == "skipped":
            test["reason"] = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        self.save(report.nodeid, test)

    def pytest_runtest_logfinish(self, nodeid, location):
        self.left -= 1

    def pytest_runtest_protocol(self, item, nextitem):
        if time.monotonic() > self.stop_at:
            item.session.shouldstop = "time is up"
            return True
        return None


class Shard(Part):
    """One of several parts, with a JSON file of its own."""

    def __init__(self, path, index, count, seconds):
        super().__init__(index, count, seconds)
        self.path = path
        self.record = json.loads(path.read_text()) if path.exists() else {"machine": machine(), "tests": {}}

    @pytest.hookimpl(trylast=True)  # after -k has chosen
    def pytest_collection_modifyitems(self, config, items):
        done = {name for name, test in self.record["tests"].items() if test["outcome"] != "failed"}
        self.choose(config, items, [item for item in self.mine(items) if item.nodeid not in done])

    def save(self, nodeid, test):
        """Write the results so far."""
        self.record["tests"][nodeid] = test
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(self.record, indent=1) + "\n")
        partial.replace(self.path)


def machine():
    """Describe the machine of the results."""
    import torch

    try:
        from triton import __version__ as triton
    except ImportError:
        triton = "none"
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none: interpreted"
    versions = {"python": platform.python_version(), "torch": torch.__version__, "triton": triton}
    return {"gpu": gpu, "git": revision(), **versions}


def revision():
    """Return the commit of these sources, or "unknown" without git or a clone."""
    try:
        git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return git.stdout.strip()


BUILD = """from crate_kernels import cli
from crate_kernels._native import extension
extension.PATH or cli.main(["build"])
"""


def build():
    """Compile the C++ extension unless one fits these sources, such as one copied along with them.

    A separate process compiles and prints the reason of a failure: the extension is found on import.
    """
    subprocess.run([sys.executable, "-c", BUILD], cwd=ROOT)


def run(args):
    """Run one shard in this process and return the exit status."""

    start = time.monotonic()
    if not args.dry_run:
        build()
    args.output.mkdir(parents=True, exist_ok=True)
    path = args.output / f"{'dry-' if args.dry_run else ''}shard-{args.index}-of-{args.count}.json"
    if args.again:
        path.unlink(missing_ok=True)
    shard = Shard(path, args.index, args.count, 60 * args.minutes - (time.monotonic() - start))
    # The dry run leaves out the operator tests: a separate pass interprets them.
    folders = [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("tests/ops/*/test_gpu.py"))]
    folders = folders if args.dry_run else ["tests/ops"]
    kernels = "triton" if args.dry_run else "(triton or cpp-cuda)"
    select = f"{kernels} and ({args.k})" if args.k else kernels
    os.chdir(ROOT)
    status = pytest.main([*OPTIONS, "-k", select, *folders], plugins=[shard])
    failed = [name for name, test in shard.record["tests"].items() if test["outcome"] == "failed"]
    print(f"test-gpu: {len(shard.record['tests'])} results in {path}, {len(failed)} failed, {shard.left} left")
    if (
        failed
        or shard.broken
        or status not in (pytest.ExitCode.OK, pytest.ExitCode.INTERRUPTED, pytest.ExitCode.NO_TESTS_COLLECTED)
    ):
        return 1
    return INCOMPLETE if shard.left else 0


def main(argv=None):
    args = parse(argv)
    if args.dry_run and os.environ.get("TRITON_INTERPRET") != "1":
        # Triton reads the variable on import, so the dry run needs a new process.
        environment = {**os.environ, "TRITON_INTERPRET": "1"}
        command = [sys.executable, "-m", "tests.gpu", *(sys.argv[1:] if argv is None else argv)]
        return subprocess.run(command, cwd=ROOT, env=environment).returncode
    return run(args)


if __name__ == "__main__":
    sys.exit(main())
