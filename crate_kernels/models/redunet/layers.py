"""One step of rate reduction as a layer, on vectors or, frequency by frequency, on signals and images.

A layer is a gradient step on the rate reduction of its input (ReduNet, Chan et al. 2021, arXiv 2105.10446)::

    E   = c   (I + c   sum_i z_i z_i^H)^-1              c   = channels / (m eps)
    C_j = c_j (I + c_j sum_(i in class j) z_i z_i^H)^-1  c_j = channels / (m_j eps)
    p_j = softmax_j(-lmbda |C_j z|)                      the layer's own estimate of the class
    z  <- (z + eta (E z - sum_j gam_j p_j C_j z)) / |.|,  gam_j = m_j / m

The book writes eps^2 where the published code, followed here, writes eps. A shift-invariant layer takes the same step
at each frequency of the signal's Fourier transform: its operators are circular convolutions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from crate_kernels._core import checks

_SMALLEST_NORM = 1e-8


def normalize(z: Tensor) -> Tensor:
    """Divide each sample (m, ...) by its norm, or by 1e-8 if the norm is smaller."""
    norm = torch.linalg.vector_norm(z.flatten(1), dim=1).clamp(min=_SMALLEST_NORM)
    return z / norm.view(-1, *[1] * (z.dim() - 1))


def frequencies_first(z: Tensor) -> Tensor:
    """View (m, channels, *size) as (*size, m, channels): one matrix of samples per frequency."""
    return z.permute(*range(2, z.dim()), 0, 1)


def covariance(rows: Tensor) -> Tensor:
    """Return ``sum_i z_i z_i^H`` (..., channels, channels) of samples as rows (..., m, channels)."""
    return rows.mT @ rows.conj()


class Operator(nn.Module):
    """A linear operator on channels (E or a C_j), one matrix per frequency: ``weight`` (channels, channels, *size).

    Complex unless ``size`` is empty. A new one is random, as published.
    """

    def __init__(self, channels: int, *size: int) -> None:
        super().__init__()
        dtype = torch.complex(torch.empty(0), torch.empty(0)).dtype if size else None
        weight = torch.randn(channels, channels, *size, dtype=dtype) if size else torch.empty(channels, channels)
        self.weight = nn.Parameter(weight if size else nn.init.kaiming_uniform_(weight, a=5**0.5))

    def forward(self) -> Tensor:
        """Return the weight, which accelerate may have to fetch for a call."""
        return self.weight


class ReduLayer(nn.Module):
    """A layer of ReduNet on ``(m, channels, *size)``, built from labelled data instead of trained.

    Parameters: ``gam`` (num_classes,), ``E.weight`` and ``Cs.{j}.weight`` ``(channels, channels, *size)``.

    Args:
        eta: step size.
        eps: distortion (the book's eps^2).
        lmbda: sharpness of the class estimate.
        num_classes: number of classes.
        channels, size: shape of a sample; ``size`` is empty for vectors.
    """

    def __init__(
        self, eta: float, eps: float, lmbda: float, num_classes: int, channels: int, size: tuple[int, ...] = ()
    ) -> None:
        super().__init__()
        name = type(self).__name__
        self.eta = checks.number(name, "eta", eta)
        self.eps = checks.number(name, "eps", eps)
        if self.eps <= 0:
            raise ValueError(f"{name}: eps must be > 0, got {eps}")
        self.lmbda = checks.number(name, "lmbda", lmbda)
        self.num_classes = checks.integer(name, "num_classes", num_classes, minimum=1)
        self.shape = tuple(checks.integer(name, "dimensions", each, minimum=1) for each in (channels, *size))
        # Published: trainable on vectors, fixed on signals and images.
        self.gam = nn.Parameter(torch.full((num_classes,), 1.0 / num_classes), requires_grad=not size)
        self.E = Operator(*self.shape)
        self.Cs = nn.ModuleList(Operator(*self.shape) for _ in range(num_classes))

    @property
    def operators(self) -> Tensor:
        """Stack E, then each C_j, to ``(1 + num_classes, *size, channels, channels)``."""
        weights = [self.E(), *(each() for each in self.Cs)]
        return frequencies_first(torch.stack(weights).flatten(0, 1)).unflatten(-2, (-1, self.shape[0])).movedim(-3, 0)

    def preprocess(self, x: Tensor) -> Tensor:
        """Transform samples ``(m, channels, *size)`` for the layers: to unit norm, then to frequencies."""
        self._check(x)
        z = normalize(x)
        return torch.fft.fftn(z, dim=self._axes, norm="ortho") if self._axes else z

    def postprocess(self, z: Tensor) -> Tensor:
        """Undo the transform of ``preprocess``; scale to unit norm."""
        if not self._axes:
            return normalize(z)
        return normalize(torch.fft.ifftn(z, dim=self._axes, norm="ortho")).real

    @property
    def _axes(self) -> tuple[int, ...]:
        return tuple(range(2, 1 + len(self.shape)))

    def _check(self, z: Tensor) -> None:
        if z.dim() != 1 + len(self.shape) or tuple(z.shape[1:]) != self.shape:
            wanted = ", ".join(str(each) for each in self.shape)
            raise ValueError(f"{type(self).__name__}: input must be (m, {wanted}), got {tuple(z.shape)}")

    @torch.no_grad()
    def init(self, z: Tensor, y: Tensor) -> None:
        """Build the layer from preprocessed samples ``(m, channels, *size)`` and labels (m,)."""
        operators, gam = self._build(z, y)
        self._set(operators)
        self.gam.copy_(gam)

    @torch.no_grad()
    def update(self, z: Tensor, y: Tensor, tau: float) -> None:
        """Move E and every C_j by the fraction ``tau`` towards those of these samples; gam does not change."""
        operators, _ = self._build(z, y)
        current = self.operators
        self._set(current + tau * (operators - current))

    @torch.no_grad()
    def zero(self) -> None:
        """Set E and every C_j to zero."""
        self._set(torch.zeros_like(self.operators))

    def _build(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the operators and gam of labelled samples; every frequency is solved in one batch.

        Double precision: a Gram matrix squares the condition number of the samples, and layers are built only once.
        """
        self._check(z)
        labels = check_labels(type(self).__name__, y, len(z), self.num_classes)
        counts = torch.bincount(labels, minlength=self.num_classes)
        if not bool((counts > 0).all()):
            empty = (counts == 0).nonzero().flatten().tolist()
            raise ValueError(f"{type(self).__name__}: y must hold every class, got none of {empty}")
        rows, channels = frequencies_first(z.to(torch.promote_types(z.dtype, torch.float64))), self.shape[0]
        classes = torch.stack([covariance(rows[..., labels == j, :]) for j in range(self.num_classes)])
        covariances = torch.cat((classes.sum(0, keepdim=True), classes))
        sizes = torch.cat((counts.sum(0, keepdim=True), counts)).double()
        scale = (channels / (sizes * self.eps)).view(-1, *[1] * (covariances.dim() - 1))
        identity = torch.eye(channels, dtype=rows.dtype, device=rows.device)
        factor = torch.linalg.cholesky(identity + scale * covariances)
        return scale * torch.cholesky_inverse(factor), counts / len(labels)

    def _set(self, operators: Tensor) -> None:
        weights = [cast(Operator, module).weight for module in (self.E, *self.Cs)]
        if weights[0].is_meta:
            name = type(self).__name__
            raise ValueError(f"{name}: weights must be in memory to be set, got the meta device: undo offloading first")
        for weight, value in zip(weights, operators, strict=True):
            weight.copy_(value.movedim((-2, -1), (0, 1)))

    def forward(self, z: Tensor, return_y: bool = False) -> Any:
        """Take the step from preprocessed samples ``(m, channels, *size)``.

        Args:
            z: samples from ``preprocess`` or the previous layer.
            return_y: return the estimated classes (m,) too; default False.

        Returns:
            Samples of the shape of ``z``, or a pair of these and the classes.
        """
        self._check(z)
        operators = self.operators
        dtype = torch.promote_types(operators.dtype, z.dtype)
        rows = frequencies_first(z).to(dtype)
        # Published: x W^T on vectors, sum_i x_i conj(W_ih) at a frequency. Built operators are Hermitian: both are W x.
        moved = rows @ (operators.to(dtype).conj() if self._axes else operators.to(dtype).mT)
        expanded, compressed = moved[0], moved[1:]
        over = tuple(d for d in range(1, compressed.dim()) if d != compressed.dim() - 2)
        norms = torch.linalg.vector_norm(compressed, dim=over).clamp(min=_SMALLEST_NORM)  # (num_classes, m)
        estimate = torch.softmax(-self.lmbda * norms, dim=0)
        weights = (self.gam.unsqueeze(-1) * estimate).unsqueeze(-1)  # (num_classes, m, 1)
        weights = weights.view(weights.shape[0], *[1] * len(self._axes), *weights.shape[1:])
        step = rows + self.eta * (expanded - (weights * compressed).sum(0))
        out = normalize(step.movedim((-2, -1), (0, 1)))
        return (out, estimate.argmax(0)) if return_y else out


class Vector(ReduLayer):
    """A layer on vectors (m, dimensions)."""

    def __init__(self, eta: float, eps: float, lmbda: float, num_classes: int, dimensions: int) -> None:
        super().__init__(eta, eps, lmbda, num_classes, dimensions)


class Fourier1D(ReduLayer):
    """A shift-invariant layer on signals: preprocessed, (m, channels, timesteps) of frequencies."""

    def __init__(self, eta: float, eps: float, lmbda: float, num_classes: int, dimensions: tuple[int, int]) -> None:
        channels, timesteps = _sizes("Fourier1D", dimensions, "channels, timesteps")
        super().__init__(eta, eps, lmbda, num_classes, channels, (timesteps,))


class Fourier2D(ReduLayer):
    """A shift-invariant layer on images: preprocessed, (m, channels, height, width) of frequencies."""

    def __init__(
        self, eta: float, eps: float, lmbda: float, num_classes: int, dimensions: tuple[int, int, int]
    ) -> None:
        channels, height, width = _sizes("Fourier2D", dimensions, "channels, height, width")
        super().__init__(eta, eps, lmbda, num_classes, channels, (height, width))


def _sizes(owner: str, dimensions: object, wanted: str) -> Sequence[int]:
    """Require one size per name in ``wanted``."""
    if not isinstance(dimensions, (tuple, list)) or len(dimensions) != wanted.count(",") + 1:
        raise ValueError(f"{owner}: dimensions must be ({wanted}), got {dimensions!r}")
    return dimensions


def check_labels(owner: str, y: object, count: int, num_classes: int) -> Tensor:
    """Require integer labels (count,) in [0, num_classes)."""
    if not isinstance(y, Tensor):
        raise TypeError(f"{owner}: y must be a Tensor, got {type(y).__name__}")
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise ValueError(f"{owner}: y must have an integer dtype, got {y.dtype}")
    if tuple(y.shape) != (count,):
        raise ValueError(f"{owner}: y must be (m,) = ({count},), got {tuple(y.shape)}")
    if count == 0 or int(y.min()) < 0 or int(y.max()) >= num_classes:
        got = [] if count == 0 else [int(y.min()), int(y.max())]
        raise ValueError(f"{owner}: y must hold labels in 0..{num_classes - 1}, got the range {got}")
    return y.long()


def complex_operators(state: dict[str, Any]) -> dict[str, Any]:
    """Return the weights with each E and C_j complex; the input may have real pairs in a last axis of 2 instead."""

    def convert(name: str, value: Any) -> Any:
        pairs = isinstance(value, Tensor) and value.is_floating_point() and value.shape[-1:] == (2,)
        if not pairs or not name.endswith("weight"):
            return value
        return torch.view_as_complex(value.contiguous())

    return {name: convert(name, value) for name, value in state.items()}
