"""The experiment: train without labels, draw reconstructions, probe the features."""

from __future__ import annotations

from dataclasses import asdict

import torch
from matplotlib.figure import Figure
from torch import Tensor

from crate_kernels.bench.drawing import BLUE, GREY, ORANGE, SKY, axes, bare, smoothed
from crate_kernels.experiments.common.draws import generator, seeded
from crate_kernels.experiments.common.fit import Fit, decayed, every, train
from crate_kernels.experiments.common.trial import Trial
from crate_kernels.experiments.demo import data
from crate_kernels.experiments.demo.data import Digits
from crate_kernels.experiments.demo.settings import DemoSettings
from crate_kernels.experiments.demo.training import batch
from crate_kernels.experiments.mae import probe
from crate_kernels.experiments.mae.settings import MAESettings
from crate_kernels.models import CRATEMAE, CRATEMAEConfig

_TRAINING, _TESTING = 0, 1
# Buchanan, Pai, Wang and Ma (Learning Deep Representations of Data Distributions, 2025), "Masked Autoencoding for
# Imagery Data": the linear probe of CRATE-MAE-Base, 44.6M. There ViT-MAE has 79.9% (S, 47.6M) and 87.9% (B, 143.8M).
_PAPER = {"CRATE-MAE, the class token": "CIFAR10: 80.9% (B, 44.6M)"}


def run(trial: Trial, settings: MAESettings) -> int:
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
            "reconstruction": _draw_reconstruction(images[chosen], filled[chosen], masks[chosen], digits),
            "learning": _draw_learning(fit, blank, probes),
        },
        {"digits": digits.name, "error": error, "error_of_the_mean": blank, "probes": probes, "losses": fit.losses},
        settings,
    )
    return 0


def fresh(settings: MAESettings, digits: data.Digits, trial: Trial) -> CRATEMAE:
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


def _fit(
    model: CRATEMAE, trial: Trial, settings: MAESettings, digits: data.Digits, images: Tensor, masks: Tensor
) -> Fit:
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


def _draw_reconstruction(images: Tensor, filled: Tensor, masks: Tensor, digits: Digits) -> Figure:
    """Draw each digit, its masked form as the model saw it, and the reconstruction."""
    side, size = digits.side, digits.patch_size
    removed = masks.unflatten(1, (side, side)).repeat_interleave(size, 1).repeat_interleave(size, 2).bool()
    figure, grid = axes(1.35 * len(images) + 0.9, 5.8, 4, len(images))
    low, high = float(images.min()), float(images.max())
    for column, (image, prediction, hidden) in enumerate(zip(images[:, 0], filled[:, 0], removed, strict=True)):
        seen = image.where(~hidden, (low + high) / 2)
        both = prediction.where(hidden, image)
        pictures = (image, seen, both, prediction)
        for ax, picture in zip(grid[:, column], pictures, strict=True):
            ax.imshow(picture.numpy(), cmap="gray", vmin=low, vmax=high)
            bare(ax)
    names = ("digit", "what is shown", "filled in", "prediction\nof all patches")
    for ax, name in zip(grid[:, 0], names, strict=True):
        ax.set_ylabel(name, fontsize=9)
    return figure


def _draw_learning(fit: Fit, blank: float, probes: dict[str, float]) -> Figure:
    """Draw training loss and test error by step, and the accuracies of the probes."""
    figure, ((curve, bars),) = axes(11.5, 3.8, 1, 2, width_ratios=(1, 1.1))
    curve.plot(*smoothed(fit.losses, 60), color=BLUE, alpha=0.6, label="training")
    steps, errors = zip(*fit.watched, strict=True)
    curve.plot(steps, errors, "o-", color=ORANGE, markersize=4, label="test")
    curve.axhline(blank, color=GREY, linestyle="--", linewidth=1, label="mean training digit")
    curve.set(xlabel="step", ylabel="squared error on removed patches", ylim=(0, None))
    curve.legend(frameon=False, fontsize=8)
    for index, (name, value) in enumerate(probes.items()):
        colour = GREY if name == "pixels" else SKY if "untrained" in name else BLUE
        bars.barh(index, value, color=colour)
        bars.text(value, index, f" {value:.3f}", va="center", fontsize=8)
    # Space beyond 1 for the number beside the bar.
    bars.set(xlabel="test accuracy of a linear probe", xlim=(0, 1.12), xticks=[0, 0.2, 0.4, 0.6, 0.8, 1])
    bars.set(yticks=range(len(probes)))
    bars.set_yticklabels(list(probes), fontsize=8)
    bars.invert_yaxis()
    return figure
