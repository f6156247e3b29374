"""Runs processes side by side until a deadline; one that dies is started again and resumes after what killed it."""

import argparse
import os
import signal
import subprocess
import time
from pathlib import Path

from tests.gpu import lines
from tests.tools import bound

ROOT = Path(__file__).resolve().parents[2]
# Exit statuses of what ends by itself. INCOMPLETE: time was up. BROKEN: some items could not even begin, as if a file
# of tests cannot be imported. 1 is that of an exception, or of an item that hangs.
DONE, INCOMPLETE, FAILED, BROKEN = 0, 3, 4, 5
MAX_STARTS = 12  # of one process
GRACE = 15.0  # seconds after the deadline; what knows the deadline ends before


def parser(description):
    """Return the parser of a part of the run, with the options of every part."""
    found = argparse.ArgumentParser(description=description)
    found.add_argument("--out", type=Path, required=True)
    found.add_argument("--seconds", type=float, required=True, help="beyond them, nothing is begun")
    found.add_argument("--workers", type=int, default=1)
    found.add_argument("--worker", type=int, help="be this process of the workers, from 1")
    found.add_argument("--dry-run", action="store_true")
    return found


def worst(statuses):
    """Return BROKEN if one of the statuses is, else INCOMPLETE, else FAILED, else DONE."""
    return next((status for status in (BROKEN, INCOMPLETE, FAILED) if status in statuses), DONE)


def start(arguments, environment=None, apart=False):
    """Start this Python, which ends with this process; ``apart`` in a separate group, as ``end`` takes it."""
    return subprocess.Popen(
        bound.command(*arguments), cwd=ROOT, env={**os.environ, **(environment or {})}, start_new_session=apart
    )


def end(process):
    """End a process and its group, if it has one."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        process.kill()
    process.wait()


def side_by_side(commands, deadline, start, grace=GRACE):
    """Run commands at the same time; return the worst of their exit statuses.

    Args:
        commands: take the seconds left and return the arguments of a process.
        deadline: of ``time.monotonic``. A process still running ``grace`` seconds later is ended.
        start: starts a process.
        grace: seconds.
    """

    def started(index):
        return start(commands[index](max(round(deadline - time.monotonic(), 1), 0.0)))

    running = {index: started(index) for index in range(len(commands))}
    starts, statuses = dict.fromkeys(running, 1), {}
    try:
        while running:
            for index, process in list(running.items()):
                status = process.poll()
                if status is None:
                    continue
                end(process)
                del running[index]
                died = status not in (DONE, FAILED, INCOMPLETE, BROKEN)
                if died and time.monotonic() < deadline and starts[index] < MAX_STARTS:
                    starts[index] += 1
                    running[index] = started(index)
                else:
                    statuses[index] = BROKEN if died else status
            if running and time.monotonic() > deadline + grace:
                statuses |= dict.fromkeys(running, INCOMPLETE)
                break
            time.sleep(0.05)
    finally:
        for process in running.values():
            end(process)
    return worst(statuses.values())


def shared(part, args, deadline, options=(), start=start, grace=GRACE):
    """Have workers share the items of a part; return the worst of their exit statuses."""
    same = ["-m", f"tests.gpu.{part}", "--out", args.out, "--workers", args.workers, *options]
    same += ["--dry-run"] if args.dry_run else []
    commands = [lambda left, n=n: [*same, "--seconds", left, "--worker", n] for n in range(1, args.workers + 1)]
    return side_by_side(commands, deadline, start, grace)


def finished(path, *statuses):
    """Return the exit status of a part: the worst of those of its processes and of its results."""
    failed = any(line["outcome"] in ("failed", "lost") for line in lines.results(path).values())
    return worst([*statuses, FAILED if failed else DONE])
