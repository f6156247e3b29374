"""The experiment: train without labels, draw reconstructions, probe the features."""

from __future__ import annotations

from dataclasses import asdict

import torch
from torch import Tensor

from crate_kernels.experiments.common.draws import generator, seeded
from crate_kernels.experiments.common.fit import Fit, decayed, every, train
from crate_kernels.experiments.common.trial import Trial
from crate_kernels.experiments.demo import data
from crate_kernels.experiments.demo.settings import Settings as DemoSettings
from crate_kernels.experiments.demo.training import batch
from crate_kernels.experiments.mae import figures, probe
from crate_kernels.experiments.mae.settings import Settings
from crate_kernels.models import CRATEMAE, CRATEMAEConfig

_TRAINING, _TESTING = 0, 1
# Buchanan, Pai, Wang and Ma (Learning Deep Representations of Data Distributions, 2025), "Masked Autoencoding for
# Imagery Data": the linear probe of CRATE-MAE-Base, 44.6M. There ViT-MAE has 79.9% (S, 47.6M) and 87.9% (B, 143.8M).
_PAPER = {"CRATE-MAE, the class token": "CIFAR10: 80.9% (B, 44.6M)"}


def run(trial: Trial, settings: Settings) -> int:
    """Train, measure and draw."""
    digits = data.load()
    trial.say(str(digits))
    start, model = (fresh(settings, digits, trial) for _ in range(2))
    images = digits.crop(digits.test_images)
    # Fixed masks: every measurement removes the same patches of a test digit. They are drawn on the CPU, so that every
    # device has the same ones.
    masks = model.random_mask(len(images), digits.side**2, None, generator(trial.seed, _TESTING))
    fit = _fit(model, trial, settings, digits, images, masks)
    train(fit, trial)
    model.eval()
    start.eval()
    filled = _reconstruct(model, trial, images, masks)
    blank = _error_of_the_mean(digits, images, masks)
    probes = probe.probe_all(start, model, digits, settings, trial)
    error = fit.watched[-1][1]
    rows = [
        [
            "error on removed patches",
            "pictures on par with ViT-MAE's (figure)",
            f"{error:.3f} (filling in the mean digit: {blank:.3f})",
        ],
        *([f"linear probe on {name}", _PAPER.get(name, "-"), f"{value:.4f}"] for name, value in probes.items()),
    ]
    trial.compare(rows, ("", "paper, from ImageNet", "measured, digits"))
    best, untrained = (
        max(value for name, value in probes.items() if name.startswith(kind))
        for kind in ("CRATE-MAE", "an untrained CRATE-MAE")
    )
    verdict = "beats" if best > probes["pixels"] else "does NOT beat"
    trial.say(
        f"The best probe of features learned without labels, {best:.4f}, {verdict} the one of pixels, "
        f"{probes['pixels']:.4f}; of features before any learning the best has {untrained:.4f}"
    )
    chosen = digits.first(settings.shown)
    trial.write(
        {
            "reconstruction": figures.reconstruction(images[chosen], filled[chosen], masks[chosen], digits),
            "learning": figures.learning(fit, blank, probes),
        },
        {"digits": digits.name, "error": error, "error_of_the_mean": blank, "probes": probes, "losses": fit.losses},
        settings,
    )
    return 0


def fresh(settings: Settings, digits: data.Digits, trial: Trial) -> CRATEMAE:
    """Build the model as it is before the first step."""
    with seeded(trial.seed):
        config = CRATEMAEConfig(
            embed_dim=settings.dim,
            depth=settings.depth,
            num_heads=settings.heads,
            decoder_embed_dim=settings.dim,
            decoder_depth=settings.depth,
            decoder_num_heads=settings.heads,
            img_size=digits.image_size,
            patch_size=digits.patch_size,
            in_chans=1,
            mask_ratio=settings.mask_ratio,
            lambd=settings.lambd,
            backend=trial.backend,
        )
        return CRATEMAE(config)


def _fit(model: CRATEMAE, trial: Trial, settings: Settings, digits: data.Digits, images: Tensor, masks: Tensor) -> Fit:
    drawing = DemoSettings(seed=trial.seed, batch_size=settings.batch_size)
    patches = digits.side**2
    kept = int(patches * (1 - settings.mask_ratio))
    model = model.to(trial.device)

    def loss(step: int) -> Tensor:
        moved, _ = batch(drawing, digits, step)
        rank = torch.rand(len(moved), patches, generator=generator(trial.seed, _TRAINING, step)).argsort(1).argsort(1)
        return model(moved.to(trial.device), mask=(rank >= kept).to(trial.device))[0]

    def error() -> float:
        parts = zip(images.split(250), masks.split(250), strict=True)
        found = [model(x.to(trial.device), mask=m.to(trial.device))[0].item() * len(x) for x, m in parts]
        return sum(found) / len(images)

    return Fit(
        "CRATE-MAE",
        model,
        torch.optim.AdamW(decayed(model, settings.weight_decay), lr=settings.rate, betas=(0.9, 0.95)),
        loss,
        settings.steps,
        settings.warmup,
        {**asdict(settings), "seed": trial.seed, "digits": digits.name},
        error,
        "test error",
        every(max(1, settings.steps // 10), settings.steps),
        clip=1.0,
    )


@torch.no_grad()
def _reconstruct(model: CRATEMAE, trial: Trial, images: Tensor, masks: Tensor) -> Tensor:
    """Return every image as the model fills it in, removed and shown patches alike, (n, 1, side, side)."""
    parts = zip(images.split(250), masks.split(250), strict=True)
    return torch.cat([model.unpatchify(model(x.to(trial.device), mask=m.to(trial.device))[1]).cpu() for x, m in parts])


def _error_of_the_mean(digits: data.Digits, images: Tensor, masks: Tensor) -> float:
    """Return the error of filling in the mean training image, on the same patches."""
    mean = digits.crop(digits.train_images).mean(0, keepdim=True)
    side, size = digits.side, digits.patch_size
    error = (images - mean).square().unflatten(3, (side, size)).unflatten(2, (side, size)).mean((1, 3, 5)).flatten(1)
    return float((error * masks).sum() / masks.sum())
