"""The models, each in the same width and depth, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from crate_kernels.experiments.classify.settings import Settings
from crate_kernels.experiments.demo.data import Digits
from crate_kernels.models import CRATE, CRATEAlpha, CRATEAlphaConfig, CRATEConfig, ToST, ToSTConfig
from crate_kernels.models.aot import AoTVision, AoTVisionConfig

_ALPHA_WIDTH = 768  # of its base model


@dataclass(frozen=True)
class Entry:
    """How a model is built, what its paper reports of its published size on ImageNet, and how it is trained.

    ``pace`` times the rate of the settings is its own; at the default size it suits the family.
    """

    build: Callable[[Settings, Digits, str | None], nn.Module]
    paper: str = "-"
    pace: float = 1.0


def _crate(settings: Settings, digits: Digits, backend: str | None, **variant: Any) -> nn.Module:
    config = CRATEConfig(
        dim=settings.dim,
        depth=settings.depth,
        heads=settings.heads,
        dim_head=settings.dim_head,
        image_size=digits.image_size,
        patch_size=digits.patch_size,
        num_classes=10,
        channels=1,
        backend=backend,
        **variant,
    )
    return CRATE(config)


def _alpha(settings: Settings, digits: Digits, backend: str | None) -> nn.Module:
    config = CRATEAlphaConfig(
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
    model = CRATEAlpha(config)
    with torch.no_grad():
        # Drawn with a deviation of 0.02, which suits that width; in a narrow model attention starts out silent.
        wider = max(1.0, (_ALPHA_WIDTH / settings.dim) ** 0.5)
        for weight in (model.pos_embedding, *(m.weight for m in model.modules() if isinstance(m, nn.Linear))):
            weight.mul_(wider)
    return model


def _aot(settings: Settings, digits: Digits, backend: str | None, attention: str) -> nn.Module:
    config = AoTVisionConfig(
        dim=settings.dim,
        depth=settings.depth,
        heads=settings.heads,
        attention=attention,
        image_size=digits.image_size,
        patch_size=digits.patch_size,
        num_classes=10,
        channels=1,
        backend=backend,
    )
    return AoTVision(config)


class _Enlarged(nn.Module):
    """A ToST that sees digits enlarged: its stem of strided convolutions takes patches of 8 pixels, no fewer."""

    def __init__(self, tost: ToST, factor: int) -> None:
        super().__init__()
        self.tost, self.factor = tost, factor

    def forward(self, images: Tensor) -> Tensor:
        large = nn.functional.interpolate(images, scale_factor=self.factor, mode="bilinear", align_corners=False)
        return self.tost(large)


def _tost(settings: Settings, digits: Digits, backend: str | None) -> nn.Module:
    factor = 8 // digits.patch_size
    config = ToSTConfig(
        embed_dim=settings.dim,
        depth=settings.depth,
        num_heads=settings.heads,
        img_size=factor * digits.image_size,
        patch_size=8,
        in_chans=1,
        num_classes=10,
        backend=backend,
    )
    return _Enlarged(ToST(config), factor)


# As Buchanan, Pai, Wang and Ma (Learning Deep Representations of Data Distributions, 2025) tabulate CRATE under "Image
# Classification" and ToST under "Linear Time Complexity Transformers", and CRATE-alpha's repository in its README.
BUILDERS = {
    "CRATE": Entry(_crate, "70.8% (B, 22.8M)", pace=2.0),
    "CRATE, tied (Eq. 11-12)": Entry(partial(_crate, attention="tied"), pace=2.0),
    "CRATE, exact gradient (Eq. 9)": Entry(partial(_crate, attention="gradient"), pace=2.0),
    "CRATE, soft threshold": Entry(partial(_crate, prox="soft"), pace=2.0),
    "CRATE, majorised ISTA (Eq. 92)": Entry(partial(_crate, prox="mm"), pace=2.0),
    "CRATE-alpha": Entry(_alpha, "81.2% (B/16, from ImageNet-21k)", pace=2.0),
    "ToST": Entry(_tost, "77.9% (S, 22.6M)"),
    "AoT, MSSA": Entry(partial(_aot, attention="mssa")),
    "AoT, MHSA": Entry(partial(_aot, attention="mhsa")),
}


def fresh(name: str, settings: Settings, digits: Digits, backend: str | None, seed: int) -> nn.Module:
    """Build a model as it is before the first step; the caller's random state is not touched."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return BUILDERS[name].build(settings, digits, backend)
