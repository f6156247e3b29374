"""Modules for sparse coding: a square dictionary (ISTA) and an overcomplete one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from crate_kernels._core import checks
from crate_kernels.nn import _maps, _symbols
from crate_kernels.ops.ista import ista, ista_overcomplete

_LEARNED = ("step_size", "lambd", "bias")


def _names(owner: str, learned: Iterable[str]) -> tuple[str, ...]:
    if isinstance(learned, str):
        raise TypeError(f"{owner}: learned must be a tuple of names, got the string {learned!r}")
    if not isinstance(learned, Iterable):
        raise TypeError(f"{owner}: learned must be a tuple of names, got {type(learned).__name__}")
    return tuple(learned)


def _terms(
    module: Any, owner: str, width: int, learned: Iterable[str], per_channel: bool, factory: dict, **numbers: Any
) -> None:
    """Give a module its step size, threshold and bias: parameters if learned, of one number or of the width."""
    learned = _names(owner, learned)
    unknown = [name for name in learned if name not in _LEARNED]
    if unknown:
        raise ValueError(f"{owner}: learned must be among {', '.join(_LEARNED)}, got {unknown[0]!r}")
    shape = (width,) if checks.flag(owner, "per_channel", per_channel) else ()
    if shape and not learned:
        raise ValueError(f"{owner}: learned must name a parameter with per_channel=True, got none")
    for name, value in {**numbers, "bias": 0.0}.items():
        number = checks.number(owner, name, value, minimum=None if name in learned else 0.0)
        if name in learned:
            parameter = torch.empty(shape, **factory).fill_(number)
            module.register_parameter(name, nn.Parameter(parameter))
        else:
            setattr(module, name, None if name == "bias" else number)


def _describe(module: Any, sizes: str, **options: tuple[object, object]) -> str:
    """Return a module's arguments for ``print``: sizes and numbers, and what is not its default."""
    terms = {name: getattr(module, name) for name in _LEARNED}
    learned = {name: value for name, value in terms.items() if isinstance(value, Tensor)}
    options["learned"] = (tuple(learned), ())
    options["per_channel"] = (any(value.dim() > 0 for value in learned.values()), False)
    options["data_format"] = (module.data_format, _maps.LAST)
    parts = [f"{name}={value}" for name, value in terms.items() if isinstance(value, float)]
    parts += [f"{name}={value!r}" for name, (value, default) in options.items() if value != default]
    return ", ".join([sizes, *parts])


