"""Runs of transformers' Trainer that may be stopped: a folder has one at a time, and the same command resumes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from crate_kernels._core import files
from training.folder import PATIENCE
from training.loop import TERMINATED
from training.processes import asked_to_end, end_with_parent


class Stop(TrainerCallback):
    """Saves and ends after a step by whose end one of the processes was asked to."""

    def __init__(self, ended: Callable[[], bool]) -> None:
        self.ended, self.stops = ended, False

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        ended = self.ended()
        if args.world_size > 1:
            any_ended = torch.tensor(float(ended), device=args.device)
            dist.all_reduce(any_ended, dist.ReduceOp.MAX)
            ended = any_ended.item() > 0
        if ended:
            self.stops = control.should_save = control.should_training_stop = True

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.stops:  # a part of an epoch: it is saved, and who asked to end waits
            control.should_evaluate = control.should_save = False


@contextmanager
def owned(output: str) -> Iterator[None]:
    """Make the folder and keep other runs out of it while the block lasts; end this process with its launcher.

    Raises:
        SystemExit: another run has the folder.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()
    if int(os.environ.get("RANK", 0)):  # of several processes the first has the folder, or ends them all
        yield
        return
    Path(output).mkdir(parents=True, exist_ok=True)
    try:
        with files.owned(Path(output), PATIENCE):
            yield
    except files.InUse as error:
        raise SystemExit(str(error)) from None


def unfinished(output: str) -> str | None:
    """Return the newest whole checkpoint of a run that was stopped; None after one that came to its end."""
    found = sorted(Path(output).glob("checkpoint-*/trainer_state.json"), key=lambda path: path.stat().st_mtime)
    for path in reversed(found):
        try:
            state = json.loads(path.read_text())
        except ValueError:  # it was being written
            continue
        return str(path.parent) if state["global_step"] < state["max_steps"] else None
    return None


def train(trainer: Trainer) -> None:
    """Train to the end, from the checkpoint of a run that was stopped if there is one.

    Raises:
        SystemExit: there was a SIGTERM in one of the processes, and there is a checkpoint of the last step.
    """
    with asked_to_end() as ended:
        trainer.add_callback(Stop(ended))
        trainer.train(resume_from_checkpoint=unfinished(trainer.args.output_dir or ""))
    step = trainer.state.global_step
    if step < trainer.state.max_steps:
        if trainer.is_world_process_zero():
            print(f"SIGTERM: step {step} is saved; the same command resumes", flush=True)
        raise SystemExit(TERMINATED)
