"""The training examples on the meshes that a group has: the losses of one process, step by step; their checkpoints."""

import contextlib
import functools
import io
import itertools
import json
import re
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from crate_kernels import models

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "examples"))  # as when one of them runs

import train_language  # noqa: E402
import train_vision  # noqa: E402
from training import checkpoints, figures, loop, processes  # noqa: E402
from training import folder as run_folder  # noqa: E402

from crate_kernels._core import files  # noqa: E402

train_vision.Digits = functools.cache(train_vision.Digits)  # a table of text, which is read once
processes.init_device_mesh = functools.cache(processes.init_device_mesh)  # groups, whose threads wake all the time

SHORT = ["--steps=4", "--schedule=6", "--warmup=1", "--clip=0.5", "--save-every=2", "--batch=12", "--peak=1"]
TEXT = [f"--text={ROOT / 'LICENSE'}", "--layers=2", "--heads=12", "--width=24", "--context=7", *SHORT]
DIGITS = ["--depth=2", "--heads=12", "--head-width=2", "--width=12", "--smoothing=0", *SHORT, "--batch=48"]
CPU = torch.device("cpu")


def options(example, *more):
    return example.options([*(TEXT if example is train_language else DIGITS), "--dtype=float64", *more])


def batches(example, args, data):
    """What one process learns from."""
    if example is train_language:
        return (data.drawn(args.batch, args.seed * 1_000_003 + step, slice(None)) for step in itertools.count())
    places = train_vision.Places(len(data), args, 0, slice(None))
    return (tuple(torch.stack(part) for part in zip(*map(data.__getitem__, each), strict=True)) for each in places)


def expected(example, args):
    """Losses and norms of gradients of a plain loop on the model as it is built, without any of the processes."""
    if example is train_language:
        data = train_language.Text(args.text, args.vocab, args.context)
        model = train_language.build(args).double()
    else:
        data = train_vision.Digits()
        model = train_vision.build(args, data).double()
    optimiser = torch.optim.AdamW(model.parameter_groups(args.decay), lr=1.0, betas=(0.9, 0.95))
    drawn, lines = batches(example, args, data), []
    for step in range(args.steps):
        for group in optimiser.param_groups:
            group["lr"] = loop.rate(args, step)
        batch, targets = next(drawn)
        if example is train_language:
            loss = model(batch, targets)[1]
        else:
            loss = nn.functional.cross_entropy(model(batch.double()), targets)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimiser.step()
        optimiser.zero_grad()
        lines.append((loss.item(), norm.item()))
    return lines, model


class shared_folder:
    """A folder that all processes of the run see."""

    def __enter__(self):
        names = [tempfile.mkdtemp() if processes.is_first() else None]
        dist.broadcast_object_list(names)
        self.path = Path(names[0])
        return self.path

    def __exit__(self, *_):
        dist.barrier()
        if processes.is_first():
            shutil.rmtree(self.path)


def trained(example, folder, args, **mesh):
    """Train, and return the lines of the metrics."""
    args.out = folder
    loop.run(args, example.prepare(args, processes.placed(CPU, args.batch, **mesh)))
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def as_one(example, *more, **mesh):
    """A run over all processes; ``mesh`` says how many share a text or a layer, "all" for all."""

    def run(group):
        mesh_of = {name: dist.get_world_size() if size == "all" else size for name, size in mesh.items()}
        args = options(example, *more)
        lines, model = expected(example, args)
        with shared_folder() as folder:
            together = trained(example, folder, args, **mesh_of)
            for number, name in enumerate(("loss", "gradient_norm")):
                actual, wanted = [line[name] for line in together], [line[number] for line in lines]
                assert actual == pytest.approx(wanted, rel=1e-11), f"{name} {actual}, of one process {wanted}"
            same_model(folder / "model", model)

    return run


def same_model(folder, expected):
    saved = models.from_pretrained(folder).state_dict()  # in float32
    for name, weight in expected.state_dict().items():
        torch.testing.assert_close(saved[name], weight.float(), rtol=1.3e-7, atol=1e-30, msg=name)