class ISTA(nn.Module):
    """Take one proximal step of sparse coding against a square dictionary.

    With D the ``weight`` acting on tokens (CRATE, Yu et al. 2023, arXiv 2306.01129):

    - ``prox="nonnegative"``, published: ``relu(x + step_size D^T(x - D x) - step_size lambd)``.
    - ``prox="soft"``: the same step with the two-sided soft threshold (Eq. 116-117).
    - ``prox="mm"``, majorisation-minimisation: ``relu((1 + 4/(9(1+alpha))) D^T x - 4 lambd/(9 alpha))``
      (Eq. 92).

    Parameters: ``weight`` (dim, dim). ``step_size`` and ``lambd`` are plain floats and not in checkpoints, unless
    ``learned``. A learned ``bias`` is added before the threshold is applied. Then the step is composed from PyTorch's
    operators. To keep a learned number positive, register a parametrization of ``torch.nn.utils.parametrize`` on it.

    Args:
        dim: width of a token.
        step_size: size of the gradient step; unused by ``"mm"``. Default 0.1.
        lambd: weight of the l1 norm; default 0.1 (CRATE-MAE 0.5).
        prox: the kind of step; default ``"nonnegative"``.
        alpha: dim / (N eps^2) for ``"mm"``; default 1, which is eps^2 = dim / N.
        learned: names among ``"step_size"``, ``"lambd"`` and ``"bias"`` that are parameters; default none.
        per_channel: give those learned (dim,) numbers each, instead of one; default False.
        data_format: ``"channels_last"``: tokens (..., dim); ``"channels_first"``: feature maps (batch, dim,
            height, width), whose pixels are the tokens. Default ``"channels_last"``.
        backend: as in ``crate_kernels.ista``; default None, the best available.
        device, dtype: of the parameters, as in ``torch.nn.Linear``; default PyTorch's defaults.
    """

    step_size: float | Tensor
    lambd: float | Tensor
    bias: Tensor | None

    @checks.suggesting
    def __init__(
        self,
        dim: int,
        *,
        step_size: float = 0.1,
        lambd: float = 0.1,
        prox: str = "nonnegative",
        alpha: float = 1.0,
        learned: Iterable[str] = (),
        per_channel: bool = False,
        data_format: str = "channels_last",
        backend: str | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        if prox not in ("nonnegative", "soft", "mm"):
            raise ValueError(f"ISTA: prox must be 'nonnegative', 'soft' or 'mm', got {prox!r}")
        if checks.number("ISTA", "alpha", alpha) <= 0:
            raise ValueError(f"ISTA: alpha must be > 0, got {alpha}")
        self.prox = prox
        self.alpha = float(alpha)
        self.data_format = _maps.check_format("ISTA", data_format)
        self.backend = checks.backend("ISTA", backend)
        checks.integer("ISTA", "dim", dim, minimum=1)
        learned = _names("ISTA", learned)
        if prox == "mm" and "step_size" in learned:
            raise ValueError("ISTA: learned must not have 'step_size' with prox='mm', which has no step size")
        _terms(self, "ISTA", dim, learned, per_channel, factory, step_size=step_size, lambd=lambd)
        self.weight = nn.Parameter(nn.init.kaiming_uniform_(torch.empty(dim, dim, **factory)))

    @checks.closed
    def forward(self, x: Tensor, **unknown: NoReturn) -> Tensor:
        """Return the next code of ``x`` (..., dim), same shape; of maps with ``data_format="channels_first"``."""
        if isinstance(x, _symbols.Proxy):
            return _symbols.leaf(self, x)
        if isinstance(unknown, dict) and unknown:
            checks.no_keyword(ISTA.forward, unknown)
        if self.data_format == _maps.FIRST:
            x, size = _maps.tokens_of("ISTA", x, self.weight.shape[0])
            return _maps.map_of(self._step(x), size)
        _maps.refuse_map("ISTA", x, self.weight.shape[0])
        return self._step(x)

    def _step(self, x: Tensor) -> Tensor:
        if self.prox == "mm":
            factor = 1.0 + 4.0 / (9.0 * (1.0 + self.alpha))
            checks.tensor("ISTA", "x", x, None, "(..., dim)")
            update = factor * (x @ self.weight) - 4.0 * self.lambd / (9.0 * self.alpha)
            return torch.relu(update if self.bias is None else update + self.bias)
        options = {"step_size": self.step_size, "lambd": self.lambd, "bias": self.bias, "backend": self.backend}
        return ista(x, self.weight, nonnegative=self.prox == "nonnegative", **options)

    def extra_repr(self) -> str:
        """Return the arguments, for ``print``."""
        return _describe(self, str(len(self.weight)), prox=(self.prox, "nonnegative"), alpha=(self.alpha, 1.0))


class OvercompleteISTA(nn.Module):
    """Code a token in an overcomplete dictionary by a few proximal steps, then decode it.

    From ``z_0 = 0``, ``z <- relu(z + step_size D^T(x - D z) - step_size lambd)`` ``steps`` times, and the
    output is ``D1 z`` (CRATE-alpha, Yang et al. 2024, arXiv 2405.20299). The block adds the residual.

    Parameters: ``D`` (dim, hidden) and, unless tied, the decoder ``D1`` (dim, hidden); ``step_size``, ``lambd`` and
    ``bias`` if ``learned``, as in ``ISTA``, each for all steps.

    Args:
        dim: width of a token.
        hidden: number of atoms; default ``4 * dim``.
        steps: number of proximal steps; default 2.
        tied: use ``D`` itself as the decoder; default False.
        step_size: size of the gradient steps; default 0.1.
        lambd: weight of the l1 norm; default 0.1.
        learned: names among ``"step_size"``, ``"lambd"`` and ``"bias"`` that are parameters; default none.
        per_channel: give those learned (hidden,) numbers each, instead of one; default False.
        data_format: ``"channels_last"``: tokens (..., dim); ``"channels_first"``: feature maps (batch, dim,
            height, width), whose pixels are the tokens. Default ``"channels_last"``.
        backend: as in ``crate_kernels.ista_overcomplete``; default None, the best available.
        device, dtype: of the parameters, as in ``torch.nn.Linear``; default PyTorch's defaults.
    """

    step_size: float | Tensor
    lambd: float | Tensor
    bias: Tensor | None

    @checks.suggesting
    def __init__(
        self,
        dim: int,
        hidden: int | None = None,
        steps: int = 2,
        tied: bool = False,
        *,
        step_size: float = 0.1,
        lambd: float = 0.1,
        learned: Iterable[str] = (),
        per_channel: bool = False,
        data_format: str = "channels_last",
        backend: str | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        checks.integer("OvercompleteISTA", "dim", dim, minimum=1)
        atoms = checks.integer("OvercompleteISTA", "hidden", 4 * dim if hidden is None else hidden, minimum=1)
        self.steps = checks.integer("OvercompleteISTA", "steps", steps, minimum=1)
        _terms(self, "OvercompleteISTA", atoms, learned, per_channel, factory, step_size=step_size, lambd=lambd)
        self.data_format = _maps.check_format("OvercompleteISTA", data_format)
        self.backend = checks.backend("OvercompleteISTA", backend)
        self.D = nn.Parameter(nn.init.kaiming_uniform_(torch.empty(dim, atoms, **factory)))
        self.D1: nn.Parameter | None
        if checks.flag("OvercompleteISTA", "tied", tied):
            self.register_parameter("D1", None)
        else:
            self.D1 = nn.Parameter(nn.init.kaiming_uniform_(torch.empty(dim, atoms, **factory)))

    @checks.closed
    def forward(self, x: Tensor, **unknown: NoReturn) -> Tensor:
        """Return the decoded code of ``x`` (..., dim), same shape; of maps with ``data_format="channels_first"``."""
        if isinstance(x, _symbols.Proxy):
            return _symbols.leaf(self, x)
        if isinstance(unknown, dict) and unknown:
            checks.no_keyword(OvercompleteISTA.forward, unknown)
        size = None
        if self.data_format == _maps.FIRST:
            x, size = _maps.tokens_of("OvercompleteISTA", x, self.D.shape[0])
        else:
            _maps.refuse_map("OvercompleteISTA", x, self.D.shape[0])
        options = {"step_size": self.step_size, "lambd": self.lambd, "bias": self.bias, "backend": self.backend}
        return _maps.map_of(ista_overcomplete(x, self.D, self.D1, steps=self.steps, **options), size)

    def extra_repr(self) -> str:
        """Return the arguments, for ``print``."""
        return _describe(self, "{}, {}, {}".format(*self.D.shape, self.steps), tied=(self.D1 is None, False))
