"""The training examples as files, under torchrun: they resume from checkpoints, on other meshes and after a kill."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from crate_kernels import models

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.exhaustive
SMALL = {"layers": 1, "heads": 2, "width": 8, "context": 12, "batch": 4, "dtype": "float64", "schedule": 40, "peak": 1}


def command(folder, processes, *args, example="train_language.py", restarts=0):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    torchrun += ["--max-restarts", str(restarts), "--monitor-interval", "0.1"]
    small = [f"--{name}={value}" for name, value in SMALL.items()] if example == "train_language.py" else []
    text = ["--text", str(ROOT / "LICENSE")] if example == "train_language.py" else []
    script = [str(ROOT / "examples" / example), *text, "--out", str(folder), *small, *args]
    return [sys.executable, *(torchrun if processes else []), *script]


def start(words):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def finish(running):
    try:
        output, complaints = running.communicate(timeout=300)
    finally:
        running.kill()
    assert running.returncode == 0, complaints
    return output


def train(folder, processes, *args, **options):
    output = finish(start(command(folder, processes, *args, **options)))
    return lines(folder), output


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("model", ["crate_lm_base", "tost_lm_base"])
def test_several_processes_resume_and_learn_as_one(model, tmp_path):
    options = ("--model", model)
    alone, _ = train(tmp_path / "one", 0, "--steps", "4", *options)
    assert [line["step"] for line in alone] == [0, 1, 2, 3]
    train(tmp_path / "two", 2, "--steps", "2", "--sequence", "2", *options)
    together, output = train(tmp_path / "two", 2, "--steps", "4", "--recompute", "--tensor", "2", *options)
    assert "resumes after step 2" in output
    for one, two in zip(alone, together, strict=True):
        assert one["loss"] == pytest.approx(two["loss"], rel=1e-10)
        assert one["gradient_norm"] == pytest.approx(two["gradient_norm"], rel=1e-9)


def test_meshes_of_three_dimensions(tmp_path):
    options = "--steps", "3"
    alone, _ = train(tmp_path / "one", 0, *options)
    together, output = train(tmp_path / "eight", 8, "--sequence", "2", "--tensor", "2", *options)
    assert "{'data': 2, 'sequence': 2, 'tensor': 2}" in output
    for name in ("loss", "gradient_norm"):
        assert [line[name] for line in together] == pytest.approx([line[name] for line in alone], rel=1e-11)


def test_a_killed_process_is_started_again_and_nothing_is_lost(tmp_path):
    options = "--steps", "40", "--save-every", "5", "--tensor", "2"
    unbroken, _ = train(tmp_path / "unbroken", 2, *options)
    folder = tmp_path / "killed"
    running = start(command(folder, 2, *options, restarts=2))
    try:
        until(lambda: (folder / "step-10").exists() and len(lines(folder)) >= 12, running)
        workers = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
        assert len(workers) == 2
        os.kill(int(workers[1]), signal.SIGKILL)
        before = len(lines(folder))
        output = finish(running)
    finally:
        running.kill()
    assert before < 40
    after = re.search(r"resumes after step (\d+), restart 1", output)
    assert after is not None, output
    assert 10 <= int(after[1]) <= before
    assert [line["step"] for line in lines(folder)] == list(range(40))
    for name in ("loss", "gradient_norm", "lr"):
        assert [line[name] for line in lines(folder)] == [line[name] for line in unbroken]
    same = [models.from_pretrained(place / "model").state_dict() for place in (folder, tmp_path / "unbroken")]
    assert all(torch.equal(same[0][name], weight) for name, weight in same[1].items())


def test_after_a_kill_of_torchrun_one_run_resumes(tmp_path):
    """Its workers end with it, a second run beside the first is refused, and no step has two lines."""
    options = "--steps", "600", "--save-every", "5"
    first = start(command(tmp_path, 2, *options))
    try:
        until(lambda: (tmp_path / "step-5").exists(), first)
        workers = Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()
        assert len(workers) == 2
        for worker in workers:  # so that they are not at their end when the second run begins
            os.kill(int(worker), signal.SIGSTOP)
        beside = start(command(tmp_path, 0, *options))
        _, complaints = beside.communicate(timeout=300)
        assert beside.returncode == 1
        assert re.fullmatch(rf"{tmp_path} is in use by process \d+ on \S+: wait for its end, or end it\n", complaints)
        for worker in workers:
            os.kill(int(worker), signal.SIGCONT)
        first.kill()
        _, output = train(tmp_path, 2, *options)
    finally:
        first.kill()
        first.communicate()
    assert "resumes after step" in output
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)
    assert [line["step"] for line in lines(tmp_path)] == list(range(600))


@pytest.mark.parametrize("processes", [0, 2])
def test_a_run_that_is_terminated_saves_its_step(processes, tmp_path):
    options = "--steps", "600", "--save-every", "600"
    running = start(command(tmp_path, processes, *options))
    try:
        until(lambda: (tmp_path / "metrics.jsonl").exists() and len(lines(tmp_path)) >= 3, running)
        running.terminate()
        output, complaints = running.communicate(timeout=60)
    finally:
        running.kill()
    assert running.returncode == (1 if processes else 143), complaints
    (step,) = re.findall(r"SIGTERM: step (\d+) is saved", output)
    assert len(lines(tmp_path)) == int(step)
    assert [path.name for path in tmp_path.glob("step-*")] == [f"step-{step}"]
    _, output = train(tmp_path, processes, *options, "--steps", str(int(step) + 5))
    assert f"resumes after step {step}, " in output
    assert [line["step"] for line in lines(tmp_path)] == list(range(int(step) + 5))


def until(true, running, seconds=240):
    end = time.monotonic() + seconds
    while not true():
        assert running.poll() is None, running.communicate()[1]
        assert time.monotonic() < end
        time.sleep(0.01)


def test_half_precision_on_one_process_and_on_two(tmp_path):
    options = "--steps", "30", "--dtype", "bfloat16", "--lr", "1e-2", "--width", "32"
    alone, _ = train(tmp_path / "one", 0, *options)
    together, _ = train(tmp_path / "two", 2, *options, "--recompute")
    assert alone[-1]["held_out_loss"] < alone[0]["loss"] - 0.3
    # bfloat16 has a relative precision of 2 ** -8.
    for one, two in zip(alone, together, strict=True):
        assert one["loss"] == pytest.approx(two["loss"], rel=2**-8)


def test_images_of_a_folder(tmp_path):
    image = pytest.importorskip("PIL.Image", reason="needs pillow: pip install pillow")
    for split, number in (("train", 6), ("val", 2)):
        for label, colour in enumerate(("red", "blue")):
            (tmp_path / "images" / split / colour).mkdir(parents=True)
            for index in range(number):
                picture = image.new("RGB", (20 + index, 24), (200 * (1 - label), 10 * index, 200 * label))
                picture.save(tmp_path / "images" / split / colour / f"{index}.png")
    small = "--images", str(tmp_path / "images"), "--size", "16", "--patch", "8", "--depth", "1", "--width", "16"
    small += "--batch", "4", "--steps", "30", "--warmup", "3", "--peak", "1", "--lr", "1e-2", "--workers", "1"
    alone, _ = train(tmp_path / "one", 0, *small, example="train_vision.py")
    together, _ = train(tmp_path / "two", 2, *small, example="train_vision.py")
    assert together[-1]["held_out_accuracy"] == alone[-1]["held_out_accuracy"] == 1.0
    assert [line["loss"] for line in together] == pytest.approx([line["loss"] for line in alone], rel=1e-4)


def test_the_first_line_of_the_page(tmp_path):
    """A model of the reference implementation trains by it: here in short texts, and not for long."""
    page = (ROOT / "docs" / "distributed.md").read_text()
    line = re.findall(r"^torchrun (.* examples/train_language\.py .*)$", page, re.MULTILINE)[0]
    text = tmp_path / "book.txt"
    text.write_text("".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))))
    words = [str(text) if word == "book.txt" else word for word in shlex.split(line, comments=True)]
    words = [str(ROOT / word) if word.startswith("examples/") else word for word in words]
    less = "--out", str(tmp_path / "out"), "--steps", "8", "--context", "64", "--batch", "4", "--warmup", "2"
    output = finish(start([sys.executable, "-m", "torch.distributed.run", "--standalone", *words, *less]))
    assert "4 processes" in output
    assert lines(tmp_path / "out")[-1]["held_out_loss"] < lines(tmp_path / "out")[0]["loss"]
    assert isinstance(models.from_pretrained(tmp_path / "out" / "model"), models.CRATELM)