def damaged(group):
    """A checkpoint that is not as it was written is refused, by all processes, and the one before it used."""
    args = options(train_language)
    with shared_folder() as folder:
        before = trained(train_language, folder, args)
        assert checkpoints.newest(folder) == 4
        (last, first) = (folder / f"step-{step}" for step in (4, 2))
        part = sorted(last.glob("*.safetensors"))[-1]
        whole, marks = part.read_bytes(), (last / checkpoints.LIST).read_bytes()
        flipped = bytearray(whole)
        flipped[len(whole) // 2] ^= 1
        for path, content in (
            (part, whole[:-1]),
            (part, bytes(flipped)),
            (part, None),
            (last / checkpoints.LIST, None),
            (last / checkpoints.LIST, marks[:20]),
        ):
            kept = path.read_bytes()
            dist.barrier()
            if processes.is_first():
                path.unlink() if content is None else path.write_bytes(content)
            dist.barrier()
            assert checkpoints.newest(folder) == 2, path.name
            dist.barrier()
            if processes.is_first():
                path.write_bytes(kept)
            dist.barrier()
        assert checkpoints.newest(folder) == 4
        dist.barrier()
        if processes.is_first():
            part.write_bytes(whole[:-1])
            (folder / "unfinished").mkdir()  # of a run that was killed while it wrote
            with (folder / "metrics.jsonl").open("a") as file:
                file.write('{"step": 4, "lo')
        dist.barrier()
        again = trained(train_language, folder, args)
        assert [line["loss"] for line in again] == [line["loss"] for line in before]
        assert checkpoints.newest(folder) == 4
        dist.barrier()
        if processes.is_first():
            (last / checkpoints.LIST).unlink()
            (first / checkpoints.LIST).unlink()
        dist.barrier()
        with pytest.raises(SystemExit, match=r"none of 2 checkpoints is whole"):
            checkpoints.newest(folder)


def refused(group):
    size = dist.get_world_size()
    for message, mesh in (
        (rf"--sequence {size + 1} times --tensor 1 must divide {size} processes", {"sequence": size + 1}),
        (rf"{size} groups of processes must divide --batch {size + 1}", {"batch": size + 1}),
        (rf"--replicas {size + 1} must divide the {size} processes that share weights", {"replicas": size + 1}),
    ):
        with pytest.raises(SystemExit, match=message):
            processes.placed(CPU, **{"batch": size, **mesh})
    with shared_folder() as folder:
        trained(train_language, folder, options(train_language, "--steps=2"))
        with pytest.raises(SystemExit, match=r"is of a run with other settings: n_head 12, now 3; seed 0, now 1"):
            trained(train_language, folder, options(train_language, "--heads=3", "--seed=1"))


def interrupted(folder, args, call, act):
    """Train until the run ends itself, which it does in all processes, and return why: the last one acts in a call."""
    args.out = folder
    task, calls = train_language.prepare(args, processes.placed(CPU, args.batch)), itertools.count(1)

    def loss(*inputs):
        if next(calls) == call and dist.get_rank() == dist.get_world_size() - 1:
            act()
        return train_language.loss(*inputs)

    with pytest.raises(SystemExit) as ended:
        loop.run(args, task._replace(loss=loss))
    return ended.value.code


def stopped(group):
    """After a SIGTERM to any process, all save the step that they are at, and the run resumes."""
    args = options(train_language, "--save-every=100")
    before = signal.getsignal(signal.SIGTERM)
    with shared_folder() as folder:
        assert interrupted(folder, args, 3, lambda: signal.raise_signal(signal.SIGTERM)) == 143
        assert signal.getsignal(signal.SIGTERM) == before
        assert checkpoints.newest(folder) == 3
        losses = [line["loss"] for line in trained(train_language, folder, args)]
        assert losses == pytest.approx([loss for loss, _ in expected(train_language, args)[0]], rel=1e-11)


class limited:
    """A disk on which the process that acts can write files of so many bytes at most."""

    def __init__(self, max_bytes):
        import resource

        self.resource, self.max_bytes = resource, max_bytes
        self.before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def act(self):
        self.resource.setrlimit(self.resource.RLIMIT_FSIZE, (self.max_bytes, self.before[1]))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.resource.setrlimit(self.resource.RLIMIT_FSIZE, self.before)


def full(group):
    """A full disk ends all processes with one line; a smaller --keep frees space before anything is written."""
    size = dist.get_world_size()
    first = processes.is_first()
    with shared_folder() as folder, limited(30_000) as disk:
        part = f"shard-{size:05}-model-00001-of-00001.safetensors"
        words = f"{folder}/unfinished cannot be written: File too large: {folder}/unfinished/{part}; "
        for keep, left in ((3, [3, 2, 1]), (2, [3, 2])):
            args = options(train_language, "--save-every=1", f"--keep={keep}")
            code = interrupted(folder, args, 4 if keep == 3 else 1, disk.act)
            if first:
                assert re.fullmatch(rf"{re.escape(words)}\d+ MiB are free; the same command resumes, .*", code), code
            else:
                assert code == 1
            dist.barrier()  # the first process clears up
            assert checkpoints.steps(folder) == left
            assert not (folder / "unfinished").exists()
            dist.barrier()


def full_for_metrics(group):
    """The last process has no file of metrics: here the first has a full disk."""
    with shared_folder() as folder, limited(300) as disk:
        write = figures.Metrics.write
        try:
            figures.Metrics.write = lambda self, line: (disk.act(), write(self, line))[1]
            with contextlib.redirect_stdout(io.StringIO()):  # pytest's is a file, which would be full too
                code = interrupted(folder, options(train_language), 0, None)
        finally:
            figures.Metrics.write = write
        words = f"{folder}/metrics.jsonl cannot be written: File too large"
        assert code.startswith(words) if processes.is_first() else code == 1


def taken(group):
    """A folder that another process has is left alone."""
    with shared_folder() as folder:
        patience, run_folder.PATIENCE = run_folder.PATIENCE, 0.0
        last = dist.get_rank() == dist.get_world_size() - 1
        try:
            with files.owned(folder) if last else contextlib.nullcontext():
                dist.barrier()
                code = interrupted(folder, options(train_language), 0, None)
        finally:
            run_folder.PATIENCE = patience
        assert "is in use by process" in code if processes.is_first() else code == 1
        assert [path.name for path in folder.iterdir()] in ([], [".lock"])  # the last one may be slower to remove it


def kept(group):
    """Step 10 is after step 9; a damaged checkpoint after the one that is whole does not count among those kept."""
    with shared_folder() as folder:
        if processes.is_first():
            for step in (2, 9, 10, 12):
                (folder / f"step-{step}").mkdir()
        dist.barrier()
        assert checkpoints.steps(folder) == [12, 10, 9, 2]
        dist.barrier()
        checkpoints.tidy(folder, 10, 1)
        assert checkpoints.steps(folder) == [12, 10]
        dist.barrier()


def timed(group):
    """The speed of a step is that of all processes, without the time of the checkpoint before it."""
    now, args = [0.0], options(train_language)

    def taking(seconds, function):
        def slow(*inputs):
            now[0] += seconds
            return function(*inputs)

        return slow

    with shared_folder() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: now[0]))
        patch.setattr(loop, "_step", taking(2.0, loop._step))
        patch.setattr(checkpoints, "save", taking(100.0, checkpoints.save))
        lines = trained(train_language, folder, args)
    assert [line["tokens_per_second"] for line in lines] == 4 * [42.0]  # 12 of 7 in 2 seconds
    share = 42.0 * figures.flops(train_language.build(args), args.context) / (1e12 * dist.get_world_size())
    assert [line["mfu"] for line in lines] == pytest.approx(4 * [share])


# make test runs these; tests/distributed/run_cases.py has more.
CASES = {
    "train-stopped": stopped,
    "train-full": full,
    "train-full-metrics": full_for_metrics,
    "train-taken": taken,
    "train-kept": kept,
    "train-timed": timed,
    "train-sequence": as_one(train_language, "--recompute", sequence="all"),
    "train-replicas": as_one(train_language, replicas="all"),
    "train-damaged": damaged,
    "train-refused": refused,
}
