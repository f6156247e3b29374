"""Images with labels, from a folder or the digits of the package's demo; which of them, and how moved, is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

KINDS = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".webp"}
SIDES = 0.35, 1.0  # share of an image's shorter side that a crop keeps in training, from and to
MEAN, STD = 0.45, 0.25  # of photographs, roughly


class Images(Dataset[tuple[Tensor, Tensor]]):
    """Images to learn from; an item is asked for by its place and a seed, which moves it.

    Attributes:
        size, channels, classes: of the images.
        patch: side of a patch that suits them; None for the model's own.
    """

    size: int
    channels: int
    classes: int
    patch: int | None = None

    def __len__(self) -> int:
        raise NotImplementedError

    def held_out(self) -> Sequence[tuple[Tensor, Tensor]]:
        """Return images and labels to be tested on, as they are."""
        raise NotImplementedError


class Digits(Images):
    """The digits of the demo, each cropped at a drawn place."""

    def __init__(self) -> None:
        from crate_kernels.experiments.demo import data

        self.digits = data.load()
        self.size, self.channels, self.classes = self.digits.image_size, 1, 10
        self.patch = self.digits.patch_size

    def __len__(self) -> int:
        return len(self.digits.train_labels)

    def __getitem__(self, drawn: tuple[int, int]) -> tuple[Tensor, Tensor]:
        place, seed = drawn
        generator = torch.Generator().manual_seed(seed)
        row, column = torch.randint(2 * self.digits.margin + 1, (2,), generator=generator).tolist()
        image = self.digits.train_images[place][:, row : row + self.size, column : column + self.size]
        return image, self.digits.train_labels[place]

    def held_out(self) -> Sequence[tuple[Tensor, Tensor]]:
        images = self.digits.crop(self.digits.test_images)
        return list(zip(images, self.digits.test_labels, strict=True))


class Folder(Images):
    """Images of a folder, which has one folder per class, or ``train`` and ``val`` that do.

    Args:
        folder: the folder.
        size: side of the square that an image becomes.
    """

    def __init__(self, folder: Path, size: int) -> None:
        learnt = folder / "train" if (folder / "train").is_dir() else folder
        names = sorted(path.name for path in learnt.iterdir() if path.is_dir())
        self.files = _files(learnt, names)
        self.others = _files(folder / "val", names) if learnt != folder and (folder / "val").is_dir() else []
        if not self.files:
            raise SystemExit(f"--images {folder} must have a folder of images per class, got none")
        self.size, self.channels, self.classes = size, 3, len(names)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, drawn: tuple[int, int]) -> tuple[Tensor, Tensor]:
        place, seed = drawn
        path, label = self.files[place]
        draws = torch.rand(4, generator=torch.Generator().manual_seed(seed)).tolist()
        return _read(path, self.size, draws), torch.tensor(label)

    def held_out(self) -> Sequence[tuple[Tensor, Tensor]]:
        return _Read(self.others, self.size)


class _Read(Sequence[tuple[Tensor, Tensor]]):
    """Images of a list of files, read when they are asked for."""

    def __init__(self, files: list[tuple[Path, int]], size: int) -> None:
        self.files, self.size = files, size

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
        path, label = self.files[place]
        return _read(path, self.size, None), torch.tensor(label)


def _files(folder: Path, classes: list[str]) -> list[tuple[Path, int]]:
    """Return the images of all classes with their labels, in the order of their names."""
    return [
        (path, label)
        for label, name in enumerate(classes)
        for path in sorted((folder / name).rglob("*"))
        if path.suffix.lower() in KINDS
    ]


def _read(path: Path, size: int, draws: list[float] | None) -> Tensor:
    """Return an image (3, size, size): a drawn square of it, maybe mirrored, or the middle."""
    from PIL import Image

    with Image.open(path) as image:
        image = image.convert("RGB")
    low, high = SIDES
    share, left, top, mirror = draws or (high, 0.5, 0.5, 1.0)
    side = min(image.size) * (low + (high - low) * share if draws else 1.0)
    x, y = (image.width - side) * left, (image.height - side) * top
    image = image.resize((size, size), Image.Resampling.BILINEAR, box=(x, y, x + side, y + side))
    pixels = torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1).float() / 255
    return (pixels.flip(2) if mirror < 0.5 else pixels).sub(MEAN).div(STD)
