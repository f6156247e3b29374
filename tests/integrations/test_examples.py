"""Every example runs, in small."""

import importlib.util
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: the extra hf")
pytest.importorskip("accelerate", reason="needs accelerate: the extra hf")
from crate_kernels import models
from crate_kernels.experiments.demo import data

EXAMPLES = Path(__file__).parents[2] / "examples"


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


def test_text(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("abc abd " * 200)
    size = ["--window", "16", "--width", "64", "--layers", "1", "--epochs", "3", "--tokens", "8"]
    torch.manual_seed(0)
    result = example("text_trainer").main([str(text), "--output", str(tmp_path / "out"), "--prompt", "ab", *size])
    assert result.startswith("ab")
    assert len(result) == 10
    assert set(result) <= set("abcd ")
    assert models.from_pretrained(tmp_path / "out").config.vocab_size == 6


def test_every_example_is_tested():
    tested = {"digits_trainer", "text_trainer"}
    assert {path.stem for path in EXAMPLES.glob("*_trainer.py")} == tested
