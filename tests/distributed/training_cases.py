"""The training examples on the meshes that a group has: the losses of one process, step by step; their checkpoints."""

import functools
import itertools
import json
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from crate_kernels import models

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "examples"))  # as when one of them runs

import train_language  # noqa: E402
import train_vision  # noqa: E402
from training import checkpoints, figures, loop, processes  # noqa: E402, F401

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
        given, targets = next(drawn)
        if example is train_language:
            loss = model(given, targets)[1]
        else:
            loss = nn.functional.cross_entropy(model(given.double()), targets)
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


# make test runs these; tests/distributed/run_cases.py has more.
CASES = {
    "train-sequence": as_one(train_language, "--recompute", sequence="all"),
    "train-damaged": damaged,
    "train-refused": refused,
}
