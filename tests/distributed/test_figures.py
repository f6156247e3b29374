"""What the training examples count, their options and their schedule; no groups of processes."""

import contextlib
import json
import os
import select
import shlex
import signal
import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.distributed.training_cases import ROOT, figures, loop, options, train_language, train_vision
from tests.models import families


def counted(model, *inputs):
    """Operations of the reference, which has one product with each dictionary more than the operators."""
    with FlopCounterMode(display=False) as counter:
        model(*inputs)
    tokens = inputs[0].shape[1]
    names = [
        name for name, _ in model.named_parameters() if "ista.weight" in name or name.endswith(("1.fn.weight", ".D"))
    ]
    more = sum(2 * tokens * model.get_parameter(name).numel() for name in names)
    assert more
    return counter.get_total_flops() - more


@pytest.mark.parametrize("family", ["crate", "crate_alpha"])
def test_products_of_image_models(family):
    layers = families.build(family, backend="reference").transformer
    assert counted(layers, torch.zeros(1, 5, 24)) * 3 == 5 * figures.flops(layers, 5)


@pytest.mark.parametrize("family", ["crate_lm", "crate_lm_overcomplete"])
def test_products_of_language_models(family):
    model = families.build(family, backend="reference")
    masked = model.config.n_layer * 2 * 9 * model.config.n_embd  # which the reference computes too
    assert counted(model, torch.zeros(1, 9, dtype=torch.int64)) * 3 == 9 * (figures.flops(model, 9) + 3 * masked)


@pytest.mark.parametrize("example", [train_language, train_vision])
def test_schedule(example):
    args = options(example, "--lr=1", "--warmup=4", "--schedule=24")
    rates = [loop.rate(args, step) for step in range(30)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[14] == pytest.approx(0.55)
    assert rates[24:] == pytest.approx([0.1] * 6)
    assert sorted(rates[4:], reverse=True) == rates[4:]


def test_metrics_drop_steps_that_are_taken_again_and_a_line_that_was_cut_off(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}\n{"step": 2}\n{"st')
    figures.Metrics(path, 2).write({"step": 2, "loss": 0.5})
    written = [json.loads(line) for line in path.read_text().splitlines()]
    assert written == [{"step": 0}, {"step": 1}, {"step": 2, "loss": 0.5}]


TOO_SMALL = ["--keep=0", "--save-every=0", "--print-every=0", "--batch=-4", "--steps=0", "--tensor=0", "--replicas=0"]


@pytest.mark.parametrize("option", TOO_SMALL)
@pytest.mark.parametrize("example", [train_language, train_vision])
def test_numbers_from_one_on(example, option, capsys):
    """A run that keeps no checkpoint would delete the one that it has just written."""
    with pytest.raises(SystemExit):
        options(example, option)
    name, _, number = option.partition("=")
    assert f"argument {name}: must be at least 1, got {number}\n" in capsys.readouterr().err


WORKER = """
import time
from training import processes
with processes.started():
    print("begun", flush=True)
    time.sleep(100)
"""


@pytest.mark.skipif(os.name != "posix", reason="signals are of POSIX: run on Linux")
@pytest.mark.parametrize("launcher", ["torchrun", "none"])
def test_workers_end_with_torchrun_alone(launcher):
    """torchrun that is killed leaves its workers to themselves; a run that no torchrun started outlives its shell."""
    environment = {name: value for name, value in os.environ.items() if "TORCHELASTIC" not in name and name != "RANK"}
    environment |= {"PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}"} | (
        {"TORCHELASTIC_RUN_ID": "a"} if launcher == "torchrun" else {}
    )
    command = [sys.executable, "-c", WORKER]
    parent = subprocess.Popen(
        ["sh", "-c", f"{shlex.join(command)} & echo $!; wait"], stdout=subprocess.PIPE, text=True, env=environment
    )
    worker = int(parent.stdout.readline())
    try:
        assert parent.stdout.readline() == "begun\n"
        parent.kill()
        ended, _, _ = select.select([parent.stdout], [], [], 30.0 if launcher == "torchrun" else 1.0)
        assert bool(ended) == (launcher == "torchrun")  # at the end of its last writer a pipe has an end
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)
        parent.stdout.close()
        parent.wait()
