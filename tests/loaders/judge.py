"""One mutated folder, drawn from a seed, and what comes of loading it."""

import json
import random
import re
import resource
import shutil
import signal
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from crate_kernels import models
from crate_kernels.experiments.common import fit
from tests.loaders import mutations
from tests.loaders.training import training

MAX_SECONDS = 10  # of the processor; and ten times as long on the clock
MAX_BYTES = 384 << 20  # of address space, beyond what the process has; the largest text that is parsed has 8 MiB


class Verdict(NamedTuple):
    """What came of a folder: "loaded", "refused", or "failed"; and why."""

    status: str
    why: str


def judge(seed, folders, scratch):
    """Corrupt a copy of one of the folders, the last of which is a checkpoint, and load it."""
    rng = random.Random(seed)
    folder, done = corrupted(rng, folders, scratch / "drawn" / "folder")
    load = _resume if folder.name == "checkpoint" else _from_pretrained
    try:
        with _bounded():
            load(scratch / "drawn" / "folder")
    except fit.Unusable as error:
        return _refused(error, folder, done, r"small\.checkpoint")
    except (ValueError, TypeError, FileNotFoundError) as error:
        if str(error).startswith("from_pretrained: "):
            return _refused(error, folder, done, "drawn/folder")
        return Verdict("failed", f"{folder.name} {done}: {error!r}")
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return Verdict("failed", f"{folder.name} {done}: {error!r:.300}")
    return Verdict("loaded", f"{folder.name} {done}")


def corrupted(rng, folders, place):
    """Copy one of the folders to ``place`` and corrupt it; return the original, and what was done."""
    folder = rng.choice(folders)
    shutil.rmtree(place.parent, ignore_errors=True)
    shutil.copytree(folder, place)
    done = []
    for path in rng.sample(
        sorted(place.iterdir()), 1 if rng.random() < 0.8 else 2 if len(list(place.iterdir())) > 1 else 1
    ):
        own = mutations.JSON if path.suffix == ".json" else mutations.TENSORS
        mutate = rng.choice((*mutations.ANY, *own, *own))
        mutate(rng, path)
        done.append(f"{mutate.__name__} {path.name}")
    return folder, ", ".join(done)


def _from_pretrained(folder):
    model = models.from_pretrained(folder)
    wanted = json.loads(re.sub(r"^\ufeff", "", (folder / "config.json").read_text()))
    assert wanted["model_type"] == type(model).__name__
    assert all(not t.is_meta for t in model.state_dict().values())


def _resume(folder):
    resumed = training()
    before = [p.clone() for p in resumed.model.parameters()]
    try:
        resumed_at = fit.resume(resumed, folder)
    except fit.Unusable:
        assert all(torch.equal(a, b) for a, b in zip(before, resumed.model.parameters(), strict=True))
        assert resumed.losses == []
        raise
    if resumed_at:
        resumed.step()


def _refused(error, folder, done, named):
    """Require a message that names the file or what does not fit."""
    if not re.search(named, str(error)):
        return Verdict("failed", f"{folder.name} {done}: the message names no file: {error}")
    return Verdict("refused", f"{folder.name} {done}: {error!s:.200}")


@contextmanager
def _bounded():
    """Limit time and address space of a block."""

    def late(*_):
        raise TimeoutError(f"more than {MAX_SECONDS} s")

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    clocks = {
        signal.SIGPROF: (signal.ITIMER_PROF, MAX_SECONDS),
        signal.SIGALRM: (signal.ITIMER_REAL, 10 * MAX_SECONDS),
    }
    before = {number: signal.signal(number, late) for number in clocks}
    for clock, seconds in clocks.values():
        signal.setitimer(clock, seconds)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MAX_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        for number, (clock, _) in clocks.items():
            signal.setitimer(clock, 0)
            signal.signal(number, before[number])
