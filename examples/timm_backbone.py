"""Find a digit in a larger picture: a ToST as timm's backbone, and a head that marks its patch.

    python examples/timm_backbone.py --steps 200

Needs the extra ``timm`` and scikit-learn's digits. A picture has one digit at a random place, and noise. The backbone's
last feature map has a place for every patch; a convolution of width 1 says how much each looks like the digit's.
"""

from __future__ import annotations

import argparse

import timm
import torch
from sklearn.datasets import load_digits
from timm.optim import create_optimizer_v2
from torch import Tensor, nn

import crate_kernels.integrations.timm  # registers the models


class Finder(nn.Module):
    """Score every patch of a picture.

    Args:
        name: a model of timm that gives features, with all its arguments.
        **options: arguments of ``timm.create_model``.
    """

    def __init__(self, name: str, **options: object) -> None:
        super().__init__()
        self.backbone = timm.create_model(name, features_only=True, out_indices=(-1,), **options)
        (width,) = self.backbone.feature_info.channels()
        self.score = nn.Conv2d(width, 1, 1)

    def forward(self, picture: Tensor) -> Tensor:
        """Return scores (batch, patches) of pictures (batch, channels, height, width)."""
        (features,) = self.backbone(picture)  # (batch, width, rows, columns)
        return self.score(features).flatten(1)


def pictures(digits: Tensor, count: int, side: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw pictures (count, 1, 8 side, 8 side) of noise with a digit in one of side x side places, and the places."""
    chosen = torch.randint(len(digits), (count,), generator=generator)
    places = torch.randint(side * side, (count,), generator=generator)
    tiles = 0.5 * torch.rand(count, side * side, 8, 8, generator=generator)
    tiles[torch.arange(count), places] = digits[chosen]
    rows = tiles.unflatten(1, (side, side)).transpose(2, 3)
    return rows.reshape(count, 1, 8 * side, 8 * side), places


def train(steps: int, batch: int = 32, side: int = 4, **options: object) -> float:
    """Train a finder and return the part of 200 new pictures in which it finds the digit.

    Args:
        steps: steps of the optimiser.
        batch: pictures a step.
        side: places down and across.
        **options: arguments of ``timm.create_model``, instead of those below.
    """
    digits = torch.tensor(load_digits().images, dtype=torch.float32) / 16
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    small = {"embed_dim": 64, "depth": 3, "num_heads": 4, "eta": 1.0, "in_chans": 1, "img_size": 8 * side}
    model = Finder("tost_tiny_12_p8", **{**small, **options})
    optimizer = create_optimizer_v2(model, opt="adamw", lr=2e-3, weight_decay=0.05)
    for step in range(steps):
        picture, place = pictures(digits, batch, side, generator)
        loss = nn.functional.cross_entropy(model(picture), place)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    picture, place = pictures(digits, 200, side, generator)
    model.eval()
    with torch.no_grad():
        return (model(picture).argmax(1) == place).float().mean().item()


def main() -> None:
    """Train and print how often the digit is found."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200, help="steps of the optimiser; default 200")
    steps = parser.parse_args().steps
    print(f"models: {len(crate_kernels.integrations.timm.__all__)}")
    print(f"found in {train(steps):.1%} of new pictures; by chance 6.2%")


if __name__ == "__main__":
    main()
