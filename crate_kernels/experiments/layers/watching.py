"""Training with measurements at chosen epochs, and the tokens at the end."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from crate_kernels._core import files
from crate_kernels.experiments.common.fit import Unusable, advance, resume
from crate_kernels.experiments.common.trial import Trial
from crate_kernels.experiments.demo import whitebox
from crate_kernels.experiments.demo.data import Digits
from crate_kernels.experiments.demo.training import Training, steps_per_epoch


def train(training: Training, trial: Trial, looks: tuple[int, ...]) -> dict[int, dict[str, Any]]:
    """Train to the end, from the checkpoint in the folder if there is one; return the measurements by epoch.

    Raises:
        Unusable, KeyboardInterrupt: as in ``common.fit.train``.
    """
    seen: dict[int, dict[str, Any]] = {}
    path, epoch = trial.folder / "seen.json", steps_per_epoch(training.settings, training.digits)
    images = training.digits.crop(training.digits.test_images)[:250].to(trial.device)

    def measure() -> float:
        accuracy = training.digits.accuracy(training.model, trial.device)
        layers = whitebox.measure(training.model, training.digits, trial.device).summary()
        layers["added_by_mssa"] = added(training.model, images)
        seen[training.done // epoch] = {**layers, "accuracy": accuracy}
        files.put(path, json.dumps(seen).encode())
        return accuracy

    training.watch, training.watch_at = measure, {look * epoch for look in looks}
    if not trial.fresh and resume(training, trial.folder):
        trial.say(f"Resuming after step {training.done} of {training.total}")
        seen.update(_read(path))
    advance(training, trial)
    return seen


def _read(path: Path) -> dict[int, dict[str, Any]]:
    try:
        return {int(epoch): found for epoch, found in json.loads(path.read_text()).items()}
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise Unusable(f"{path} cannot be read ({error})") from None


@torch.no_grad()
def added(model: Any, images: Tensor) -> list[float]:
    """Return, per layer, the deviation of what MSSA adds to the tokens, over that of the tokens."""
    found: list[float] = []

    def note(_module: nn.Module, args: tuple[Tensor], update: Tensor) -> None:
        found.append((update.std() / args[0].std()).item())

    hooks = [layer[0].register_forward_hook(note) for layer in model.transformer.layers]
    try:
        model.eval()(images)
    finally:
        for hook in hooks:
            hook.remove()
    return found


@dataclass(frozen=True, eq=False)
class WatchedTokens:
    """The tokens of a few digits in every layer.

    Attributes:
        images: (n, side, side), as the model saw them. labels: (n,).
        codes: output of ISTA for the first digit, (depth, tokens, dim), class token first.
        colours: the first three principal components per layer, over the projected patch tokens of all digits,
            each scaled to [0, 1]: (depth, n, rows, columns, 3).
        explained: share of the variance in these three components, (depth,).
        gram: absolute cosines of the learned directions, (depth, heads * dim_head, heads * dim_head).
    """

    images: Tensor
    labels: Tensor
    codes: Tensor
    colours: Tensor
    explained: list[float]
    gram: Tensor


@torch.no_grad()
def tokens(training: Training, digits: Digits, shown: tuple[int, ...]) -> WatchedTokens:
    """Return the tokens of the first test image of each of ``shown``."""
    model: Any = training.model.eval()
    chosen = digits.first(shown)
    images = digits.crop(digits.test_images[chosen])
    codes: list[Tensor] = []
    hooks = [
        layer[1].register_forward_hook(lambda _module, _args, out: codes.append(out[0].cpu()))
        for layer in model.transformer.layers
    ]
    try:
        model(images.to(training.device))
    finally:
        for hook in hooks:
            hook.remove()
    depth, side = model.config.depth, digits.side
    found = [_components(model.get_last_key(images.to(training.device), depth=i)[:, 1:].cpu()) for i in range(depth)]
    return WatchedTokens(
        images[:, 0],
        digits.test_labels[chosen],
        torch.stack(codes),
        torch.stack([colours.unflatten(1, (side, side)) for colours, _ in found]),
        [explained for _, explained in found],
        whitebox.measure(model, digits, training.device).gram,
    )


def _components(patches: Tensor) -> tuple[Tensor, float]:
    """Return the first three principal components of (n, patches, dim), each in [0, 1], and their share."""
    from sklearn.decomposition import PCA
    from sklearn.preprocessing import minmax_scale

    components: Any = PCA(3, svd_solver="full")
    rows = components.fit_transform(patches.flatten(0, 1).double().numpy())
    scaled = torch.from_numpy(minmax_scale(rows)).clamp(0, 1).unflatten(0, patches.shape[:2])
    return scaled, float(components.explained_variance_ratio_.sum())
