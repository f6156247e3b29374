"""The models by name, all of the same width and depth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from crate_kernels.experiments.classify.settings import ClassifySettings
from crate_kernels.experiments.common.draws import seeded
from crate_kernels.experiments.demo.data import Digits
from crate_kernels.models import CRATE, CRATEAlpha, CRATEAlphaConfig, CRATEConfig, ToST, ToSTConfig
from crate_kernels.models.aot import AoTVision, AoTVisionConfig

_ALPHA_WIDTH = 768  # of CRATE-alpha's base model


@dataclass(frozen=True)
class Contender:
    """The builder of a model, its paper's result on ImageNet at the published size, and its learning rate.

    The learning rate is ``pace`` times that of the settings. It suits the family at the default size.
    """

    build: Callable[[ClassifySettings, Digits, dict[str, Any]], nn.Module]
    paper: str = "-"
    pace: float = 1.0


def _crate(settings: ClassifySettings, digits: Digits, sizes: dict[str, Any], **variant: Any) -> nn.Module:
    return CRATE(CRATEConfig(**sizes, dim_head=settings.dim_head, **variant))


def _alpha(settings: ClassifySettings, digits: Digits, sizes: dict[str, Any]) -> nn.Module:
    model = CRATEAlpha(CRATEAlphaConfig(**sizes, dim_head=settings.dim_head))
    with torch.no_grad():
        # The initial deviation of 0.02 suits that width; in a narrow model attention would start near zero.
        wider = max(1.0, (_ALPHA_WIDTH / settings.dim) ** 0.5)
        for weight in (model.pos_embedding, *(m.weight for m in model.modules() if isinstance(m, nn.Linear))):
            weight.mul_(wider)
    return model


def _aot(settings: ClassifySettings, digits: Digits, sizes: dict[str, Any], attention: str) -> nn.Module:
    return AoTVision(AoTVisionConfig(**sizes, attention=attention))


class _Enlarged(nn.Module):
    """A ToST on enlarged digits: its stem of strided convolutions needs patches of at least 8 pixels."""

    def __init__(self, tost: ToST, factor: int) -> None:
        super().__init__()
        self.tost, self.factor = tost, factor

    def forward(self, images: Tensor) -> Tensor:
        large = nn.functional.interpolate(images, scale_factor=self.factor, mode="bilinear", align_corners=False)
        return self.tost(large)


def _tost(settings: ClassifySettings, digits: Digits, sizes: dict[str, Any]) -> nn.Module:
    factor = 8 // digits.patch_size
    config = ToSTConfig(
        embed_dim=settings.dim,
        depth=settings.depth,
        num_heads=settings.heads,
        img_size=factor * digits.image_size,
        patch_size=8,
        in_chans=1,
        num_classes=10,
        backend=sizes["backend"],
    )
    return _Enlarged(ToST(config), factor)


# Published accuracies. CRATE and ToST: Buchanan, Pai, Wang and Ma (Learning Deep Representations of Data Distributions,
# 2025), "Image Classification" and "Linear Time Complexity Transformers". CRATE-alpha: its repository's README.
BUILDERS = {
    "CRATE": Contender(_crate, "70.8% (B, 22.8M)", pace=2.0),
    "CRATE, tied (Eq. 11-12)": Contender(partial(_crate, attention="tied"), pace=2.0),
    "CRATE, exact gradient (Eq. 9)": Contender(partial(_crate, attention="gradient"), pace=2.0),
    "CRATE, soft threshold": Contender(partial(_crate, prox="soft"), pace=2.0),
    "CRATE, majorised ISTA (Eq. 92)": Contender(partial(_crate, prox="mm"), pace=2.0),
    "CRATE-alpha": Contender(_alpha, "81.2% (B/16, from ImageNet-21k)", pace=2.0),
    "ToST": Contender(_tost, "77.9% (S, 22.6M)"),
    "AoT, MSSA": Contender(partial(_aot, attention="mssa")),
    "AoT, MHSA": Contender(partial(_aot, attention="mhsa")),
}


def fresh(name: str, settings: ClassifySettings, digits: Digits, backend: str | None, seed: int) -> nn.Module:
    """Build a model as it is before the first step; the caller's random state is not touched."""
    own = {name: getattr(settings, name) for name in ("dim", "depth", "heads")}
    with seeded(seed):
        return BUILDERS[name].build(settings, digits, {**digits.sizes(), **own, "backend": backend})
