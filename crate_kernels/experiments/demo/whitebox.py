"""Measurements of a CRATE that have a meaning because each layer is an optimisation step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from crate_kernels import analysis
from crate_kernels.experiments.demo.data import Digits
from crate_kernels.models import CRATE


@dataclass(frozen=True, eq=False)
class Layers:
    """Measurements of every layer on the test images.

    Attributes:
        rate: coding rate Rc of the tokens after MSSA, (depth, images).
        sparsity: share of nonzeros after ISTA, (depth, images).
        coherence: overlap of the heads' subspaces, (depth, heads, heads).
        gram: absolute cosines of the learned directions, (depth, heads * dim_head, heads * dim_head).
    """

    rate: Tensor
    sparsity: Tensor
    coherence: Tensor
    gram: Tensor

    def summary(self) -> dict[str, Any]:
        """Return means and standard deviations per layer, ready for JSON."""
        apart = ~torch.eye(self.coherence.shape[-1], dtype=torch.bool)
        return {
            "coding_rate": self.rate.mean(-1).tolist(),
            "coding_rate_std": self.rate.std(-1).tolist(),
            "nonzeros": self.sparsity.mean(-1).tolist(),
            "nonzeros_std": self.sparsity.std(-1).tolist(),
            "coherence_between_heads": [layer[apart].mean().item() for layer in self.coherence],
        }


def measure(model: CRATE, digits: Digits, device: torch.device) -> Layers:
    """Measure a model on all test images."""
    chunks = [analysis.layerwise(model, images.to(device)) for images in digits.crop(digits.test_images).split(250)]
    depth = model.config.depth
    weights = [cast(Any, model.transformer.layers[index])[0].fn.qkv.weight.detach().cpu() for index in range(depth)]
    return Layers(
        torch.stack([torch.cat([chunk[i].rate_half.cpu() for chunk in chunks]) for i in range(depth)]).double(),
        torch.stack([torch.cat([chunk[i].sparsity.cpu() for chunk in chunks]) for i in range(depth)]).double(),
        torch.stack([analysis.subspace_coherence(weight, model.config.heads) for weight in weights]),
        torch.stack([analysis.subspace_gram(weight) for weight in weights]),
    )


@dataclass(frozen=True, eq=False)
class DigitAttention:
    """Attention of the class token in the last layer, on a few test digits.

    Attributes:
        images: (n, side, side), as the model saw them.
        labels, predictions: (n,).
        itself: weight of the class token on itself, (n, heads).
        patches: weight of the class token on each patch, (n, heads, rows, columns).
    """

    images: Tensor
    labels: Tensor
    predictions: Tensor
    itself: Tensor
    patches: Tensor


@torch.no_grad()
def class_attention(model: CRATE, digits: Digits, device: torch.device, classes: tuple[int, ...]) -> DigitAttention:
    """Return the attention on the first test image of each of ``classes``."""
    chosen = digits.first(classes)
    images = digits.crop(digits.test_images[chosen])
    model.eval()
    weights = model.get_last_selfattention(images.to(device), layer=model.config.depth - 1)[:, :, 0].cpu()
    return DigitAttention(
        images[:, 0],
        digits.test_labels[chosen],
        model(images.to(device)).argmax(-1).cpu(),
        weights[..., 0],
        weights[..., 1:].unflatten(-1, (digits.side, digits.side)),
    )
