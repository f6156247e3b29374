"""Training of a CRATE on digits that are moved a little at each step."""

from __future__ import annotations

from dataclasses import asdict

import torch
from torch import Tensor
from torch.nn import functional as F

from crate_kernels.experiments.common import machine
from crate_kernels.experiments.common.draws import generator, seeded
from crate_kernels.experiments.common.fit import Fit, decayed, every
from crate_kernels.experiments.demo.data import Digits
from crate_kernels.experiments.demo.settings import DemoSettings
from crate_kernels.models import CRATE, CRATEConfig


def model_config(settings: DemoSettings, digits: Digits, backend: str | None) -> CRATEConfig:
    """Describe the model that fits these digits."""
    sizes = {name: getattr(settings, name) for name in ("dim", "depth", "heads", "dim_head")}
    return CRATEConfig(**digits.sizes(), **sizes, backend=backend)


def fresh_model(settings: DemoSettings, config: CRATEConfig, device: torch.device) -> CRATE:
    """Build the model as it is before the first step; the caller's random state is not touched."""
    with seeded(settings.seed):
        return CRATE(config).to(device)


def batch(settings: DemoSettings, digits: Digits, step: int) -> tuple[Tensor, Tensor]:
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


def steps_per_epoch(settings: DemoSettings, digits: Digits) -> int:
    """Count the whole batches in the training images."""
    return len(digits.train_labels) // settings.batch_size


class Training(Fit):
    """The training of a CRATE on digits; ``fused`` names the backend of its operators, for people."""

    def __init__(self, settings: DemoSettings, digits: Digits, backend: str | None, device: torch.device) -> None:
        self.settings, self.digits, self.device = settings, digits, device
        self.config = model_config(settings, digits, backend)
        self.fused = machine.backends(("mssa", "ista"), backend, device)
        model, epoch = fresh_model(settings, self.config, device), steps_per_epoch(settings, digits)
        total = settings.epochs * epoch
        super().__init__(
            "training",
            model,
            torch.optim.AdamW(decayed(model, settings.weight_decay, max_dims=2), lr=settings.learning_rate),
            self._loss,
            total,
            settings.warmup,
            {**asdict(settings), "digits": digits.name, "backend": self.fused},
            lambda: digits.accuracy(self.model, device),
            "accuracy",
            every(epoch, total),
            file="checkpoint.safetensors",
        )

    def _loss(self, step: int) -> Tensor:
        """Return the smoothed cross-entropy of a batch, in the dtype of the model."""
        images, labels = batch(self.settings, self.digits, step)
        logits = self.model(images.to(self.device, next(self.model.parameters()).dtype))
        return F.cross_entropy(logits, labels.to(self.device), label_smoothing=self.settings.label_smoothing)
