"""Training: every draw is a function of the seed and the step, so a resumed run equals an uninterrupted one."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from crate_kernels.experiments.common import machine
from crate_kernels.experiments.common.draws import generator
from crate_kernels.experiments.demo.data import Digits
from crate_kernels.models import CRATE, CRATEConfig


@dataclass(frozen=True)
class Settings:
    """Settings that decide the outcome of a training run.

    Attributes:
        rotation: largest, in radians; ``scaling``: largest relative; ``shift``: largest, as a share of the side.
        warmup: steps over which the learning rate rises before its cosine decay.
    """

    seed: int = 0
    epochs: int = 27
    batch_size: int = 100
    learning_rate: float = 3e-3
    warmup: int = 100
    weight_decay: float = 0.05
    label_smoothing: float = 0.1
    rotation: float = 0.15
    scaling: float = 0.1
    shift: float = 0.07
    dim: int = 128
    depth: int = 4
    heads: int = 4
    dim_head: int = 32


def model_config(settings: Settings, digits: Digits, backend: str | None) -> CRATEConfig:
    """Describe the model that fits these digits."""
    return CRATEConfig(
        dim=settings.dim,
        depth=settings.depth,
        heads=settings.heads,
        dim_head=settings.dim_head,
        image_size=digits.image_size,
        patch_size=digits.patch_size,
        num_classes=10,
        channels=1,
        backend=backend,
    )


def fresh_model(settings: Settings, config: CRATEConfig, device: torch.device) -> CRATE:
    """Build the model as it is before the first step; the caller's random state is not touched."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        return CRATE(config).to(device)


def batch(settings: Settings, digits: Digits, step: int) -> tuple[Tensor, Tensor]:
    """Draw the batch of one step: each epoch is a permutation, each image moved by a random affine map."""
    epoch, index = divmod(step, steps_per_epoch(settings, digits))
    order = torch.randperm(len(digits.train_labels), generator=generator(settings.seed, 0, epoch))
    chosen = order[index * settings.batch_size : (index + 1) * settings.batch_size]
    images, draws = digits.train_images[chosen], generator(settings.seed, 1, step)

    def uniform(*columns: int) -> Tensor:
        return torch.rand(len(chosen), *columns, generator=draws) * 2 - 1

    angle, scale = settings.rotation * uniform(), 1 + settings.scaling * uniform(2)
    turn = torch.stack((angle.cos(), -angle.sin(), angle.sin(), angle.cos()), -1).view(-1, 2, 2)
    # Coordinates run from -1 to 1: the side is 2.
    theta = torch.cat((turn * scale.unsqueeze(-2), 2 * settings.shift * uniform(2, 1)), -1)
    grid = F.affine_grid(theta, list(images.shape), align_corners=False)
    moved = F.grid_sample(images - digits.black, grid, align_corners=False) + digits.black  # zeros pad the borders
    return digits.crop(moved).contiguous(), digits.train_labels[chosen]


def steps_per_epoch(settings: Settings, digits: Digits) -> int:
    """Count the whole batches in the training images."""
    return len(digits.train_labels) // settings.batch_size


class Training:
    """A model, its optimiser and its history so far.

    Attributes:
        fused: the backend of the operators, for people.
        losses: one per step; ``accuracies``: (step, test accuracy) pairs.
    """

    def __init__(self, settings: Settings, digits: Digits, backend: str | None, device: torch.device) -> None:
        self.settings, self.digits, self.device = settings, digits, device
        self.config = model_config(settings, digits, backend)
        self.fused = machine.backends(("mssa", "ista"), backend, device)
        self.model = fresh_model(settings, self.config, device)
        matrices = [p for p in self.model.parameters() if p.dim() == 2]
        others = [p for p in self.model.parameters() if p.dim() != 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=settings.learning_rate,
        )
        self.total = settings.epochs * steps_per_epoch(settings, digits)
        self.losses: list[float] = []
        self.accuracies: list[tuple[int, float]] = []

    @property
    def done(self) -> int:
        """Steps taken."""
        return len(self.losses)

    def _rate(self) -> float:
        rate, warmup = self.settings.learning_rate, self.settings.warmup
        if self.done < warmup:
            return rate * (self.done + 1) / warmup
        return rate * (1 + math.cos(math.pi * (self.done - warmup) / (self.total - warmup))) / 2

    def step(self) -> float:
        """Take one step and return its loss."""
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate()
        images, labels = batch(self.settings, self.digits, self.done)
        self.model.train()
        loss = self.loss(images, labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())
        return self.losses[-1]

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the smoothed cross-entropy of a batch, in the dtype of the model."""
        dtype = self.model.cls_token.dtype
        logits = self.model(images.to(self.device, dtype))
        return F.cross_entropy(logits, labels.to(self.device), label_smoothing=self.settings.label_smoothing)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the accuracy on the test images, and append it to ``accuracies``."""
        self.model.eval()
        right = 0
        for images, labels in zip(
            self.digits.crop(self.digits.test_images).split(500), self.digits.test_labels.split(500), strict=True
        ):
            right += int((self.model(images.to(self.device)).argmax(-1).cpu() == labels).sum())
        accuracy = right / len(self.digits.test_labels)
        self.accuracies.append((self.done, accuracy))
        return accuracy
