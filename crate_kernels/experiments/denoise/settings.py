"""Sizes of the experiment."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mixture:
    """A mixture of low-rank Gaussians (AoT, Definition 2.1), and the network that denoises it.

    Attributes:
        tokens, clusters: N and K, equally many tokens per cluster. rank: p, of each subspace. dim: d, at least K p.
        noise: delta, the deviation of the part in the other subspaces. eta: step size of a layer.
        layers: their number. threshold: tau of Theorem 3.1; None is softmax, as in the paper's figure.
        form: ``"unscaled"``, the scores as in the theorem; ``"scaled"``, by p^-1/2 as in the models;
            ``"normalised"``, scaled and of layer-normalised tokens, as in the language models.
        exact: number of layers over which Theorem 3.1 is checked to rounding. Its conditions end when the noise,
            which the steps do not shrink, also passes tau.
    """

    tokens: int
    clusters: int
    rank: int
    dim: int
    noise: float
    eta: float = 0.5
    layers: int = 16
    threshold: float | None = None
    form: str = "unscaled"
    exact: int = 0


_THEOREM = (
    Mixture(512, 4, 64, 256, noise=0.03, layers=10, threshold=0.6, exact=6),
    Mixture(128, 2, 32, 64, noise=0.03, layers=10, threshold=0.6, exact=4),
)


# The paper does not say which of these its figure shows: all are run.
_FORMS = ("unscaled", "scaled", "normalised")
# Read off the axes of AoT's figure (Buchanan, Pai, Wang and Ma 2025, "Attention-Only Transformer Architecture",
# has it too): the SNR at the first and at the last of its 13 points, one point per layer.
FIGURE = {0.2: (1.55, 2.62), 0.5: (1.63, 2.73)}


def _figure(tokens: int, clusters: int, rank: int, dim: int, layers: int, eta: float) -> tuple[Mixture, ...]:
    """Return one mixture per noise level of the paper's figure and per form."""
    return tuple(
        Mixture(tokens, clusters, rank, dim, noise=noise, eta=eta, layers=layers, form=form)
        for form in _FORMS
        for noise in FIGURE
    )


@dataclass(frozen=True)
class DenoiseSettings:
    """The mixtures to run: the theorem's, then the figure's, each with ``draws`` draws."""

    theorem: tuple[Mixture, ...] = _THEOREM
    # The figure's sizes and step are unknown. With a step of 0.05 the ratio grows over 12 layers as in the figure.
    softmax: tuple[Mixture, ...] = _figure(512, 4, 64, 256, 12, 0.05)
    draws: int = 5


PRESETS = {
    "default": DenoiseSettings(),
    # The figure's noise levels and number of layers. Its other sizes are unknown: these are larger ones.
    "paper": DenoiseSettings(softmax=_figure(2048, 8, 64, 512, 12, 0.05)),
    "quick": DenoiseSettings(theorem=_THEOREM[1:], softmax=_figure(64, 2, 16, 32, 3, 0.05), draws=2),
}
