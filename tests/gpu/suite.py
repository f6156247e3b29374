"""The GPU suite side by side: ``python -m tests.gpu.suite --out FOLDER --seconds S --workers N``.

N processes share the tests, most informative first: what only a GPU shows before what the interpreter and the emulator
have shown, bf16 before other dtypes. Drawn tests are left out. Tests that lacked memory run again, one after another.
"""

import faulthandler
import os
import sys
import time

import pytest

from tests.gpu import lines, processes

# A file that cannot be imported stops no other.
OPTIONS = ("-q", "-p", "no:cacheprovider", "-m", "", "--continue-on-collection-errors")
LIMIT = 150  # seconds per test, compilation included; then its process ends
FILES = (
    "test_gpu.py",
    "test_public.py",
    "test_outputs.py",
    "test_dropout.py",
    "test_contract.py",
    "test_cache.py",
    "test_triton.py",
)
DTYPES = ("bfloat16", "bf16")
DRY = ("tests/ops/ista/test_gpu.py", "triton and never_waits")


def worth(name):
    """Return the sort key of a test's id; equal keys keep pytest's order."""
    path, _, test = name.partition("::")
    file = path.rpartition("/")[2]
    rank = FILES.index(file) if file in FILES else len(FILES)
    return rank, not any(dtype in test for dtype in DTYPES)


def is_drawn(item):
    """Return whether a test draws its calls, which is done at leisure and without a GPU."""
    return getattr(item.obj, "is_hypothesis_test", False)


def usable():
    """Return whether the device still works: after an invalid address every further call of the process fails."""
    import torch

    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


class Worker:
    """A pytest plugin that runs one process's tests, appends each result to the common file, and stops in time."""

    def __init__(self, path, index, count, seconds, alone=False):
        self.file, self.index, self.count, self.alone = path, index, count, alone
        self.stop_at = time.monotonic() + seconds
        self.left, self.broken = 0, False

    def pytest_collectreport(self, report):
        self.broken |= report.failed

    @pytest.hookimpl(trylast=True)  # after -k has chosen
    def pytest_collection_modifyitems(self, config, items):
        before = {name: line["outcome"] for name, line in lines.results(self.file).items()}
        wanted = ("memory",) if self.alone else (None, "skipped")  # what was missing may be there now
        every = sorted((item for item in items if not is_drawn(item)), key=lambda item: worth(item.nodeid))
        chosen = [item for item in every[self.index - 1 :: self.count] if before.get(item.nodeid) in wanted]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen
        self.left = len(chosen)

    def pytest_runtest_protocol(self, item, nextitem):
        if time.monotonic() > self.stop_at:
            item.session.shouldstop = "time is up"
            return True
        return None

    def pytest_runtest_logstart(self, nodeid, location):
        lines.append(self.file, item=nodeid, outcome="started")
        faulthandler.dump_traceback_later(LIMIT, exit=True, file=sys.__stderr__)

    def pytest_runtest_logreport(self, report):
        if report.when != "call" and report.outcome == "passed":
            return
        test = {"outcome": report.outcome, "seconds": round(report.duration, 3)}
        if report.outcome == "failed":
            test["error"] = report.longreprtext[-4000:]
        elif report.outcome == "skipped":
            test["reason"] = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        self.save(report.nodeid, test)

    def save(self, nodeid, test):
        lacks_memory = not self.alone and test["outcome"] == "failed" and "OutOfMemoryError" in test["error"]
        lines.append(self.file, item=nodeid, **(test | {"outcome": "memory"} if lacks_memory else test))
        if test["outcome"] == "failed" and not usable():
            os._exit(70)

    def pytest_runtest_logfinish(self, nodeid, location):
        faulthandler.cancel_dump_traceback_later()
        self.left -= 1


def work(path, index, count, seconds, dry_run, alone):
    """Run one process's tests in this process and return the exit status."""
    worker = Worker(path, index, count, seconds, alone)
    folder, select = DRY if dry_run else ("tests/ops", "triton or cpp-cuda")
    os.chdir(processes.ROOT)
    status = pytest.main([*OPTIONS, "-k", select, folder], plugins=[worker])
    ended = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED)
    if worker.broken or status not in (*ended, pytest.ExitCode.NO_TESTS_COLLECTED):
        return processes.BROKEN
    return processes.INCOMPLETE if worker.left > 0 else processes.DONE


def main(argv=None):
    parser = processes.parser(__doc__)
    parser.add_argument("--alone", action="store_true", help="only tests that lacked memory")
    args = parser.parse_args(argv)
    path, deadline = args.out / "suite.jsonl", time.monotonic() + args.seconds
    if args.worker is not None:
        return work(path, args.worker, args.workers, args.seconds, args.dry_run, args.alone)
    statuses = [processes.shared("suite", args, deadline)]
    if any(line["outcome"] == "memory" for line in lines.results(path).values()):
        args.workers = 1
        statuses.append(processes.shared("suite", args, deadline, ["--alone"]))
    return processes.finished(path, *statuses)


if __name__ == "__main__":
    sys.exit(main())
