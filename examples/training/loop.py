"""The loop of a training run: schedule, steps, metrics, checkpoints, and where a stopped run resumes."""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from crate_kernels._core import files
from training import checkpoints, cutting, figures, folder
from training.processes import Processes, asked_to_end, is_first, maximum

Batches = Iterator[tuple[Tensor, Tensor]]
TERMINATED = 143  # 128 + SIGTERM, as shells have it
_RUNS, _ENDS, _FAILS = range(3)  # what processes exchange after a step: the largest counts for all


class Task(NamedTuple):
    """What is trained, and on what.

    Attributes:
        model: cut over the processes.
        processes: of this run.
        batches: from the number of a step, this group's part of the batch of that step and of all that follow. It
            depends on the seed and the step alone, so that any number of processes trains alike.
        loss: mean over this group's part of a batch.
        evaluate: named measures of the model, the same in all processes; none if {}.
        unit, per_step: what a batch has, and how many of all processes.
        flops: operations per unit of a training step.
        settings: what decides the losses; a run resumes only with the same.
    """

    model: Any
    processes: Processes
    batches: Callable[[int], Batches]
    loss: Callable[[Any, Tensor, Tensor], Tensor]
    evaluate: Callable[[], dict[str, float]]
    unit: str
    per_step: int
    flops: float
    settings: dict[str, Any]


