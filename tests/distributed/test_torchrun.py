"""examples/train_language.py: the losses of one process in several, and a run that goes on from its checkpoint."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = {"layers": 1, "heads": 2, "width": 8, "context": 12, "batch": 4, "dtype": "float64", "schedule": 4}


def train(folder, processes, *args):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)] if processes else []
    small = [word for name, value in SMALL.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, *torchrun, str(ROOT / "examples" / "train_language.py"), "--text", str(ROOT / "LICENSE")]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, "--out", str(folder), *small, *args], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", ["crate_lm", "tost_lm"])
def test_several_processes_go_on_and_learn_as_one(model, tmp_path):
    options = ("--model", model)
    alone = train(tmp_path / "one", 0, "--steps", "4", *options)
    assert [line["step"] for line in alone] == [0, 1, 2, 3]
    train(tmp_path / "two", 2, "--steps", "2", "--sequence", "2", *options)
    left = tmp_path / "two" / "unfinished" / "__9_0.distcp"  # of a run that was killed while it saved
    left.parent.mkdir()
    left.touch()
    together = train(tmp_path / "two", 2, "--steps", "4", "--recompute", *options)  # resumed with other groups
    assert [path.name for path in (tmp_path / "two" / "step-4").glob("__9*")] == []
    for one, two in zip(alone, together, strict=True):
        assert one["loss"] == pytest.approx(two["loss"], rel=1e-10)
        assert one["gradient_norm"] == pytest.approx(two["gradient_norm"], rel=1e-9)
