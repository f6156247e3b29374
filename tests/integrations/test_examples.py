"""Every example runs, in small."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: the extra hf")
pytest.importorskip("accelerate", reason="needs accelerate: the extra hf")
from crate_kernels import models
from crate_kernels.experiments.demo import data
from tests.tools import owning

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SMALL = ["--window", "16", "--width", "64", "--layers", "1", "--epochs", "3", "--tokens", "8"]


@pytest.fixture(autouse=True)
def beside_each_other(monkeypatch):
    """Let an example import what is beside it, as Python does for a script."""
    monkeypatch.syspath_prepend(EXAMPLES)


def example(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_digits(tmp_path, monkeypatch):
    pytest.importorskip("sklearn", reason="needs scikit-learn: the extra demo")
    monkeypatch.setattr(data, "_mnist_path", lambda: None)  # scikit-learn's are read in no time
    torch.manual_seed(0)
    size = ["--images", "512", "--epochs", "2", "--dim", "32", "--depth", "1", "--output"]
    first = example("digits_trainer").main([*size, str(tmp_path / "a")])
    again = example("digits_trainer").main([*size, str(tmp_path / "a"), "--start", str(tmp_path / "a")])
    assert again["eval_loss"] < first["eval_loss"] < 2.3  # log(10) is a guess
    assert (tmp_path / "a" / "README.md").exists()
    assert models.from_pretrained(tmp_path / "a").config.num_classes == 10


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("abc abd " * 200)
    return path


def test_text(text, tmp_path):
    torch.manual_seed(0)
    result = example("text_trainer").main([str(text), "--output", str(tmp_path / "out"), "--prompt", "ab", *SMALL])
    assert result.startswith("ab")
    assert len(result) == 10
    assert set(result) <= set("abcd ")
    assert models.from_pretrained(tmp_path / "out").config.vocab_size == 6


def states(folder):
    found = [json.loads(path.read_text()) for path in folder.glob("checkpoint-*/trainer_state.json")]
    return [state["global_step"] for state in found]


def test_a_terminated_run_saves_its_step_and_resumes(text, tmp_path, monkeypatch, capsys):
    def run(name, asked=0):
        module, taken = example("text_trainer"), 0

        def get(self, index):
            nonlocal taken
            taken += 1
            if taken == asked:  # within the second batch of the second epoch
                signal.raise_signal(signal.SIGTERM)
            return {"input_ids": self.windows[index], "labels": self.windows[index]}

        monkeypatch.setattr(module.Windows, "__getitem__", get)
        torch.manual_seed(0)
        return module.main([str(text), "--output", str(tmp_path / name), *SMALL])

    handler = signal.getsignal(signal.SIGTERM)
    run("unbroken")
    (steps,) = states(tmp_path / "unbroken")
    assert steps == 3 * 6
    with pytest.raises(SystemExit) as ended:
        run("broken", asked=90 + 20 + 9)
    assert ended.value.code == 143
    assert signal.getsignal(signal.SIGTERM) == handler
    (step,) = states(tmp_path / "broken")
    assert 6 < step < steps
    assert f"SIGTERM: step {step} is saved; the same command resumes" in capsys.readouterr().out
    assert not (tmp_path / "broken" / "config.json").exists()
    run("broken")
    assert states(tmp_path / "broken") == [steps]
    same = [models.from_pretrained(tmp_path / name).state_dict() for name in ("unbroken", "broken")]
    assert all(torch.equal(same[0][name], weight) for name, weight in same[1].items())


def test_a_checkpoint_that_is_not_whole_is_passed_over(tmp_path):
    from training.trainer import unfinished

    assert unfinished(str(tmp_path)) is None
    for step, text in ((5, '{"global_step": 5, "max_steps": 9}'), (7, '{"global_'), (8, None)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if text is not None:
            (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(text)
            os.utime(tmp_path / f"checkpoint-{step}" / "trainer_state.json", (step, step))
    assert unfinished(str(tmp_path)) == str(tmp_path / "checkpoint-5")
    (tmp_path / "checkpoint-7" / "trainer_state.json").write_text('{"global_step": 9, "max_steps": 9}')
    assert unfinished(str(tmp_path)) is None


@pytest.mark.parametrize("name", ["digits_trainer", "text_trainer"])
def test_a_folder_has_one_run_at_a_time(name, text, tmp_path, monkeypatch):
    from training import trainer

    monkeypatch.setattr(trainer, "PATIENCE", 0.0)
    inputs = [str(text)] if name == "text_trainer" else []
    with (
        owning.another(tmp_path) as other,
        pytest.raises(SystemExit, match=f"{tmp_path} is in use by process {other.pid}"),
    ):
        example(name).main([*inputs, "--output", str(tmp_path)])
    assert list(tmp_path.glob("checkpoint-*")) == []


AS_A_SCRIPT = """
import runpy, sys
from tests.integrations import conftest  # torchvision
sys.argv.pop(0)
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def launched(text, folder, *options):
    script = text.with_name("script.py")
    script.write_text(AS_A_SCRIPT)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    words += [str(EXAMPLES / "text_trainer.py"), str(text), "--output", str(folder), *SMALL, *options]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["terminated", "killed"])
def test_under_torchrun_all_processes_end_and_one_run_resumes(number, text, tmp_path):
    folder = tmp_path / "out"
    first = launched(text, folder, "--epochs", "2000")
    try:
        end = time.monotonic() + 240
        while not states(folder):
            assert first.poll() is None, first.communicate()[1]
            assert time.monotonic() < end
            time.sleep(0.01)
        workers = Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()
        assert len(workers) == 2
        first.send_signal(number)
        output = first.communicate(timeout=60)[0]
    finally:
        first.kill()
    (step,) = states(folder)
    assert (f"SIGTERM: step {step} is saved" in output) == (number == signal.SIGTERM)
    second = launched(text, folder, "--epochs", str(step / 3 + 2))
    output, complaints = second.communicate(timeout=300)
    assert second.returncode == 0, complaints
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)
    assert states(folder)[0] >= step + 3


def test_every_example_is_tested():
    tested = {"digits_trainer", "text_trainer"}
    assert {path.stem for path in EXAMPLES.glob("*_trainer.py")} == tested