def count(text: str) -> int:
    """Read an option that is a number from 1 on."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def add_options(parser: argparse.ArgumentParser, *, lr: float, batch: int) -> None:
    """Add the options that all training examples have."""
    parser.add_argument("--out", type=Path, default=Path("train-output"), help="metrics, checkpoints and the model")
    parser.add_argument("--batch", type=count, default=batch, help="per step, of all processes")
    parser.add_argument("--steps", type=count, default=1000)
    parser.add_argument("--schedule", type=count, help="steps of the schedule; default: --steps")
    parser.add_argument("--lr", type=float, default=lr, help="largest learning rate")
    parser.add_argument("--warmup", type=int, default=50, help="steps up to it")
    parser.add_argument("--decay", type=float, default=0.1, help="weight decay")
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradient")
    parser.add_argument("--tensor", type=count, default=1, help="processes that share each layer")
    parser.add_argument("--replicas", type=count, default=1, help="copies of the weights; between nodes, one a node")
    parser.add_argument("--save-every", type=count, default=100, help="steps between checkpoints")
    parser.add_argument("--keep", type=count, default=3, help="checkpoints that are kept")
    parser.add_argument("--print-every", type=count, default=10, help="steps between lines on the terminal")
    parser.add_argument("--recompute", action="store_true", help="recompute activations in the backward")
    parser.add_argument("--dtype", choices=tuple(cutting.DTYPES), default="float32", help="of the products")
    parser.add_argument(
        "--peak", type=float, help="TFLOP/s of a process's device, for MFU; default: a product is timed"
    )
    parser.add_argument("--seed", type=int, default=0)


def rate(args: argparse.Namespace, step: int) -> float:
    """Return the learning rate: linear warm-up, then half a cosine down to a tenth."""
    steps = args.schedule or args.steps
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    done = (step - args.warmup) / max(1, steps - args.warmup)
    return args.lr * (0.55 + 0.45 * math.cos(math.pi * min(1.0, done)))


def run(args: argparse.Namespace, task: Task) -> None:
    """Train to the last step, from the last whole checkpoint if there is one, and export the model.

    Raises:
        SystemExit: another run has the folder, or it cannot be written; or there was a SIGTERM in one of the processes,
            and there is a checkpoint of the last step.
    """
    with folder.owned(args.out), asked_to_end() as ended:
        _run(args, task, ended)


def _run(args: argparse.Namespace, task: Task, ended: Callable[[], bool]) -> None:
    optimiser = torch.optim.AdamW(task.model.parameter_groups(args.decay), lr=args.lr, betas=(0.9, 0.95))
    done = checkpoints.newest(args.out) or 0
    checkpoints.tidy(args.out, done, args.keep)  # before anything is written: the disk may be full
    peak = _begin(args, task, done)
    if done:
        checkpoints.load(args.out, done, task.model, optimiser)
        _say(f"resumes after step {done}, restart {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}")
    with folder.together(args.out):
        metrics = figures.Metrics(args.out / "metrics.jsonl", done) if is_first() else None
    batches = task.batches(done)
    clock = time.perf_counter()
    for step in range(done, args.steps):
        line = {"step": step, "lr": rate(args, step), **_step(args, task, optimiser, next(batches), rate(args, step))}
        saves = (step + 1) % args.save_every == 0 or step + 1 == args.steps
        now = time.perf_counter()
        seconds, clock = now - clock, now
        line |= {f"{task.unit}_per_second": task.per_step / seconds, "mfu": task.flops * task.per_step / seconds / peak}
        if saves:
            line |= task.evaluate()
        problem = ""
        if metrics is not None:
            problem = metrics.write(line)
            if saves or (step + 1) % args.print_every == 0:
                _report(args, task, line, seconds)
        state = maximum(_FAILS if problem else _ENDS if ended() else _RUNS)
        if state == _FAILS:
            raise SystemExit(problem or 1)
        if saves or state == _ENDS:
            checkpoints.save(args.out, task.model, optimiser, step + 1, args.keep)
            clock = time.perf_counter()
        if state == _ENDS and step + 1 < args.steps:
            _say(f"SIGTERM: step {step + 1} is saved; the same command resumes")
            raise SystemExit(TERMINATED)
    checkpoints.export(args.out / "model", task.model)


def _step(
    args: argparse.Namespace, task: Task, optimiser: torch.optim.Optimizer, batch: tuple[Tensor, Tensor], lr: float
) -> dict[str, float]:
    """Take a step; return its loss and the norm of its gradient."""
    for group in optimiser.param_groups:
        group["lr"] = lr
    task.model.train()
    loss = task.loss(task.model, *(x.to(task.processes.device, non_blocking=True) for x in batch))
    loss.backward()
    norm = cutting.clip(task.model, args.clip)
    if not math.isfinite(norm):
        raise SystemExit(f"the norm of the gradient is {norm}: nothing is saved; resume with a lower --lr")
    optimiser.step()
    optimiser.zero_grad()
    return {"loss": task.processes.mean(loss), "gradient_norm": norm}


def _begin(args: argparse.Namespace, task: Task, done: int) -> float:
    """Write run.json, or hold the settings against those of the run that resumes; return the peak of all devices."""
    path, size = args.out / "run.json", dist.get_world_size()
    settings = json.loads(json.dumps(task.settings))  # tuples become lists, as in the file
    if done and path.exists():
        before = json.loads(path.read_text())["settings"]
        other = [f"{key} {before.get(key)}, now {value}" for key, value in settings.items() if before.get(key) != value]
        if other:
            raise SystemExit(f"{args.out} is of a run with other settings: {'; '.join(other)}")
    dist.barrier()  # all have read it
    if args.peak:
        peak, source = args.peak * 1e12 * size, f"assumed: --peak {args.peak:g} for each of {size}"
    else:
        device = task.processes.device
        peak = figures.measured_peak(device, getattr(torch, args.dtype))
        source = f"measured: products of {figures.SIDE[device.type]} in {args.dtype}, {size} processes at once"
    facts = {"settings": settings, "peak": peak, "peak_source": source, "processes": size}
    with folder.together(args.out):
        if is_first():
            files.put(path, (json.dumps(facts, indent=1) + "\n").encode())
    mesh = {name: task.processes.mesh[name].size() for name in ("data", "sequence", "tensor")}
    _say(
        f"{size} processes {mesh}; {task.flops:.3g} FLOP per {task.unit[:-1]}; peak {peak / 1e12:.3g} TFLOP/s, {source}"
    )
    dist.barrier()
    return peak


def _report(args: argparse.Namespace, task: Task, line: dict[str, Any], seconds: float) -> None:
    """Print how far the run is."""
    left = int(seconds * (args.steps - line["step"] - 1))
    speed = f"{line[f'{task.unit}_per_second']:.0f} {task.unit}/s  MFU {line['mfu']:.1%}"
    measured = "".join(f"  {name} {line[name]:.4f}" for name in line if name.startswith("held_out"))
    clock = f"{left // 3600}:{left // 60 % 60:02}:{left % 60:02} left"
    print(f"step {line['step'] + 1}/{args.steps}  loss {line['loss']:.4f}{measured}  {speed}  {clock}", flush=True)


def _say(text: str) -> None:
    if is_first():
        print(text, flush=True)
